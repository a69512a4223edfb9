"""Limits of the operating system that a failed call has reached: which one, its value, how to raise it.

Reads ulimits and the cgroup of this process. Called where an error of a rank or a command is turned into a
message; imports neither torch nor anything of a scheduler.
"""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath
from traceback import extract_tb

_CGROUPS = Path("/sys/fs/cgroup")
_REMEDY = "raise it with `ulimit` where the ranks are started, or ask the administrators (limits.conf)"
#: Limit → option of ``ulimit``, and what it limits.
_ULIMITS = {
    resource.RLIMIT_FSIZE: ("-f", "the size of a file is limited to {} MiB", 2**20),
    resource.RLIMIT_AS: ("-v", "the address space is limited to {} MiB", 2**20),
    resource.RLIMIT_DATA: ("-d", "the data segment is limited to {} MiB", 2**20),
    resource.RLIMIT_NOFILE: ("-n", "open files are limited to {}", 1),
    resource.RLIMIT_NPROC: ("-u", "processes and threads of this user are limited to {}", 1),
}
#: How the C library, C++, torch and Python report that a limit is reached, in small letters.
_MEMORY = ("allocate memory", "bad_alloc")
_PROCESSES = ("can't start new thread", "resource temporarily unavailable")
_FILES = ("too many open files", "items of ancdata")


def reached_limits(error: BaseException | None) -> str:
    """Return clauses that name the limits that ``error`` or one of its causes may have reached.

    Each begins with ``; ``. Empty if the error is not of that kind, or nothing is limited.
    """
    while error is not None:
        if kinds := _kinds(error):
            clauses = [resource_limit_words(limit) for limit in kinds]
            return "".join([*clauses, *(cgroup_pids_words() if resource.RLIMIT_NPROC in kinds else ())])
        error = error.__cause__ or error.__context__
    return ""


def _kinds(error: BaseException) -> tuple[int, ...]:
    """Return the ulimits that make a call fail with ``error``.

    A cgroup's limit of memory is none of them: the kernel then kills a process instead.
    """
    number = error.errno if isinstance(error, OSError) else None
    text = str(error).lower() if isinstance(error, RuntimeError) else ""
    if isinstance(error, MemoryError) or number == errno.ENOMEM or any(word in text for word in _MEMORY):
        return resource.RLIMIT_AS, resource.RLIMIT_DATA
    if number == errno.EFBIG:
        return (resource.RLIMIT_FSIZE,)
    if number == errno.EMFILE or any(word in text for word in _FILES):
        return (resource.RLIMIT_NOFILE,)
    if (number == errno.EAGAIN and _is_from_fork(error)) or any(word in text for word in _PROCESSES):
        return (resource.RLIMIT_NPROC,)
    return ()


def _is_from_fork(error: BaseException) -> bool:
    """Return True if a fork raised ``error``: locks and pipes use the same number."""
    frames = extract_tb(error.__traceback__)
    return bool(frames) and "fork" in (frames[-1].line or "")


def resource_limit_words(limit: int) -> str:
    """Return a clause that names this process's ulimit and its value; empty if it has none."""
    size, _ = resource.getrlimit(limit)
    exempt = limit == resource.RLIMIT_NPROC and os.geteuid() == 0
    if size == resource.RLIM_INFINITY or exempt:
        return ""
    option, words, unit = _ULIMITS[limit]
    return f"; {words.format(size // unit)} (`ulimit {option}`): {_REMEDY}"


def cgroup_pids_words() -> Iterator[str]:
    """Yield a clause that names the lowest limit of processes of the cgroups around this one, if any."""
    limits = list(_pids_limits())
    if limits:
        number, file = min(limits)
        yield (
            f"; processes and threads of the cgroup are limited to {number} ({file}): request more from the "
            "scheduler or the container"
        )


def _pids_limits() -> Iterator[tuple[int, Path]]:
    lines: list[str] = []
    with suppress(OSError):
        lines = Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if number != "0" and controllers != "pids":
            continue
        root = _CGROUPS if number == "0" else _CGROUPS / "pids"
        own = PurePosixPath(path.lstrip("/"))
        # In a container the path may be the host's; then only the root is there.
        for folder in {root / own, *(root / parent for parent in own.parents), root}:
            with suppress(OSError, ValueError):  # ``max``
                yield int((folder / "pids.max").read_text(encoding="ascii")), folder / "pids.max"
