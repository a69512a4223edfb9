"""The operating system's limits on a process (``ulimit``), and which of them an error message reports.

Called by ranks to report their own error, and by launchers for a rank that ended before it could.
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
import resource
import select
import signal
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path, PurePosixPath
from traceback import extract_tb

_MIB = 1 << 20
#: ulimit's option → the limit, its description, and the unit of its value.
_LIMITS = {
    "-v": (resource.RLIMIT_AS, "the address space", "MiB"),
    "-d": (resource.RLIMIT_DATA, "the data segment", "MiB"),
    "-f": (resource.RLIMIT_FSIZE, "the size of a file", "MiB"),
    "-u": (resource.RLIMIT_NPROC, "the number of the user's processes and threads", ""),
    "-n": (resource.RLIMIT_NOFILE, "the number of open files", ""),
    "-t": (resource.RLIMIT_CPU, "CPU time", "s"),
}
#: Messages of Python, of C and C++ libraries and of the dynamic loader → options that may be their cause. A
#: new thread needs address space for its stack; without any it fails with the error of too many threads.
_MESSAGES = {
    r"(?<!OutOf)MemoryError|[Cc]an(not|'t) allocate memory|[Uu]nable to allocate|bad_alloc": ("-v", "-d"),
    r"failed to map segment|cannot map (zero|file)": ("-v",),
    r"can't start new thread|[Tt]hread creation failed|pthread_create": ("-u", "-v"),
    r"fork.*Resource temporarily unavailable|BlockingIOError: \[Errno 11\]": ("-u",),
    r"[Tt]oo many open files|items of ancdata|init uv loop": ("-n",),
    r"File too large|File size limit exceeded": ("-f",),
    r"CPU time limit exceeded": ("-t",),
}
_ERRNOS = {errno.ENOMEM: ("-v", "-d"), errno.EFBIG: ("-f",), errno.EMFILE: ("-n",)}
_SIGNALS = {int(signal.SIGXFSZ): ("-f",), int(signal.SIGXCPU): ("-t",)}
#: The number of the system call; the same on x86-64 and ARM.
_CLONE3 = 435
_CGROUPS = Path("/sys/fs/cgroup")
_DEVICE = re.compile(r"CUDA|\bHIP\b")
_REMEDY = "raise it with `ulimit` where the ranks are started, or ask the administrators (limits.conf)"


def current() -> dict[str, str]:
    """Return this process's limits as text, by ulimit's option; unlimited ones are omitted."""
    limits = {}
    for option, (kind, name, unit) in _LIMITS.items():
        size, _ = of_process(kind)
        is_exempt = option == "-u" and os.geteuid() == 0
        if size != resource.RLIM_INFINITY and not is_exempt:
            value = f"{size} {unit}".rstrip()
            if unit == "MiB":
                value = f"{size / _MIB:.0f} MiB" if size >= _MIB else f"{size} bytes"
            limits[option] = f"{name} is limited to {value} (`ulimit {option}`)"
    return limits


def of_process(kind: int) -> tuple[int, int]:
    """Return the soft and the hard limit; unlimited if a sandbox refuses to show them."""
    try:
        return resource.getrlimit(kind)
    except OSError:
        return resource.RLIM_INFINITY, resource.RLIM_INFINITY


def usable_cpus() -> set[int]:
    """Return the CPUs that this process may use: all if a sandbox refuses to show them."""
    try:
        return os.sched_getaffinity(0)
    except (AttributeError, OSError):
        return set(range(os.cpu_count() or 1))


def prepare_rank() -> None:
    """Prepare this process for the limits of a sandbox or the shell, before it imports torch."""
    try:
        os.sched_getaffinity(0)
    except OSError:
        del os.sched_getaffinity  # torch counts CPUs differently if the function does not exist
    soft, hard = of_process(resource.RLIMIT_CPU)
    if soft == hard and 1 < hard != resource.RLIM_INFINITY:
        # The signal of the soft limit names the cause. At the hard limit the kernel sends SIGKILL.
        with suppress(OSError):
            resource.setrlimit(resource.RLIMIT_CPU, (hard - 1, hard))


def clause(message: str, limits: Mapping[str, str], ended_by: int | None = None) -> str:
    """Return a clause that names the reached limits, according to ``message`` or the signal ``ended_by``.

    Starts with a semicolon; empty if none is reported, or none that is in ``limits``.
    """
    return _named([*_SIGNALS.get(ended_by or 0, ()), *_reported(message)], limits)


def reached_limits(error: BaseException | None) -> str:
    """Return clauses that name the limits of this process that ``error``, or its cause, has reached.

    Each begins with a semicolon. Empty if the error is of another kind, or nothing is limited. A cgroup's
    limit of memory is never named: the kernel kills a process instead.
    """
    return reached(error)[1]


def reached(error: BaseException | None) -> tuple[BaseException | None, str]:
    """Return the error (``error`` or its cause) that reached a limit, and the clauses of ``reached_limits``.

    If a sandbox refuses system calls that fail in the same way, the clause names them instead.
    """
    while error is not None:
        if options := _options(error):
            text = _named(options, current()) + ("".join(_cgroup_words()) if "-u" in options else "")
            return error, _refused_calls() or text
        error = error.__cause__ or error.__context__
    return None, ""


def _refused_calls() -> str:
    """Return a clause that names the calls, needed for threads and connections, that a sandbox refuses."""
    if sys.platform != "linux":
        return ""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall(_CLONE3, None, 0)  # invalid arguments; glibc does without the call only if it does not exist
    refused = ["clone3"] if ctypes.get_errno() == errno.EPERM else []
    for name, call in (("eventfd2", lambda: os.close(os.eventfd(0))), ("epoll_create1", select.epoll)):
        try:
            call()
        except OSError as error:
            if error.errno in {errno.EPERM, errno.ENOSYS}:
                refused.append(name)
    if not refused:
        return ""
    return f"; the sandbox (seccomp) refuses {', '.join(refused)}: permit it, or update the container runtime"


def _options(error: BaseException) -> Sequence[str]:
    if isinstance(error, MemoryError):
        return "-v", "-d"
    if isinstance(error, OSError):
        is_fork = error.errno == errno.EAGAIN and _is_from_fork(error)
        return ("-u",) if is_fork else _ERRNOS.get(error.errno or 0, ())
    if isinstance(error, RuntimeError) and str(error) == os.strerror(errno.EAGAIN):  # of a thread in C++
        return "-u", "-v"
    return _reported(str(error)) if isinstance(error, RuntimeError | ImportError) else ()


def _is_from_fork(error: BaseException) -> bool:
    """Return True if a fork raised ``error``: locks and pipes use the same number."""
    frames = extract_tb(error.__traceback__)
    return bool(frames) and "fork" in (frames[-1].line or "")


def _named(options: Iterable[str], limits: Mapping[str, str]) -> str:
    names = [limits[option] for option in dict.fromkeys(options) if option in limits]
    return f"; {' and '.join(names)}: {_REMEDY}" if names else ""


def explained(text: str, limits: Mapping[str, str] | None = None) -> str:
    """Return an error or a traceback, with the limit's value added to the last line about a reached limit.

    ``limits``: default: those of this process.
    """
    lines = text.splitlines()
    for number in range(len(lines) - 1, -1, -1):
        if not lines[number].startswith(" ") and _reported(lines[number]):
            lines[number] += clause(lines[number], current() if limits is None else limits)
            return "\n".join(lines)
    return text


def reporting_line(text: str) -> str | None:
    """Return the last line of a log that reports a reached limit; None without one."""
    return next((line.strip() for line in reversed(text.splitlines()) if _reported(line)), None)


def _reported(message: str) -> list[str]:
    if _DEVICE.search(message):
        return []  # a device's memory
    return [
        option for pattern, options in _MESSAGES.items() if re.search(pattern, message) for option in options
    ]


def _cgroup_words() -> Iterator[str]:
    """Yield a clause that names the lowest limit of processes of the cgroups around this one, if any."""
    limits = []
    for folder in cgroup_folders("pids"):
        with suppress(OSError, ValueError):  # ``max``
            limits.append((int((folder / "pids.max").read_text(encoding="ascii")), folder / "pids.max"))
    if limits:
        number, file = min(limits)
        yield (
            f"; processes and threads of the cgroup are limited to {number} ({file}): request more from the "
            "scheduler or the container"
        )


def cgroup_folders(controller: str) -> Iterator[Path]:
    """Yield the folders of the cgroups around this process, of version 1 or 2, that have the controller."""
    lines: list[str] = []
    with suppress(OSError):
        lines = Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if number == "0" or controllers == controller:
            root = _CGROUPS if number == "0" else _CGROUPS / controller
            own_group = PurePosixPath(path.lstrip("/"))
            # In a container the path may be the host's; then only the root exists.
            yield from {root / own_group, *(root / parent for parent in own_group.parents), root}
