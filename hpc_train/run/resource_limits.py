"""The operating system's limits on a process (``ulimit``), and which of them an error message reports.

Called where a rank reports its own error, and by launchers for a rank that ended before it could.
"""

from __future__ import annotations

import re
import resource
import signal
from collections.abc import Mapping

_MIB = 1 << 20
#: ulimit's option → the limit, what it limits, and the unit of its value.
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
    r"[Tt]oo many open files": ("-n",),
    r"File too large|File size limit exceeded": ("-f",),
    r"CPU time limit exceeded": ("-t",),
}
_SIGNALS = {int(signal.SIGXFSZ): ("-f",), int(signal.SIGXCPU): ("-t",)}
_DEVICE = re.compile(r"CUDA|\bHIP\b")
_REMEDY = "raise it with `ulimit` where the ranks are started, or ask the administrators (limits.conf)"


def current() -> dict[str, str]:
    """Return this process's limits in words, by ulimit's option; without those that are unlimited."""
    found = {}
    for option, (limit, name, unit) in _LIMITS.items():
        size, _ = resource.getrlimit(limit)
        if size != resource.RLIM_INFINITY:
            value = f"{size / _MIB:.0f} MiB" if unit == "MiB" else f"{size} {unit}".rstrip()
            found[option] = f"{name} is limited to {value} (`ulimit {option}`)"
    return found


def clause(message: str, limits: Mapping[str, str], ended_by: int | None = None) -> str:
    """Return a clause that names the limits that ``message``, or the signal ``ended_by``, reports as reached.

    Starts with a semicolon; empty if it reports none, or none that is in ``limits``.
    """
    options = [*_SIGNALS.get(ended_by or 0, ()), *_reported(message)]
    names = [limits[option] for option in dict.fromkeys(options) if option in limits]
    return f"; {' and '.join(names)}: {_REMEDY}" if names else ""


def explained(text: str, limits: Mapping[str, str] | None = None) -> str:
    """Return an error or a traceback whose last line that reports a reached limit names its value.

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
