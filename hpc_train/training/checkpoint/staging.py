"""A rank's part of a checkpoint, and its asynchronous copy in memory.

``checkpoint.checkpointer`` calls it. The buffers are allocated once and reused: allocating their pages, and
on a GPU pinning them, costs several times as much as a copy.
"""

from __future__ import annotations

import json
import math
import mmap
import threading
import weakref
from collections.abc import Collection, Mapping
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hpc_train.training.checkpoint.shards import dtype_name
from hpc_train.training.checkpoint.state import (
    MODEL,
    NamedTensors,
    TrainingState,
    describe_optimizer,
    optimizer_tensors,
)
from hpc_train.training.strategies.base import Piece, Strategy

#: Alignment of the tensors: a cache line.
_ALIGNMENT = 64
#: NumPy has no bfloat16 and no float8; a copy only needs the element size.
_SAME_WIDTH = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
#: The bits of the exponent: all are set only in infinities and NaN.
_EXPONENTS = {
    torch.float64: 0x7FF0_0000_0000_0000,
    torch.float32: 0x7F80_0000,
    torch.bfloat16: 0x7F80,
    torch.float16: 0x7C00,
}
#: Elements that are checked at once; they fit into a core's cache (assumed).
_CHECKED = 1 << 17

#: Names, global shapes, dtypes, offsets and local shapes: if these are equal, two saves have one layout.
Kinds = tuple[tuple[Any, ...], ...]


@dataclass(frozen=True)
class Contents:
    """A training state in parts: this rank's pieces of tensors, still in use by training, and the rest."""

    #: At least one piece per tensor, which may be empty.
    pieces: dict[str, list[Piece]]
    #: Names of the tensors that a forward or backward pass may change: the model's buffers.
    buffers: frozenset[str]
    rest: dict[str, Any]

    @classmethod
    def of(cls, state: TrainingState, strategy: Strategy, extra: Mapping[str, Any]) -> Contents:
        """Split a training state into its parts; copies ``extra``, but not tensors. Not collective.

        Raises BadFileError if the model or the optimizer has state that can't be saved.
        """
        named = NamedTensors.of(state.model)
        names = state.parameter_names(named)
        weights = state.weights(named)
        buffers = frozenset(
            MODEL + name for name, tensor in named.tensors.items() if not isinstance(tensor, nn.Parameter)
        )
        tensors = weights | optimizer_tensors(state.optimizer, names)
        rest = {
            "tied": {MODEL + name: MODEL + first for name, first in named.tied.items()},
            "optimizer": describe_optimizer(state.optimizer, names),
            "scaler": state.scaler.state_dict() if state.scaler else {},
            "extra": deepcopy(dict(extra)),
        }
        pieces = {name: strategy.pieces(ref.tensor, ref.like) for name, ref in tensors.items()}
        return cls(pieces, buffers, rest)

    @property
    def parameters(self) -> frozenset[str]:
        """Names of the trained tensors. Their EMA is finite if they are."""
        return frozenset(name for name in self.pieces if name.startswith(MODEL)) - self.buffers

    def kinds(self) -> Kinds:
        """Return the properties that determine the layout of a save; compared with those of the last save."""
        return tuple(
            (name, piece.shape, piece.local.dtype, piece.offset, tuple(piece.local.shape))
            for name, pieces in self.pieces.items()
            for piece in pieces
        )

    def table(self) -> str:
        """Return names, dtypes and global shapes as JSON; raises BadFileError if a dtype is not supported."""
        return json.dumps(
            [
                (name, dtype_name(name, pieces[0].local.dtype), pieces[0].shape)
                for name, pieces in self.pieces.items()
            ]
        )

    def is_whole(self, name: str) -> bool:
        """Return True if this rank owns the whole tensor in one piece."""
        pieces = self.pieces[name]
        return len(pieces) == 1 and tuple(pieces[0].local.shape) == pieces[0].shape


