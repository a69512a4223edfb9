"""Exchanges one integer per rank through shared memory of a node, without a collective.

Each rank writes its number and later reads all numbers, which takes microseconds; an all-reduce of gloo takes
over a millisecond of a small machine's cores (benchmarks/step.py, two ranks). The file is in /dev/shm and is
unlinked once all ranks have opened it. Each rank locks one byte of the file, and the kernel releases the lock
when the rank ends, so that a dead rank is detected at once, also in other PID namespaces.

Also whether /dev/shm can be used, and its size: torch's semaphores and shared tensors, and NCCL's buffers
between the GPUs of a node, are files there. The node check and loader processes depend on it.

``SharedSum`` averages tensors over the ranks of a node in such memory: ``strategies.ddp`` averages gradients
with it on the CPU. gloo sends them over TCP, which takes more time (``python -m benchmarks.node_sum``) on the
cores that compute the next gradients.

Legend: R ranks.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import multiprocessing
import os
import platform
import tempfile
import time
import weakref
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from hpc_train.errors import PeerLostError

#: Bits of a number. Higher bits count the exchanges, so that number and count are written atomically.
NUM_BITS = 32
#: Double buffering: no rank begins the exchange after the next before all have read this exchange.
_SLOTS = 2
#: A waiting rank yields its core for this time; then it sleeps for a share of the time waited, up to a limit
#: (assumed).
_YIELDING_S = 0.5e-3
_PAUSE_SHARE, _LONGEST_PAUSE_S = 0.1, 2e-3
#: Interval at which a waiting rank checks whether the others are alive (assumed).
_CHECK_EVERY_S = 0.1


def open_shared_flags(
    rank: int, world_size: int, control: dist.ProcessGroup, silence_s: float, room: int = 0
) -> SharedFlags | None:
    """Return memory shared by all ranks; None on all if one can't open it. Collective, on one node.

    ``silence_s``: timeout of ``SharedFlags.wait`` for a rank that is alive. ``room``: extra shared bytes.
    """
    path, file = "", -1
    size = _bytes_of_flags(world_size) + room
    with contextlib.suppress(OSError):
        if rank == 0:
            file, path = tempfile.mkstemp(prefix="hpc-train-", dir=SHM)
            os.posix_fallocate(file, 0, size)  # a full /dev/shm would kill the rank at its first write
    try:
        paths = [path]
        dist.broadcast_object_list(paths, src=0, group=control)
        path = paths[0]
        if rank != 0 and path:
            with contextlib.suppress(OSError):
                file = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        flags = None
        with contextlib.suppress(OSError, ValueError):
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, rank)
            flags = SharedFlags(rank, world_size, file, mmap.mmap(file, size), silence_s)
        is_open = torch.tensor([flags is not None], dtype=torch.int64)
        dist.all_reduce(is_open, dist.ReduceOp.MIN, group=control)
    finally:
        if rank == 0 and path:
            Path(path).unlink(missing_ok=True)
    if is_open.item():
        return flags
    if flags is None and file >= 0:
        os.close(file)
    return None


def _bytes_of_flags(world_size: int) -> int:
    pages = -(-_SLOTS * world_size * 8 // mmap.PAGESIZE)
    return pages * mmap.PAGESIZE


@dataclass
class SharedFlags:
    """The numbers of all ranks. ``write`` and ``wait`` are collective and alternate; for one thread.

    ``file`` is closed with this object.
    """

    rank: int
    world_size: int
    file: int
    memory: mmap.mmap
    silence_s: float
    _count: int = 0
    _slots: np.ndarray[tuple[int, int], np.dtype[np.int64]] = field(init=False)

    def __post_init__(self) -> None:
        entries = np.frombuffer(self.memory, np.int64, _SLOTS * self.world_size)
        self._slots = entries.reshape(_SLOTS, self.world_size)
        if self.file >= 0:
            weakref.finalize(self, os.close, self.file)

    @property
    def room(self) -> memoryview:
        """The bytes that the ranks share in addition to the numbers."""
        return memoryview(self.memory)[_bytes_of_flags(self.world_size) :]

    def write(self, number: int) -> None:
        """Publish this rank's number, at least 0 and below 2 ** NUM_BITS. Does not wait."""
        self._count += 1
        self._slots[self._count % _SLOTS, self.rank] = self._count << NUM_BITS | number

    def wait(self) -> list[int]:
        """Return the numbers that the ranks wrote since the last wait, by rank.

        Raises PeerLostError if a rank ended before it wrote, or writes nothing for ``silence_s``.
        """
        slot = self._slots[self._count % _SLOTS]
        entries: list[int] = slot.tolist()
        if min(entries) >> NUM_BITS != self._count:
            entries = self._waited_for(slot)
        mask = (1 << NUM_BITS) - 1
        return [entry & mask for entry in entries]

    def check_alive(self) -> None:
        """Raise PeerLostError if a rank has ended."""
        for rank in range(self.world_size):
            if rank != self.rank and not self._is_alive(rank):
                raise PeerLostError(f"rank {rank} has ended")

    def _waited_for(self, slot: np.ndarray[tuple[int], np.dtype[np.int64]]) -> list[int]:
        began = time.monotonic()
        check_at_s = _CHECK_EVERY_S
        while True:
            entries: list[int] = slot.tolist()
            missing = [rank for rank, entry in enumerate(entries) if entry >> NUM_BITS != self._count]
            if not missing:
                return entries
            waited_s = time.monotonic() - began
            if waited_s < _YIELDING_S:
                os.sched_yield()
                continue
            if waited_s >= check_at_s:
                self._check(missing, waited_s, slot)
                check_at_s = waited_s + _CHECK_EVERY_S
            time.sleep(min(waited_s * _PAUSE_SHARE, _LONGEST_PAUSE_S))

    def _check(
        self, missing: list[int], waited_s: float, slot: np.ndarray[tuple[int], np.dtype[np.int64]]
    ) -> None:
        for rank in missing:
            # The rank may have written and then ended.
            if not self._is_alive(rank) and int(slot[rank]) >> NUM_BITS != self._count:
                raise PeerLostError(f"rank {rank} has ended")
        if waited_s > self.silence_s:
            ranks = ", ".join(map(str, missing))
            raise PeerLostError(f"rank {ranks}: no answer within {self.silence_s:g} s")

    def _is_alive(self, rank: int) -> bool:
        try:
            fcntl.lockf(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, rank)
        except OSError:
            return True
        fcntl.lockf(self.file, fcntl.LOCK_UN, 1, rank)
        return False


