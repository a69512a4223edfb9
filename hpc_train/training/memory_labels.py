"""Labels a step's tensors for ``LiveMemory``, with their sizes on a rank of the full group.

``training.memory_prediction`` runs a small group, since ``fully_shard`` creates a view per rank and
parameter. Rows are sharded as by ``torch.chunk``: the first rank has the most.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from math import prod

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hpc_train.strategies.pieces import local_part
from hpc_train.training.live_memory import LiveMemory
from hpc_train.training.optimization import own_part
from hpc_train.training.train_state import TrainState

_AXIS = "shard"


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
        return _ceil(rows, self.all) / max(_ceil(rows, self.few), 1)


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


def _ceil(rows: int, shards: int) -> int:
    return -(-rows // shards)