class Staging:
    """Buffers for a rank's part of a checkpoint.

    One copy at a time: ``begin``, ``copy`` in the writing thread, and ``wait`` in the training loop before a
    tensor passed to ``begin`` changes.
    """

    def __init__(self, pieces: Mapping[str, Tensor]) -> None:
        device = next((tensor.device for tensor in pieces.values() if tensor.is_cuda), None)
        block, self.tensors = _allocate(pieces, is_on_gpu=device is not None)
        if device is not None and _pin(block, device):
            weakref.finalize(self, _unpin, block, device)
        self._device = device
        self._stream = None if device is None else torch.cuda.Stream(device)
        self._event: torch.cuda.Event | None = None
        self._left: dict[str, Tensor] = {}
        self._is_copied = threading.Event()
        self._is_copied.set()

    def begin(self, sources: Mapping[str, Tensor], at_once: Collection[str]) -> None:
        """Copy the tensors ``at_once``, and on a GPU start copying the rest. Main thread."""
        on_device = self._stream is not None
        now = {name for name in sources if name in at_once or sources[name].is_cuda != on_device}
        for name in now:
            _copy(self.tensors[name], sources[name])
        self._left = {name: tensor for name, tensor in sources.items() if name not in now}
        if self._stream is not None:
            self._begin_on_stream(self._stream)
        self._is_copied.clear()

    def _begin_on_stream(self, stream: torch.cuda.Stream) -> None:
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            for name, tensor in self._left.items():
                _copy(self.tensors[name], tensor)
            self._event = torch.cuda.Event()
            self._event.record(stream)

    def copy(self) -> dict[str, Tensor]:
        """Return the buffers once the copy is complete; on the CPU, do the copy. Writing thread."""
        try:
            if self._event is not None:
                # A thread starts with device 0, on which a wait would create a CUDA context for this rank.
                torch.cuda.set_device(self._device)
                self._event.synchronize()
            else:
                for name, tensor in self._left.items():
                    _copy(self.tensors[name], tensor)
            return self.tensors
        finally:
            self._left = {}
            self._is_copied.set()

    def wait(self) -> None:
        """Wait until tensors passed to ``begin`` may change; on a GPU later kernels wait, not the caller."""
        if self._event is not None:
            torch.cuda.current_stream(self._device).wait_event(self._event)
        else:
            self._is_copied.wait()


def _copy(target: Tensor, source: Tensor) -> None:
    if source.is_cuda:
        target.copy_(source.detach(), non_blocking=True)
        return
    # With NumPy, which also releases the interpreter but uses a single core; torch would start threads that
    # compete with training.
    width = _SAME_WIDTH[source.element_size()]
    np.copyto(target.view(width).numpy(), source.detach().view(width).numpy())


def is_finite(tensor: Tensor) -> bool:
    """Return True if no element is NaN or infinite; always for a dtype without infinity."""
    exponent = _EXPONENTS.get(tensor.dtype)
    if exponent is None or tensor.numel() == 0:
        return True
    # With NumPy for the same reason as in ``_copy``.
    flat = tensor.detach().contiguous().view(-1).view(_SAME_WIDTH[tensor.element_size()]).numpy()
    mask = flat.dtype.type(exponent)
    room = np.empty(min(_CHECKED, len(flat)), dtype=flat.dtype)
    for begin in range(0, len(flat), _CHECKED):
        part = flat[begin : begin + _CHECKED]
        if np.bitwise_and(part, mask, out=room[: len(part)]).max() == mask:
            return False
    return True


def _allocate(pieces: Mapping[str, Tensor], *, is_on_gpu: bool) -> tuple[Tensor, dict[str, Tensor]]:
    """Return a block of touched pages, and uninitialized contiguous tensors like ``pieces`` in it."""
    begins, end = {}, 0
    for name, tensor in pieces.items():
        begins[name] = end
        end += math.ceil(tensor.nbytes / _ALIGNMENT) * _ALIGNMENT
    block = (_unshared(end) if is_on_gpu and end else torch.empty(end, dtype=torch.uint8)).fill_(0)
    return block, {
        name: block[begins[name] : begins[name] + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        for name, tensor in pieces.items()
    }


def _unshared(size: int) -> Tensor:
    """Return a block that forked processes do not inherit.

    A write to pages that a child inherits makes a copy, while the GPU continues to write into the pinned
    pages (Linux before 5.9), so that the CPU would read old values.
    """
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    pages.madvise(mmap.MADV_DONTFORK)
    return torch.frombuffer(pages, dtype=torch.uint8)


def _pin(block: Tensor, device: torch.device) -> bool:
    """Pin the block's pages; if that is refused, copies are slower but correct.

    torch's pinned memory would be rounded up to a power of two.
    """
    if not block.nbytes:
        return False
    if int(torch.cuda.cudart().cudaHostRegister(block.data_ptr(), block.nbytes, 0)) == 0:
        return True
    with suppress(RuntimeError):  # CUDA raises the error again at the next kernel launch
        torch.zeros(1, device=device)
    return False


def _unpin(block: Tensor, device: torch.device) -> None:
    with torch.cuda.device(device):  # any thread may run the finalizer
        torch.cuda.cudart().cudaHostUnregister(block.data_ptr())
