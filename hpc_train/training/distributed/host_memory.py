"""A rank's host memory: checks the address space, and makes malloc reuse a step's memory in the next step.

A step frees its activations, and the next step allocates as many again. By default glibc returns large
blocks to the kernel at once, which has to map and zero each of their pages again (measured by
``python -m benchmarks.step``: steps of ResNet-18, ViT-Tiny and GPT take 4 to 9 % less time than in a bare
loop). PyTorch's caching allocator does the same on GPUs. Called by ``training.rank``.
"""

from __future__ import annotations

import ctypes
import resource
from collections.abc import Mapping
from pathlib import Path

from hpc_train.errors import EnvironmentRefusesError
from hpc_train.run.resource_limits import of_process

#: <malloc.h>
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
#: Larger blocks are still mapped separately: once a small block occupies the space of a freed large block,
#: the next large block needs as much memory again. The second is the maximum of older versions of glibc.
_MMAP_THRESHOLDS = (256 << 20, 32 << 20)
_NO_TRIMMING = -1
#: Variables with which users configure malloc.
_VARIABLES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_")


#: Measured: threads, their heaps and buffers take 540 to 610 MiB from here to the end of a small run; the C
#: library can do without a part of it.
_ROOM_BYTES = 512 << 20


def check_address_space(node: str) -> None:
    """Raise EnvironmentRefusesError if `ulimit -v` leaves too little: some libraries would hang."""
    limit, _ = of_process(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    left = limit - pages * resource.getpagesize()
    if left < _ROOM_BYTES:
        need = limit - left + _ROOM_BYTES
        raise EnvironmentRefusesError(
            f"ulimit -v: the address space of ranks on node {node} is limited to {limit >> 20} MiB, of which "
            f"imports leave {left >> 20} MiB, but training needs {_ROOM_BYTES >> 20} MiB or more; raise the "
            f"limit (`ulimit -v {need >> 10}` or unlimited before `hpc-train submit`)"
        )


def keep_freed(environ: Mapping[str, str]) -> bool:
    """Make malloc keep freed memory, in this process and its forks; return True if it does.

    The user's settings take precedence. Without glibc nothing changes. Peak memory grows by fragmentation
    (measured: 4 % for ResNet-50).
    """
    if any(name in environ for name in _VARIABLES) or "glibc.malloc." in environ.get("GLIBC_TUNABLES", ""):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    is_mapped_less = any(mallopt(_M_MMAP_THRESHOLD, size) for size in _MMAP_THRESHOLDS)
    return is_mapped_less and bool(mallopt(_M_TRIM_THRESHOLD, _NO_TRIMMING))