SHM = "/dev/shm"


def shm_refusal() -> str | None:
    """Return the reason why nothing can be created in /dev/shm; None if it can be used."""
    try:
        multiprocessing.get_context("fork").Lock()  # a POSIX semaphore: a file of 32 bytes
    except OSError as error:
        reason = error.strerror or str(error)
        if error.errno in {errno.ENOSPC, errno.EDQUOT}:
            reason = f"{reason} ({shm_sizes()})"
        elif not os.path.isdir(SHM):  # noqa: PTH112  (no path is computed)
            reason = "the folder does not exist"
        return f"{SHM} (shared memory) can't be used: {reason}"
    return None


def shm_sizes() -> str:
    """Return the size of /dev/shm and its free part, as ``64 MiB, of which 3 MiB are free``."""
    with suppress(OSError):
        stats = os.statvfs(SHM)
        total, free = (blocks * stats.f_frsize / 2**20 for blocks in (stats.f_blocks, stats.f_bavail))
        return f"{total:.0f} MiB, of which {free:.0f} MiB are free"
    return "missing"


def shm_bytes() -> int | None:
    """Return the size of /dev/shm; None if it is missing."""
    with suppress(OSError):
        stats = os.statvfs(SHM)
        return stats.f_blocks * stats.f_frsize
    return None


#: Bytes that are averaged at once; they fit into a core's cache.
_PIECE = 1 << 20
#: Maximum bytes of a segment of gloo's ring.
_SEGMENT = 1 << 20
#: Double buffering: no rank writes the piece after the next before all have read this piece.
_TURNS = 2
#: Every rank reads the values of all ranks, so its work grows with their number (measured up to this number).
_MOST_RANKS = 8
#: On these machines every core sees another core's data before the number that announces them.
_ORDERED_STORES = ("x86_64", "AMD64")


def open_shared_sum(
    rank: int, world_size: int, control: dist.ProcessGroup, silence_s: float
) -> SharedSum | None:
    """Return an average over all ranks, which are on one node; None on all if gloo must be used. Collective.

    ``silence_s``: the timeout for a rank that is alive.
    """
    if world_size > _MOST_RANKS or platform.machine() not in _ORDERED_STORES:
        return None
    room = _TURNS * world_size * _PIECE
    flags = open_shared_flags(rank, world_size, control, silence_s, room)
    return None if flags is None else SharedSum(flags)


class SharedSum:
    """The shared memory of all ranks. For one thread of a rank."""

    def __init__(self, flags: SharedFlags) -> None:
        self._flags = flags
        rooms = torch.frombuffer(flags.room, dtype=torch.uint8)
        self._rooms = rooms.view(_TURNS, flags.world_size, _PIECE)
        self._turn = 0

    def average(self, tensor: Tensor) -> None:
        """Replace a contiguous floating-point tensor on the CPU by its mean over the ranks. Collective.

        Each rank's values are multiplied by 1/R, like in DDP, then added in the order of gloo's ring. Results
        are therefore bitwise identical for ranks on one node and on several. Raises PeerLostError if a rank
        has ended or does not arrive within the timeout.
        """
        flat = tensor.view(-1)
        block = ring_block(len(flat), flat.element_size(), self._flags.world_size)
        size = _PIECE // flat.element_size()
        for begin in range(0, len(flat), size):
            self._average(flat[begin : begin + size], begin, block)

    def _average(self, piece: Tensor, begin: int, block: int) -> None:
        flags, end = self._flags, begin + len(piece)
        self._turn = (self._turn + 1) % _TURNS
        rows = self._rooms[self._turn].view(piece.dtype)[:, : len(piece)]
        torch.mul(piece, 1 / flags.world_size, out=rows[flags.rank])
        flags.write(0)
        flags.wait()
        for number in range(begin // block, -(-end // block)):
            within = slice(max(number * block - begin, 0), (number + 1) * block - begin)
            first, second, *others = (
                rows[(number - place) % flags.world_size, within] for place in range(1, flags.world_size + 1)
            )
            total = torch.add(first, second, out=piece[within])
            for row in others:
                total.add_(row)


def ring_block(count: int, element_size: int, ranks: int) -> int:
    """Return the number of consecutive elements that gloo's ring all-reduce adds in the same order.

    gloo divides ``count`` elements into R blocks of at least two segments, each at most 1 MiB. The sum of
    block b begins at rank b - 1 and descends to rank b - R = b (``ring`` in gloo/allreduce.cc).
    """
    size = count * element_size
    segments = max(-(-size // _SEGMENT), 2 * ranks)
    per_rank = -(-segments // ranks)
    segment_bytes = -(-size // (per_rank * ranks))
    return per_rank * -(-segment_bytes // element_size)
