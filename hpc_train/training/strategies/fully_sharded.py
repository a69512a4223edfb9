"""``strategy: fsdp``, ``hsdp`` and ``zero2``, and their common base with ``tensor`` and ``pipeline``.

``fully_shard`` (FSDP2) of each block, then of the rest.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from typing_extensions import override

from hpc_train.errors import BadFileError
from hpc_train.experiment.validate.compatibility import sharded_batchnorm
from hpc_train.training.distributed.device import Precision
from hpc_train.training.strategies.base import RankContext
from hpc_train.training.strategies.batchnorm import has_batchnorm
from hpc_train.training.strategies.data_parallel import DataParallel
from hpc_train.training.strategies.pieces import clip_over_ranks, mesh_of, new_mesh


class FullySharded(DataParallel):
    """Shards parameters, gradients and optimizer state; gathers a block's parameters while it computes."""

    handles_mixed_precision = True
    #: Used in errors.
    name: str
    #: Whether a block's gathered parameters are freed between its forward and its backward.
    reshard_after_forward = True

    def __init__(self, context: RankContext) -> None:
        context.check_args(self.name)
        super().__init__(context)

    @abstractmethod
    def mesh(self) -> DeviceMesh:
        """Return the mesh of the ranks that share parameters; the first axis of two holds replicas."""

    @override
    def wrap(self, model: nn.Module, blocks: Sequence[nn.Module]) -> nn.Module:
        refuse_unshardable(model, blocks, self.context.precision, self.name)
        shard(model, blocks, self.mesh(), self.context.precision, self.reshard_after_forward)
        return model

    @override
    def synchronised(self, is_last: bool) -> AbstractContextManager[object]:
        assert isinstance(self.wrapped, FSDPModule)
        self.wrapped.set_requires_gradient_sync(is_last)
        return nullcontext()

    def clip_gradients(self, max_norm: float) -> Tensor:
        """Clip sharded gradients. Collective."""
        return clip_over_ranks(self.model.parameters(), self.pieces, max_norm, self.context)


def shard(
    model: nn.Module,
    blocks: Sequence[nn.Module],
    mesh: DeviceMesh,
    precision: Precision,
    reshard_after_forward: bool,
) -> None:
    """Shard ``model``, or a stage of it, over ``mesh`` in place: each block separately, the rest together.

    ``blocks``: the blocks in ``model``. ``mesh``: the ranks with the same layers and different data, perhaps
    a single rank; the first axis of two holds replicas. Forward and backward compute in
    ``precision.compute_dtype``, gradients are averaged in ``precision.param_dtype``. Collective.
    """
    policy = MixedPrecisionPolicy(param_dtype=precision.compute_dtype, reduce_dtype=precision.param_dtype)
    for block in blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard_after_forward)
    # The root's parameters are needed again at once, so torch's default, which keeps them, is used.
    fully_shard(model, mesh=mesh, mp_policy=policy)


def refuse_unshardable(
    model: nn.Module, blocks: Sequence[nn.Module], precision: Precision, strategy: str
) -> None:
    """Raise BadFileError if ``fully_shard`` can't shard the model. ``strategy``: its name in the file."""
    if precision.is_mixed and has_batchnorm(model):
        raise sharded_batchnorm(precision.name, strategy, "this model").as_error()
    numbers = [name for name, parameter in model.named_parameters() if parameter.dim() == 0]
    if numbers:
        raise BadFileError(
            f"model.name: {numbers[0]} is a single number, which {strategy} can't shard; give it the "
            "shape (1,), or write parallel.strategy: zero1"
        )
    _refuse_tied_apart(model, blocks, strategy)


def _refuse_tied_apart(model: nn.Module, blocks: Sequence[nn.Module], strategy: str) -> None:
    """Raise BadFileError for a parameter of two blocks, or of a block and the rest: two groups shard it."""
    first: dict[nn.Parameter, tuple[str, nn.Module | None]] = {}
    for name, parameter, block in _uses(model, set(blocks)):
        other, other_block = first.setdefault(parameter, (name, block))
        if block is not other_block:
            raise BadFileError(
                f"model.name: {other} and {name} are one parameter, and {strategy} shards the two places by "
                "themselves; write parallel.strategy: ddp or zero1, or a blocks() that keeps them together"
            )


def _uses(
    module: nn.Module, blocks: set[nn.Module], prefix: str = "", block: nn.Module | None = None
) -> Iterator[tuple[str, nn.Parameter, nn.Module | None]]:
    """Yield each place of each parameter: its name, the parameter, and the block that contains it."""
    block = module if module in blocks else block
    for key, parameter in module._parameters.items():
        if parameter is not None:
            yield prefix + key, parameter, block
    for key, child in module._modules.items():
        if child is not None:
            yield from _uses(child, blocks, f"{prefix}{key}.", block)


class FSDPStrategy(FullySharded):
    """Parameters, gradients and optimizer state sharded over all ranks (ZeRO-3).

    A block's parameters are gathered twice per micro-batch.
    """

    name = "fsdp"

    @override
    def mesh(self) -> DeviceMesh:
        return new_mesh(self.context.device.type, (self.context.degrees.shard,), ("shard",))


class HSDPStrategy(FullySharded):
    """Sharded within groups of ranks (usually a node); the groups are replicas of each other.

    Gathers parameters only within a group; averages gradient shards between groups.
    """

    name = "hsdp"

    @override
    def mesh(self) -> DeviceMesh:
        return mesh_of(self.context, ("replicate", "shard"))


class ZeRO2Strategy(FSDPStrategy):
    """Like fsdp, but a block keeps its gathered parameters until the end of its backward.

    Gathers once per micro-batch, fsdp twice, but needs the memory of the whole model's parameters.
    """

    name = "zero2"
    reshard_after_forward = False
