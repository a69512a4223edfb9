"""Records the state of a process before it is ended: its stacks, and the kernel's information.

Called by ``hang``. A process that is stopped, or whose interpreter is blocked by a C extension, can't write
its stacks; then only /proc has information.
"""

from __future__ import annotations

import faulthandler
import resource
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from hpc_train.run.files import open_regular
from hpc_train.run.processes import Process
from hpc_train.training.distributed.backends import recorded_collectives

#: Maximum number of child processes of a rank that are described.
_MAX_CHILDREN = 64
GONE = "gone"
_STATE_TEXTS = {
    "T": "is stopped (SIGSTOP)",
    "t": "is stopped by a debugger",
    "D": "waits for a disk or a driver and can't be interrupted",
    "Z": "has ended",
    "X": "has ended",
    GONE: "has ended",
    "R": "runs without letting Python's other threads run",
    "S": "sleeps without letting Python's other threads run",
}


def save_stacks(path: Path, header: str) -> None:
    """Write the stacks of all threads of this process, below ``header``. Raises like ``open_regular``."""
    with open_regular(path, "wb") as file:
        file.write(f"{header.rstrip()}\n\n".encode())
        file.flush()
        faulthandler.dump_traceback(file, all_threads=True)


def limit_core_files(environ: Mapping[str, str]) -> None:
    """Disable core files of this process: NCCL aborts all ranks at once, and a file may have tens of GB.

    The hard limit is unchanged; HPC_TRAIN_CORE_FILES=1 also leaves the soft limit unchanged, and so does a
    sandbox that refuses the calls.
    """
    if environ.get("HPC_TRAIN_CORE_FILES") == "1":
        return
    with suppress(OSError):
        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))


def save_flight_record(path: Path) -> bool:
    """Write NCCL's flight record; return True if it has a collective. Raises like ``open_regular``."""
    record = recorded_collectives()
    if record is None:
        return False
    with open_regular(path, "wb") as file:
        file.write(record)
    return True


def state_of(process: Process) -> str | None:
    """Return the kernel's state letter of a process's main thread, ``GONE``, or None if it is invisible."""
    is_alive = process.is_alive()
    if is_alive is None:
        return None
    return _state(process.pid) or GONE if is_alive else GONE


def in_words(state: str) -> str:
    """Return a description of the state of a process that does not answer."""
    return _STATE_TEXTS.get(state, f"is in state {state}")


def describe(process: Process) -> str:
    """Return lines with the kernel's information on a process, its threads and its children. Linux only."""
    state = state_of(process)
    if state is None or state == GONE:
        return f"process {process.pid}: {GONE if state else 'can not be seen from here'}\n"
    lines = [f"process {process.pid} {in_words(state)}", *_threads(process.pid)]
    children: list[int] = []
    for thread in _numbers(Path(f"/proc/{process.pid}/task")):
        children += [int(child) for child in _read(process.pid, f"task/{thread}/children").split()]
    for child in children[:_MAX_CHILDREN]:
        lines += [f"child {child} ({_read(child, 'comm')})", *_threads(child)]
    return "\n".join(lines) + "\n"


def _threads(pid: int) -> list[str]:
    return [_thread(pid, number) for number in _numbers(Path(f"/proc/{pid}/task"))]


def _thread(pid: int, number: int) -> str:
    task = f"task/{number}"
    wait = _read(pid, f"{task}/wchan")
    state = _state(pid, number) or GONE
    place = f" in {wait}" if wait not in {"", "0"} else ""
    return f"  thread {number} {_read(pid, f'{task}/comm')}: {state}{place}"


def _numbers(folder: Path) -> list[int]:
    with suppress(OSError):
        return sorted(int(entry.name) for entry in folder.iterdir())
    return []


def _state(pid: int, thread: int | None = None) -> str | None:
    stat = _read(pid, "stat" if thread is None else f"task/{thread}/stat")
    fields = stat.rpartition(")")[2].split()  # the name, in parentheses, may contain blanks and parentheses
    return fields[0] if fields else None


def _read(pid: int, name: str) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/{name}").read_text(encoding="utf-8", errors="replace").strip()
    return ""
