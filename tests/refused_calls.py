"""Runs a command some of whose system calls fail, as on file systems and in containers that lack them.

    python tests/refused_calls.py EPERM chmod,fchmod [ENOSYS statx ...] -- COMMAND...

A seccomp filter, which needs no root and is inherited by all child processes (Linux on x86-64).
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
import sys
from collections.abc import Iterable, Sequence

#: The numbers of system calls on x86-64.
NUMBERS = {
    "chmod": 90, "fchmod": 91, "fchmodat": 268, "fchmodat2": 452, "chown": 92, "fchown": 93, "lchown": 94,
    "fchownat": 260, "utimensat": 280, "setxattr": 188, "getxattr": 191, "listxattr": 194,
    "link": 86, "linkat": 265, "symlink": 88, "symlinkat": 266, "mknod": 133, "mknodat": 259,
    "fsync": 74, "fdatasync": 75, "sync_file_range": 277, "syncfs": 306, "sync": 162, "msync": 26,
    "flock": 73, "fallocate": 285, "fadvise64": 221,
    "sendfile": 40, "copy_file_range": 326, "splice": 275, "statx": 332, "renameat2": 316,
    "memfd_create": 319, "statfs": 137, "fstatfs": 138, "inotify_init1": 294, "io_uring_setup": 425,
    "setpriority": 141, "sched_setaffinity": 203, "get_mempolicy": 239, "set_mempolicy": 238, "mbind": 237,
    "mlock": 149, "mlockall": 151, "membarrier": 324, "pidfd_open": 434, "pidfd_send_signal": 424,
    "close_range": 436, "perf_event_open": 298, "process_vm_readv": 310,
    "sched_getaffinity": 204, "setsid": 112, "prlimit64": 302, "getrlimit": 97, "setrlimit": 160,
    "getrandom": 318, "epoll_create": 213, "epoll_create1": 291, "clone3": 435, "rseq": 334,
    "faccessat2": 439, "eventfd": 284, "eventfd2": 290, "madvise": 28, "sysinfo": 99, "getcpu": 309,
    "prctl": 157,
}  # fmt: skip
IS_POSSIBLE = sys.platform == "linux" and platform.machine() == "x86_64"
_PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS, _MODE_FILTER = 22, 38, 2
_LOAD, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
_ALLOW, _FAIL = 0x7FFF0000, 0x00050000


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_void_p))


def refuse(calls: Sequence[str], error: int) -> None:
    """Make these system calls of this process and its children fail with ``error``."""
    count = len(calls)
    steps = [(_LOAD, 0, 0, 0)]
    steps += [(_JUMP_IF_EQUAL, count - at, 0, NUMBERS[call]) for at, call in enumerate(calls)]
    steps += [(_RETURN, 0, 0, _ALLOW), (_RETURN, 0, 0, _FAIL | error)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
    program = _Program(len(steps), ctypes.addressof(code))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or libc.prctl(
        _PR_SET_SECCOMP, _MODE_FILTER, ctypes.byref(program), 0, 0
    ):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def prefix(calls: Sequence[str], error: str) -> list[str]:
    """Return the words that, written before a command, run it with these calls refused."""
    return prefix_of([(calls, error)])


def prefix_of(groups: Iterable[tuple[Sequence[str], str]]) -> list[str]:
    """As ``prefix``, for calls that are refused with different errors."""
    words = [word for calls, error in groups for word in (error, ",".join(calls))]
    return [sys.executable, "-P", __file__, *words, "--"]


if __name__ == "__main__":
    _end = sys.argv.index("--")
    _groups, _command = sys.argv[1:_end], sys.argv[_end + 1 :]
    for _error, _calls in zip(_groups[::2], _groups[1::2], strict=True):
        refuse(_calls.split(","), getattr(errno, _error))
    os.execvp(_command[0], _command)
