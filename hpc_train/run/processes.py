"""Identifies the process that a file names: it may have ended, and its pid may have been reused.

Reads /proc directly instead of through psutil, whose ``create_time()`` is a wall-clock time derived from the
boot time: files of every version record the start in clock ticks, with boot id and PID namespace, which
psutil does not report. If the kernel has pidfds, signals are sent through one, so that they can't reach
another process; psutil checks first and then calls kill.

Also processes that end with their parent, and the end of those below this process, daemons included.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any

from hpc_train.errors import ExitCode, TryAgainError, UserError
from hpc_train.run.file_shapes import decoded, encoded

#: The attempt that a rank belongs to, and its run folder; set by the launcher.
ATTEMPT_VARIABLE = "HPC_TRAIN_ATTEMPT"
FOLDER_VARIABLE = "HPC_TRAIN_RUN_FOLDER"
#: The run folder, in the environment of programs and of the processes that they start.
PROGRAM_VARIABLE = "HPC_TRAIN_RUN"
_POLL_S = 0.02
_Pid = Annotated[int, lambda pid: 0 < pid < 2**31]


def keep_exit_statuses() -> None:
    """Undo an ignored SIGCHLD, which a process inherits from its parent. Main thread only.

    While it is ignored, the kernel discards the exit status of every child, and ``subprocess`` reports 0.
    """
    if signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def exit_code(child: subprocess.Popen[Any], *, block: bool = False) -> int | None:
    """Return the child's exit code, or None while it runs; with ``block`` wait for its end.

    A status that other code in this process has collected counts as a failure; ``Popen`` reports 0.
    """
    if child.returncode is None:
        try:
            os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT | (0 if block else os.WNOHANG))
        except ChildProcessError:
            child.returncode = int(ExitCode.FAILED)
    return child.poll()


def start_in_own_session(command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
    """Start a process that leads its own process group and receives no signals of the terminal.

    If a sandbox refuses setsid, the process remains in this session.
    """
    try:
        return subprocess.Popen(command, start_new_session=True, **options)
    except OSError:
        return subprocess.Popen(command, process_group=0, **options)


@dataclass(frozen=True)
class Process:
    """A unique process: machine (as booted), container, pid, and start in clock ticks."""

    host: str
    boot_id: str
    #: The namespace of ``pid``; differs in a container.
    pid_namespace: str
    pid: _Pid
    start_ticks: int

    @classmethod
    def of(cls, pid: int) -> Process | None:
        """Return the living process ``pid`` of this machine, or None."""
        start_ticks = _start_ticks(pid)
        if start_ticks is None:
            return None
        return cls(socket.gethostname(), _boot_id(), _pid_namespace(), pid, start_ticks)

    @classmethod
    def current(cls) -> Process:
        """Return the process that runs this code."""
        process = cls.of(os.getpid())
        if process is None:
            raise UserError(
                "/proc does not show this process: it is not mounted; mount it, as container runtimes do"
            )
        return process

    @classmethod
    def from_json(cls, data: object) -> Process | None:
        """Parse the result of ``to_json``; None for anything else."""
        return decoded(cls, data)

    def to_json(self) -> dict[str, Any]:
        """Return the JSON form that ``from_json`` reads."""
        return encoded(self)

    def is_alive(self) -> bool | None:
        """Return True if it is alive; None if that can't be determined: another machine or container."""
        if self.boot_id != _boot_id():
            # The same name after another boot is this machine, restarted.
            return False if self.host == socket.gethostname() else None
        if self.pid_namespace != _pid_namespace():
            return None
        return _start_ticks(self.pid) == self.start_ticks

    def is_rank_of(self, run: Path, attempt: int) -> bool:
        """Return True if the process's own environment identifies it as a rank of that attempt.

        Does not trust the file: launchers put attempt and run folder into a rank's environment, which no
        other user can write.
        """
        environment = _environment(self.pid)
        if environment.get(ATTEMPT_VARIABLE.encode()) != str(attempt).encode():
            return False
        place = environment.get(FOLDER_VARIABLE.encode())
        try:
            return place is not None and Path(os.fsdecode(place)).samefile(run)
        except OSError:
            return False

    def send(self, number: int, run: Path, attempt: int) -> bool:
        """Send a signal if it is alive and a rank of that attempt; return whether it was sent.

        Never signals a process that reuses its pid, nor any other process that a file names.
        """
        try:
            descriptor = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return False
        except OSError:  # Linux before 5.3, or a container that refuses the call
            descriptor = None
        try:
            if self.is_rank_of(run, attempt) and self.is_alive():
                if descriptor is not None:
                    signal.pidfd_send_signal(descriptor, number)
                else:
                    os.kill(self.pid, number)  # microseconds after the check
                return True
        except ProcessLookupError:
            pass
        finally:
            if descriptor is not None:
                os.close(descriptor)
        return False

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
    """Return field 22 (start time) of /proc/PID/stat, or None for a process that is gone or a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = stat.rpartition(")")[2].split()  # the name, in parentheses, may contain blanks and parentheses
    return None if fields[0] in {"Z", "X"} else int(fields[19])


def _environment(pid: int, text: str = "") -> dict[bytes, bytes]:
    """Return the environment of a process; empty if it is not readable or does not contain ``text``."""
    try:
        block = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return {}
    if text.encode() not in block:  # most processes: ten times as fast as parsing
        return {}
    return dict(entry.partition(b"=")[::2] for entry in block.split(b"\0"))


@cache
def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def _pid_namespace() -> str:
    return os.readlink("/proc/self/ns/pid")  # noqa: PTH115


_PR_SET_PDEATHSIG, _PR_GET_PDEATHSIG = 1, 2
_PR_SET_CHILD_SUBREAPER = 36
_SHELLS = {"sh", "bash", "dash", "zsh", "ksh"}
#: For killed processes to end: one in a system call of a dead file server may not.
_END_LIMIT_S = 10.0


def die_with(parent: int) -> None:
    """Have the kernel kill this child process as soon as its ``parent`` ends, or exit if it has ended."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if os.getppid() != parent:  # it died before prctl
        os._exit(int(ExitCode.PEER_LOST))


