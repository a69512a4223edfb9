"""A rank's open files and host memory. Called by ``training.rank`` before ranks connect.

If a rank ran out of file descriptors or address space while it connects, the others would wait for it.

A step frees its activations, and the next step allocates as many again. By default glibc returns large
blocks to the kernel at once, which has to map and zero each of their pages again (measured by
``python -m benchmarks.step``: steps of ResNet-18, ViT-Tiny and GPT take 4 to 9 % less time than in a bare
loop); ``keep_freed`` makes malloc keep them. PyTorch's caching allocator does the same on GPUs.
"""

from __future__ import annotations

import ctypes
import resource
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from hpc_train.errors import EnvironmentRefusesError
from hpc_train.rank.env import RankFacts
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


#: Measured: 16 to 30, for logs, checkpoints, pipes and gloo's internal files.
_OWN = 48
#: Measured: up to 22 for one training and one evaluation loader process, with batches in transit.
_PER_LOADER = 24
#: Ring neighbours in the control group. Tree neighbours are at most log2(ranks), and one more for each other
#: root (a rank that sends the others its error).
_RING = 2
#: gloo's internal sockets per group of a DeviceMesh axis.
_PER_AXIS = 3
#: Connections of each other rank to rank 0's store.
_STORE_CONNECTIONS = 2


class TooFewFilesError(EnvironmentRefusesError):
    """The operating system's limit of open files is below the number that training needs."""


def raise_file_limit() -> int:
    """Raise this process's soft limit of open files to the hard limit; return the new limit."""
    soft, hard = of_process(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):  # a sandbox may forbid it
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        soft = hard
    return soft


def needed_files(facts: RankFacts, axes: Iterable[int], loaders: int) -> int:
    """Return the maximum number of files that this rank opens at a time.

    ``axes``: sizes of the axes of a strategy's DeviceMesh. Each has its own group, except that an axis of all
    ranks uses the default group.
    """
    peers = facts.world_size - 1
    # The default group connects all ranks, the control group only ranks that send to each other.
    sockets = peers + min(peers, _RING + 2 * peers.bit_length())
    sockets += sum(_PER_AXIS + (size - 1 if size < facts.world_size else 0) for size in axes)
    if facts.rank == 0:
        sockets += _STORE_CONNECTIONS * peers
    return _OWN + _PER_LOADER * loaders + sockets


def check_open_files(facts: RankFacts, axes: Iterable[int], loaders: int, node: str) -> None:
    """Raise this process's limit. Raises TooFewFilesError if the rank needs more."""
    limit, need = raise_file_limit(), needed_files(facts, axes, loaders)
    if limit == resource.RLIM_INFINITY or limit >= need:
        return
    raise TooFewFilesError(
        f"ulimit -n: rank {facts.rank} on node {node} may open {limit} files and sockets but needs {need}, "
        f"with world size {facts.world_size} and data.workers {loaders}; raise the hard limit to that "
        f"(`ulimit -Hn {need}` before `hpc-train submit`; on Slurm also LimitNOFILE of slurmd), or start "
        "fewer ranks"
    )
