"""A rank's memory on the host: whether its address space suffices; what a step frees is kept for the next.

A step frees its activations, and the next one allocates as many again. By default glibc returns large blocks
to the kernel at once, which has to map and zero each of their pages again (measured by
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
#: Larger blocks are still mapped separately: once a small block is allocated in the space that such a block
#: left, the next one of its size needs as much memory again. The second is the most that older versions of
#: glibc accept.
_MMAP_THRESHOLDS = (256 << 20, 32 << 20)
_NO_TRIMMING = -1
#: Variables by which users configure malloc themselves.
_VARIABLES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_")


#: Measured: threads, their heaps and buffers take 540 to 610 MiB from here to the end of a small run; of a
#: part of it the C library does without.
_ROOM_BYTES = 512 << 20


def check_address_space(node: str) -> None:
    """Raise EnvironmentRefusesError if too little is left of `ulimit -v`: some libraries hang without."""
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
    """Make malloc keep what is freed from now on, for this process and its forks; return whether it does.

    A setting of the user stays. Without glibc, nothing changes. Peak memory grows by what becomes fragmented
    (measured: 4 % for ResNet-50).
    """
    if any(name in environ for name in _VARIABLES) or "glibc.malloc." in environ.get("GLIBC_TUNABLES", ""):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    is_mapped_less = any(mallopt(_M_MMAP_THRESHOLD, size) for size in _MMAP_THRESHOLDS)
    return is_mapped_less and bool(mallopt(_M_TRIM_THRESHOLD, _NO_TRIMMING))
