"""Records which storages are live while a training step runs, and finds the moment of the peak.

``training.memory_prediction`` runs a step on tensors without data (FakeTensorMode) under ``LiveMemory``,
whose tensors ``MemoryLabels`` labels. torch's ``torch.distributed._tools.mem_tracker.MemTracker`` refuses a
second micro-batch and handles neither averages nor buckets, so only its method of observing storages is used.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch._guards import active_fake_mode
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hpc_train.experiment.plan.prediction import PARTS
from hpc_train.training.optimization import own_part
from hpc_train.training.strategies.pieces import local_part
from hpc_train.training.train_state import TrainState

#: Namespaces of operators whose arguments and results are communication buffers.
_COMMUNICATION = ("c10d", "_c10d_functional", "fsdp")
#: Collectives of the sharding group → the argument with this rank's shards.
_OF_SHARDS = {"_allgather_base_": 1, "_reduce_scatter_base_": 0, "all_gather_copy_in": 0}
#: Copies whole gradients into a reduce-scatter's input.
_GRADIENT_COPY = "_chunk_cat"
#: Operator → kind of collective. torch.distributed calls the first operators, DTensors ``all_reduce``.
_COLLECTIVES = {
    "_allgather_base_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "allreduce_": "all_reduce",
    "all_reduce": "tensor_all_reduce",
    "send": "send",
}


#: Collectives for which gloo allocates a copy of the whole tensor.
_COPIED_BY_GLOO = ("all_gather", "reduce_scatter")
_AXIS = "shard"


class LiveMemory(TorchDispatchMode):
    """Tracks the storages that operators return within this context, from allocation until they are freed.

    ``block_bytes``: the device's allocator rounds sizes up to multiples of it. ``copies_communicated``:
    whether the collectives are gloo's, which copy scattered and gathered tensors (torch's ProcessGroupGloo).
    """

    def __init__(self, block_bytes: int = 1, *, copies_communicated: bool = False) -> None:
        super().__init__()
        self._copies_communicated = copies_communicated
        self._block_bytes = block_bytes
        self._fake_mode = active_fake_mode()
        #: Size of sharded storages without a label on a rank of the full group, relative to this group.
        self.shard_factor = 1.0
        #: Whether new storages are sharded.
        self.allocates_shards = False
        #: (number of the storage, its bytes from then on), in order.
        self._events: list[tuple[int, int]] = []
        self._sizes: dict[int, int] = {}
        #: Address of a live storage → its number.
        self._numbers: dict[int, int] = {}
        self._references: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._labels: dict[int, str] = {}
        #: Storages that are buffers unless labeled otherwise.
        self._likely_buffers: set[int] = set()
        #: Number of a storage → offset of a tensor in it → the tensor's bytes here, and in the full group.
        self._scaled: dict[int, dict[int, tuple[int, float]]] = {}
        self._sharded: set[int] = set()
        self._first_event = 0
        #: Kind of collective → bytes of the whole tensors.
        self.communicated: Counter[str] = Counter()
        self._resize = torch.UntypedStorage.resize_

    def __enter__(self) -> LiveMemory:
        memory, resize = self, self._resize

        def resized(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
            result = resize(storage, size)
            number = memory._numbers.get(storage._cdata)  # fully_shard frees gathered parameters so
            if number is not None:
                memory._change(number, storage.nbytes())
                memory._likely_buffers.add(number)
            return result

        torch.UntypedStorage.resize_ = resized  # type: ignore[method-assign, assignment]
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it calls operators on its local tensors
        result = func(*args, **(kwargs or {}))
        if active_fake_mode() is not self._fake_mode:
            return result  # DTensor computes a shape
        for tensor in _tensors(result):
            self._take(tensor)
        if func.namespace in _COMMUNICATION or func.overloadpacket.__name__ == _GRADIENT_COPY:
            self._note_buffers((args, result))
            self._note_shards(func, args)
            self._count(func, args)
        return result

    def label(self, tensors: Iterable[Tensor], part: str, factor: float = 1.0) -> None:
        """Label these tensors as ``part``, from their allocation on; the first label counts.

        ``factor``: their size on a rank of the full group, relative to here.
        """
        for tensor in map(local_part, tensors):
            number = self._take(tensor)
            if number is not None and self._labels.setdefault(number, part) == part:
                sizes = self._scaled.setdefault(number, {})
                sizes.setdefault(int(tensor.storage_offset()), (tensor.nbytes, tensor.nbytes * factor))

    def start(self) -> None:
        """Start recording the peak and the bytes communicated."""
        self._first_event = len(self._events)
        self.communicated.clear()

    def peak(self) -> dict[str, int]:
        """Return the bytes of each part at the peak.

        Optimizer state allocated in the first step counts from the start, since later steps have it.
        """
        parts = [
            self._labels.get(number, "buffers" if number in self._likely_buffers else "activations")
            for number in range(len(self._sizes))
        ]
        changes = self._changes()
        now = Counter(dict.fromkeys(PARTS, 0))
        for number, change in changes:
            if parts[number] == "optimizer":
                now["optimizer"] += change
        best, total, most = dict(now), now["optimizer"], -1
        for place, (number, change) in enumerate(changes):
            if (part := parts[number]) != "optimizer":
                now[part] += change
                total += change
            if place + 1 >= self._first_event and total > most:
                best, most = dict(now), total
        return best

    def _changes(self) -> list[tuple[int, int]]:
        """Return the changes of the storages' bytes, on a rank of the full group."""
        factors = [self._factor(number) for number in range(len(self._sizes))]
        sizes, changes = [0] * len(factors), []
        for number, nbytes in self._events:
            size = -(-round(nbytes * factors[number]) // self._block_bytes) * self._block_bytes
            changes.append((number, size - sizes[number]))
            sizes[number] = size
        return changes

    def _factor(self, number: int) -> float:
        sizes = self._scaled.get(number, {}).values()
        here, there = sum(size for size, _ in sizes), sum(size for _, size in sizes)
        if here:
            return there / here
        return self.shard_factor if number in self._sharded else 1.0

    def _take(self, tensor: Tensor) -> int | None:
        """Return the number of a tensor's storage, and note its size; None for one without memory."""
        if tensor.device.type == "meta":
            return None
        storage = tensor.untyped_storage()  # for a fake tensor it is on the meta device
        address = storage._cdata
        number = self._numbers.get(address)
        if number is None:
            number = len(self._sizes)
            self._numbers[address] = number
            self._sizes[number] = 0
            if self.allocates_shards:
                self._sharded.add(number)
            self._references[number] = weakref.ref(storage, self._freeing(address, number))
        self._change(number, storage.nbytes())
        return number

    def _freeing(self, address: int, number: int) -> Any:
        def free(reference: Any) -> None:
            self._change(number, 0)
            if self._numbers.get(address) == number:
                del self._numbers[address]
            self._references.pop(number, None)

        return free

    def _change(self, number: int, nbytes: int) -> None:
        if nbytes != self._sizes[number]:
            self._events.append((number, nbytes))
            self._sizes[number] = nbytes

    def _note_shards(self, func: Any, args: Any) -> None:
        """Record storages of only this rank's shards, unless these are a view of the whole tensor."""
        place = _OF_SHARDS.get(func.overloadpacket.__name__)
        if place is None:
            return
        whole = {tensor.untyped_storage()._cdata for tensor in _tensors(args[1 - place])}
        for tensor in _tensors(args[place]):
            address = tensor.untyped_storage()._cdata
            if address in self._numbers and address not in whole:
                self._sharded.add(self._numbers[address])

    def _count(self, func: Any, args: Any) -> None:
        """Add the bytes of a collective: of its whole tensor, such as before a scatter or after a gather."""
        kind = _COLLECTIVES.get(func.overloadpacket.__name__)
        if kind is not None:
            whole = args[1] if kind == "reduce_scatter" else args[0]
            self.communicated[kind] += sum(tensor.nbytes for tensor in _tensors(whole))
            if kind in _COPIED_BY_GLOO and self._copies_communicated:
                copies = [torch.empty_like(tensor) for tensor in _tensors(whole)]
                for tensor in copies:
                    self._take(tensor)
                self._note_buffers(copies)

    def _note_buffers(self, values: Any) -> None:
        for tensor in _tensors(values):
            number = self._numbers.get(tensor.untyped_storage()._cdata)
            if number is not None:
                self._likely_buffers.add(number)


def _tensors(values: Any) -> Iterator[Tensor]:
    for value in tree_leaves(values):
        if isinstance(value, Tensor) and not isinstance(value, DTensor):
            yield value


@dataclass(frozen=True)
class ShardSizes:
    """A group of ``few`` shards runs in place of the full group of ``all`` shards."""

    few: int
    all: int

    def factor(self, value: Tensor) -> float:
        """Return the size of the first rank's rows of a DTensor in the full group, relative to here."""
        if not isinstance(value, DTensor) or self.few == self.all:
            return 1.0
        names = value.device_mesh.mesh_dim_names or ()
        axes = [
            (name, getattr(placement, "dim", None), size)
            for name, placement, size in zip(names, value.placements, value.device_mesh.shape, strict=False)
        ]
        dim = next((dim for name, dim, _ in axes if name == _AXIS), None)
        if dim is None:
            return 1.0
        # Tensor parallelism may split the same dimension.
        rows = -(-value.shape[dim] // prod(size for name, of, size in axes if of == dim and name != _AXIS))
        return _rows_of_first(rows, self.all) / max(_rows_of_first(rows, self.few), 1)


@dataclass
class MemoryLabels:
    """Labels the tensors of one step; its methods are called in the order of their definition."""

    memory: LiveMemory
    state: TrainState
    sizes: ShardSizes
    #: False under zero1, whose slices are views of whole parameters.
    are_parameters_sharded: bool
    #: ``id`` of an optimizer's tensor that replaces a DTensor → the DTensor's factor.
    _factors: dict[int, float] = field(default_factory=dict)

    def label_state(self) -> None:
        """Label the state before a step, and the gradients as autograd accumulates them."""
        state = self.state
        trained = list(state.strategy.optimized().values())
        self._label([*state.model.parameters(), *trained], "parameters")
        self.memory.label(state.model.buffers(), "buffers")
        if state.ema is not None:
            self._label(state.ema.averages.values(), "parameters")
        here = sum(local_part(value).nbytes for value in trained)
        there = sum(local_part(value).nbytes * self.sizes.factor(value) for value in trained)
        self.memory.shard_factor = there / here if here else 1.0
        self._label_when_accumulated(state.model)

    def _label_when_accumulated(self, model: nn.Module) -> None:
        """Label tensors accumulated in ``grad`` as gradients, even if they are freed before the update."""

        def accumulated(parameter: Tensor) -> None:
            if parameter.grad is not None:
                self._label([parameter.grad], "gradients")

        for value in model.parameters():
            if value.requires_grad:
                value.register_post_accumulate_grad_hook(accumulated)

    def before_update(self) -> None:
        """Label the gradients, and make the optimizer update local tensors: DTensors would be much slower.

        Storages allocated from here to the end of the optimizer step are sized like its shards.
        """
        state, optimizer = self.state, self.state.optimization.optimizer
        parameters = (*state.model.parameters(), *state.strategy.optimized().values())
        self._label((value.grad for value in parameters if value.grad is not None), "gradients")
        for group in optimizer.param_groups:
            group["params"] = [self._own_part(value) for value in group["params"]]
        self.memory.allocates_shards = True
        optimizer.register_step_post_hook(self._after_update)

    def _own_part(self, value: Tensor) -> Tensor:
        if not isinstance(value, DTensor) or value.grad is None:
            return value
        part = own_part(value)
        self._factors[id(part)] = self.sizes.factor(value)
        return part

    def _after_update(self, *arguments: object) -> None:
        self.memory.allocates_shards = False

    def label_optimizer(self) -> None:
        """Label the optimizer's state, after its step."""
        for part, values in self.state.optimization.optimizer.state.items():
            factor = self._factors.get(id(part), 1.0)
            for value in values.values():
                if isinstance(value, Tensor):
                    has_rows = value.dim() > 0 and value.shape[:1] == part.shape[:1]
                    self.memory.label([value], "optimizer", factor if has_rows else 1.0)

    def _label(self, tensors: Iterable[Tensor], part: str) -> None:
        for tensor in tensors:
            factor = self.sizes.factor(tensor) if self.are_parameters_sharded else 1.0
            self.memory.label([tensor], part, factor)


def _rows_of_first(rows: int, shards: int) -> int:
    return -(-rows // shards)
