"""Persistent buffers: broadcast from rank 0, and restored after a forward that must not change them.

Used by the strategies and by ``training``. Buffers with ``persistent=False`` are constants and are ignored.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hpc_train.errors import BadFileError
from hpc_train.training.strategies.batchnorm import only_updates_statistics


@dataclass(frozen=True)
class _Place:
    """The place of a persistent buffer, and the original tensor there."""

    module: nn.Module
    key: str
    #: The name in the model.
    name: str
    tensor: Tensor | None

    @property
    def now(self) -> Tensor | None:
        return self.module._buffers.get(self.key)


class Buffers:
    """The persistent buffers of ``model``, each of which remains the same tensor.

    A forward may replace a buffer by another tensor (``self.mean = 0.9 * self.mean + …``), while averages,
    copies and compiled code refer to the original. ``write_back`` copies the new values into the original and
    restores it; ``tensors`` and ``copies`` do so first. Not collective.
    """

    def __init__(self, model: nn.Module) -> None:
        """``model``: placed, so that its tensors are final."""
        self._places = [
            _Place(module, key, f"{prefix}.{key}" if prefix else key, buffer)
            for prefix, module in model.named_modules()
            for key, buffer in module._buffers.items()
            if key not in module._non_persistent_buffers_set
        ]
        self._uses = Counter(id(place.tensor) for place in self._places)
        self._all = _distinct(self._places)
        self._read_in_training = _distinct(
            place for place in self._places if not only_updates_statistics(place.module)
        )

    def write_back(self) -> None:
        """Copy the values of replaced buffers into the original buffers. Called after a slot's backward.

        Raises BadFileError if shape or dtype differ, because a checkpoint could not restore them either.
        """
        for place in self._places:
            now = place.now
            if now is not place.tensor:
                self._write_back_one(place, now)

    @torch.no_grad()
    def _write_back_one(self, place: _Place, now: Tensor | None) -> None:
        if now is None or place.tensor is None or not _fits(now, place.tensor):
            raise _misfit(place, now)
        if self._uses[id(place.tensor)] > 1:
            raise BadFileError(
                f"model.name: the buffer {place.name} is registered twice, and forward puts another "
                f"tensor in one of its places; write self.{place.key}.copy_(…)"
            )
        place.tensor.copy_(now)
        place.module._buffers[place.key] = place.tensor

    def tensors(self, *, all_persistent: bool = True) -> list[Tensor]:
        """Return the tensors themselves, each once: all, or only those that a training forward may read."""
        self.write_back()
        return self._all if all_persistent else self._read_in_training

    def copies(self) -> list[Tensor]:
        """Return the values of all persistent buffers, for ``put_back``."""
        return [tensor.clone() for tensor in self.tensors()]

    @torch.no_grad()
    def put_back(self, copies: Sequence[Tensor]) -> None:
        """Restore the values from ``copies``, also of buffers that were replaced."""
        for place in self._places:
            place.module._buffers[place.key] = place.tensor
        for tensor, value in zip(self.tensors(), copies, strict=True):
            tensor.copy_(value)


def _distinct(places: Iterable[_Place]) -> list[Tensor]:
    return list({id(place.tensor): place.tensor for place in places if place.tensor is not None}.values())


def _fits(now: Tensor, first: Tensor) -> bool:
    return now.shape == first.shape and torch.can_cast(now.dtype, first.dtype)


def _misfit(place: _Place, now: Tensor | None) -> BadFileError:
    return BadFileError(
        f"model.name: forward puts {_description(now)} in the place of the buffer {place.name}, which was "
        f"{_description(place.tensor)}; write self.{place.key}.copy_(…), or register it with persistent=False"
    )


def _description(tensor: Tensor | None) -> str:
    return "None" if tensor is None else f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


def persistent_places(model: nn.Module) -> Iterator[tuple[nn.Module, str, Tensor]]:
    """Yield each place of each persistent buffer: its module, its name there, and its current tensor."""
    for module in model.modules():
        for key, buffer in module._buffers.items():
            if buffer is not None and key not in module._non_persistent_buffers_set:
                yield module, key, buffer


@torch.no_grad()
def broadcast_from_rank_0(
    buffers: Sequence[Tensor], group: dist.ProcessGroup | None = None, source: int = 0
) -> None:
    """Overwrite every rank's ``buffers`` by rank 0's, or in ``group`` by those of rank ``source``.

    Collective in the group, which is all ranks if None: one broadcast per dtype and device.
    """
    alike: dict[tuple[torch.dtype, torch.device], list[Tensor]] = defaultdict(list)
    for buffer in buffers:
        alike[buffer.dtype, buffer.device].append(buffer)
    for tensors in alike.values():
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        dist.broadcast(flat, src=source, group=group)
        for tensor, part in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
            tensor.copy_(part.view_as(tensor))


@contextmanager
def buffers_kept(model: nn.Module) -> Iterator[None]:
    """Restore the persistent buffers at the end, for a forward whose result is discarded."""
    buffers = Buffers(model)
    before = buffers.copies()
    try:
        yield
    finally:
        buffers.put_back(before)