def outlive_parent() -> int | None:
    """Undo the ``die_with`` of the process that started this one, if any; return the parent's pid.

    For a process that has to end others first: it compares ``os.getppid()`` with the result.
    """
    if sys.platform != "linux":
        return None
    parent, libc, death_signal = os.getppid(), ctypes.CDLL(None), ctypes.c_int()
    libc.prctl(_PR_GET_PDEATHSIG, ctypes.byref(death_signal))
    if not death_signal.value:
        return None
    libc.prctl(_PR_SET_PDEATHSIG, 0)
    return parent


def end_program(run: Path, attempt: int) -> None:
    """Kill what is left of a program of that attempt on this machine, whoever its parent is now.

    Processes whose supervisor was killed, such as torchrun's, have no other trace than their environment.
    """
    for entry in Path("/proc").iterdir():
        environment = _environment(int(entry.name), PROGRAM_VARIABLE) if entry.name.isdecimal() else {}
        folder = environment.get(PROGRAM_VARIABLE.encode())
        if folder is not None and folder == environment.get(FOLDER_VARIABLE.encode()):
            process = Process.of(int(entry.name))
            if process is not None and process.pid != os.getpid():
                process.send(signal.SIGKILL, run, attempt)


def end_daemons() -> None:
    """Kill daemonic children; call it before ``os._exit``, which does not end them."""
    with suppress(Exception):  # another thread may be starting one
        for child in multiprocessing.active_children():
            if child.daemon:
                child.kill()


def adopt_orphans() -> None:
    """Become the parent of all processes below this one whose parents end, daemons included."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def reap_orphans(children: Collection[int]) -> None:
    """Collect adopted processes that have ended, but not ``children``, whose exit status others wait for."""
    with suppress(ChildProcessError):
        while ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            if ended.si_pid in children:
                return
            os.waitpid(ended.si_pid, 0)


def children_by_parent() -> dict[int, list[int]]:
    """Return the processes of this machine by their parents, zombies excluded."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with suppress(OSError):
                stat = (entry / "stat").read_text(encoding="utf-8", errors="replace")
                state, parent = stat.rpartition(")")[2].split()[:2]
                if state not in {"Z", "X"}:
                    children.setdefault(int(parent), []).append(int(entry.name))
    return children


def descendants(pid: int) -> list[int]:
    """Return the processes below ``pid``, zombies excluded."""
    children = children_by_parent()
    below = children.pop(pid, [])
    for process in below:  # grows meanwhile
        below += children.pop(process, [])
    return below


def program_processes() -> list[int]:
    """Return the processes below this supervisor of a program, except those of its loggers."""
    return [pid for pid in descendants(os.getpid()) if not _is_of_logger(pid)]


def logger_processes() -> set[int]:
    """Return the processes that loggers of this supervisor have started."""
    return {pid for pid in children_by_parent().get(os.getpid(), ()) if _is_of_logger(pid)}


def _is_of_logger(pid: int) -> bool:
    """Return True if the process has the supervisor's environment; a program's has one variable more."""
    environment = _environment(pid)
    return FOLDER_VARIABLE.encode() in environment and PROGRAM_VARIABLE.encode() not in environment


def end_program_processes(children: Collection[int]) -> int:
    """Kill the ``program_processes``, orphans (``reap_orphans``) included; return how many there were."""
    first = left = program_processes()
    deadline = time.monotonic() + _END_LIMIT_S
    while left and time.monotonic() < deadline:
        for pid in left:
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        reap_orphans(children)
        time.sleep(_POLL_S)
        left = program_processes()
    reap_orphans(children)
    return len(first)


def awaited_commands(pid: int) -> list[int]:
    """Return the process, or the commands for which it waits if it is a shell."""
    children = children_by_parent()

    def commands(process: int) -> list[int]:
        if not _is_shell(process):
            return [process]
        return [command for child in children.get(process, ()) for command in commands(child)]

    return commands(pid)


def _is_shell(pid: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text("utf-8", "replace").strip() in _SHELLS
    return False


def handles(pid: int, number: signal.Signals) -> bool:
    """Return True if the process has a handler of the signal."""
    with suppress(OSError, ValueError):
        for line in Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False
