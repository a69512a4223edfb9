"""Which process a file means: it may have ended long ago, and its number been given anew."""

from __future__ import annotations

import os
import signal
import socket
import time
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from hpc_train.errors import TryAgainError

_POLL_S = 0.02


@dataclass(frozen=True)
class Process:
    """A process as no other ever is: machine (as booted), container, number, and start in clock ticks."""

    host: str
    boot_id: str
    #: The namespace that ``pid`` counts in; differs in a container.
    pid_namespace: str
    pid: int
    start_ticks: int

    @classmethod
    def of(cls, pid: int) -> Process | None:
        """Return the living process ``pid`` of this machine, or None where there is none."""
        start_ticks = _start_ticks(pid)
        if start_ticks is None:
            return None
        return cls(socket.gethostname(), _boot_id(), _pid_namespace(), pid, start_ticks)

    @classmethod
    def current(cls) -> Process:
        process = cls.of(os.getpid())
        assert process is not None, "/proc shows no process of ours"
        return process

    @classmethod
    def from_json(cls, data: object) -> Process | None:
        """Read what ``to_json`` wrote; None where it is something else."""
        types = {"host": str, "boot_id": str, "pid_namespace": str, "pid": int, "start_ticks": int}
        if not isinstance(data, dict) or any(type(data.get(key)) is not kind for key, kind in types.items()):
            return None
        return cls(**{key: data[key] for key in types})

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def is_alive(self) -> bool | None:
        """Tell whether it lives; None where that can't be seen from here: another machine or container."""
        if self.boot_id != _boot_id():
            # The same name after another boot is this machine, restarted.
            return False if self.host == socket.gethostname() else None
        if self.pid_namespace != _pid_namespace():
            return None
        return _start_ticks(self.pid) == self.start_ticks

    def kill(self) -> None:
        self.send(signal.SIGKILL)

    def send(self, number: int) -> None:
        """Send a signal if it still lives. A process that took over its number is safe."""
        try:
            descriptor = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return
        try:
            if self.is_alive():
                signal.pidfd_send_signal(descriptor, number)
        except ProcessLookupError:
            pass
        finally:
            os.close(descriptor)

    def wait(self, limit_s: float) -> None:
        """Wait until it is gone. Raises TryAgainError after ``limit_s``."""
        deadline = time.monotonic() + limit_s
        while self.is_alive():
            if time.monotonic() > deadline:
                raise TryAgainError(
                    f"process {self.pid} has not ended {limit_s:g} s after SIGKILL; try again"
                )
            time.sleep(_POLL_S)


def _start_ticks(pid: int) -> int | None:
    """Return field 22 of /proc/PID/stat, or None for one that is gone or has only not been waited for."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = stat.rpartition(")")[2].split()  # the name, in brackets, may hold blanks and brackets
    return None if fields[0] in {"Z", "X"} else int(fields[19])


@cache
def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def _pid_namespace() -> str:
    return os.readlink("/proc/self/ns/pid")  # noqa: PTH115
