"""Agreement among ranks on file operations, which either succeed on every rank or fail on every rank.

``checkpoint.checkpointer`` calls it from the thread that writes a checkpoint, while the training thread runs
collectives on the same process group. Collectives are matched by the order in which each rank issues them,
which two threads can't keep equal on all ranks; point-to-point messages are matched by their tag. Therefore
everything here is sent point to point, along a binomial tree, as CPU tensors; nothing is pickled.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from hpc_train import errors
from hpc_train.run.checkpoints import NewerVersionError

Result = TypeVar("Result")

#: Tag of all messages; pipelines use tag 0, on their own groups.
_TAG = 0x6370

#: Errors that all ranks raise if one has them; for any other error the other ranks raise PeerLostError.
_SHARED: dict[str, type[errors.HpcTrainError]] = {
    kind.__name__: kind
    for kind in (
        errors.BadFileError,
        errors.HpcTrainError,
        NewerVersionError,
        errors.NonFiniteError,
        errors.StorageError,
        errors.TransientStorageError,
        errors.UserError,
    )
}


@dataclass(frozen=True)
class ControlGroup:
    """All ranks over a CPU backend; ``group`` is None for a single rank. Every method is collective.

    Only one thread of each rank may use it at a time; meanwhile other threads may use ``group`` for
    collectives.
    """

    rank: int
    world_size: int
    group: dist.ProcessGroup | None

    def __post_init__(self) -> None:
        assert self.group is not None or self.world_size == 1, "several ranks need a process group"

    def smallest(self, values: Sequence[int]) -> list[int]:
        """Return the minimum over all ranks, element by element."""
        return self._reduced(values, torch.minimum)

    def total(self, values: Sequence[int]) -> list[int]:
        """Return the sum over all ranks, element by element."""
        return self._reduced(values, torch.add)

    def _reduced(self, values: Sequence[int], combine: Callable[[Tensor, Tensor], Tensor]) -> list[int]:
        if self.group is None or not values:
            return list(values)
        numbers = torch.tensor(values, dtype=torch.int64)
        parent, children = self._neighbours(root=0)
        for received in self._receive_each(children, numbers):
            numbers = combine(numbers, received)
        if parent is not None:
            self._wait(dist.isend(numbers, group=self.group, group_dst=parent, tag=_TAG))
        self._send(numbers, source=0)
        return numbers.tolist()

    def broadcast(self, values: Sequence[int], source: int = 0) -> list[int]:
        """Return the numbers of rank ``source``; the values of other ranks are ignored."""
        if self.group is None:
            return list(values)
        count = torch.tensor([len(values)], dtype=torch.int64)
        self._send(count, source)
        mine = list(values) if self.rank == source else [0] * int(count)
        numbers = torch.tensor(mine, dtype=torch.int64)
        if mine:
            self._send(numbers, source)
        return numbers.tolist()

    def _send(self, numbers: Tensor, source: int) -> None:
        """Overwrite ``numbers`` on every rank by those of rank ``source``."""
        parent, children = self._neighbours(root=source)
        if parent is not None:
            self._wait(dist.irecv(numbers, group=self.group, group_src=parent, tag=_TAG))
        sends = [dist.isend(numbers, group=self.group, group_dst=child, tag=_TAG) for child in children]
        for send in sends:
            self._wait(send)

    def _receive_each(self, ranks: Sequence[int], like: Tensor) -> list[Tensor]:
        buffers = [torch.empty_like(like) for _ in ranks]
        receives = [
            dist.irecv(buffer, group=self.group, group_src=rank, tag=_TAG)
            for buffer, rank in zip(buffers, ranks, strict=True)
        ]
        for receive in receives:
            self._wait(receive)
        return buffers

    @staticmethod
    def _wait(work: dist.Work | None) -> None:
        assert work is not None, "this rank is in the group"
        work.wait()

    def _neighbours(self, root: int) -> tuple[int | None, list[int]]:
        """Return this rank's parent and children in the binomial tree with root ``root``.

        It is the tree of gloo's broadcast, which ``process_group.join`` has connected for root 0.
        """
        place = (self.rank - root) % self.world_size
        # A parent has the bits of its child except the highest.
        highest = 1 << (place.bit_length() - 1) if place else 0
        parent = None if place == 0 else (place - highest + root) % self.world_size
        bits = (1 << number for number in range(place.bit_length(), self.world_size.bit_length()))
        below = [place + bit for bit in bits if place + bit < self.world_size]
        return parent, [(child + root) % self.world_size for child in below]

    def first_text(self, text: str | None) -> tuple[int, str] | None:
        """Return the lowest rank that passed a text, and the text; None if no rank passed a text."""
        speaker = self.smallest([self.world_size if text is None else self.rank])[0]
        if speaker == self.world_size:
            return None
        return speaker, self._text_of(speaker, text or "")

    def texts(self, text: str) -> list[str]:
        """Return the text of each rank. Equal texts are sent once; if all are equal, nothing is sent."""
        own_digest = digest(text)
        least, most = self.smallest([own_digest, -own_digest])
        if least == -most:
            return [text] * self.world_size
        digests = self.total([own_digest if rank == self.rank else 0 for rank in range(self.world_size)])
        by_digest = {number: self._text_of(digests.index(number), text) for number in dict.fromkeys(digests)}
        return [by_digest[number] for number in digests]

    def _text_of(self, source: int, text: str) -> str:
        octets = bytearray(text.encode("utf-8", "replace"))
        length = self.broadcast([len(octets)], source)[0]
        if self.rank != source:
            octets = bytearray(length)
        if length and self.group is not None:
            self._send(torch.frombuffer(octets, dtype=torch.uint8), source)
        return octets.decode()

    def together(self, work: Callable[[], Result]) -> Result:
        """Run ``work`` on every rank, then raise on all ranks if it raised on one.

        ``work`` itself must not be collective. A rank without an error raises one of the same class, with the
        other rank's message.
        """
        result, error = None, None
        try:
            result = work()
        except Exception as raised:
            error = raised
        failed = self.first_text(None if error is None else f"{type(error).__name__} {error}")
        if error is not None:
            raise error
        if failed is not None:
            rank, text = failed
            kind, _, message = text.partition(" ")
            raise _SHARED.get(kind, errors.PeerLostError)(f"rank {rank}: {message}")
        return result  # type: ignore[return-value]


def digest(text: str) -> int:
    """Return a non-negative hash of the text that fits into an int64."""
    return int.from_bytes(hashlib.sha256(text.encode("utf-8", "replace")).digest()[:7])
