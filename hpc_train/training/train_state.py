"""The model as it is trained on this rank: built with its weights, placed, with its optimizer and EMA.

``model.init_from`` loads weights of another run or of a file into a newly built model. ``precision: fp8``
runs the linear layers of the repeated blocks in float8, with torchao: input, weight and incoming gradient are
each scaled by their largest value and cast right before a product (e4m3 forward, e5m2 for gradients;
arXiv:2209.05433); everything else is as under ``bf16``. The parameters and their names do not change, so
checkpoints do not depend on the precision.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from hpc_train import registry
from hpc_train.errors import BadFileError
from hpc_train.experiment.config.schema import Experiment
from hpc_train.experiment.config.training_sections import ModelConfig
from hpc_train.experiment.topology.batch_arithmetic import BatchArithmetic
from hpc_train.experiment.topology.learning_rate import Schedule
from hpc_train.paths import CheckpointPaths, RunPaths
from hpc_train.registry import importing
from hpc_train.run.checkpoints import verify
from hpc_train.run.weight_source import KEY, described, find_source
from hpc_train.training.activation_checkpointing import checkpoint_activations
from hpc_train.training.checkpoint.export import plain_weights, uses_ema
from hpc_train.training.checkpoint.saved_tensors import SavedState
from hpc_train.training.checkpoint.state import NamedTensors, TrainingState
from hpc_train.training.compiling import compile_model
from hpc_train.training.datasets.random_numbers import seed_build
from hpc_train.training.datasets.types import DataInfo
from hpc_train.training.flops import without_weights
from hpc_train.training.models import building, fine_tuning, weight_files
from hpc_train.training.models.blocks import find_blocks, layer_depths
from hpc_train.training.models.weights import (
    LoadReport,
    StateDict,
    has_fitting_head,
    load_what_fits,
    report_of,
)
from hpc_train.training.optimization import Optimization, make_optimizer, make_schedule, matched_groups
from hpc_train.training.rank import Rank
from hpc_train.training.strategies.base import RankContext, Strategy
from hpc_train.training.strategies.batchnorm import has_batchnorm, sync_batchnorm
from hpc_train.training.strategies.buffers import Buffers
from hpc_train.training.strategies.pieces import local_part

#: Methods that a plug-in's strategy may lack.
_METHODS = ("optimized", "weights_changed", "pieces", "owns_loss")
#: Sizes of float8 products on the GPU are multiples of this.
_FP8_SIZES = 16


@dataclass(frozen=True)
class TrainState:
    """The model as it is trained on this rank, with its strategy, optimizer and EMA."""

    #: This rank's part of the model, without wrappers, so its names match checkpoints and exports.
    model: nn.Module
    #: The module that training calls.
    wrapped: nn.Module
    strategy: Strategy
    optimization: Optimization
    ema: Ema | None = None
    #: Number of parameters of the whole model.
    num_parameters: int = 0
    #: Report of the weights loaded from pretrained weights or ``init_from``; None if there are none.
    pretrained: LoadReport | None = None
    has_batchnorm: bool = False
    #: The whole model on the meta device, to count its FLOPs; on rank 0 only.
    without_weights: nn.Module | None = None

    @property
    def state(self) -> TrainingState:
        """The state that a checkpoint saves: model, optimizer, scaler and EMA."""
        optimization = self.optimization
        return TrainingState(
            self.model,
            optimization.optimizer,
            optimization.scaler,
            self.strategy.optimized(),
            {} if self.ema is None else self.ema.averages,
        )


def context(rank: Rank) -> RankContext:
    """Return this rank's context for a strategy."""
    options = rank.experiment.model.channels_last, rank.experiment.parallel
    place = rank.facts.rank, rank.degrees, rank.device, rank.precision
    return RankContext(*place, *options, rank.group.open_shared_sum)


def build(
    config: Experiment, info: DataInfo, batches: BatchArithmetic | None, context: RankContext
) -> TrainState:
    """Build, compile and place the model, then create the optimizer: torch requires this order.

    ``batches``: None to only evaluate, on any number of ranks and without the learning rates of steps.
    """
    seed_build(config.seed)
    model = building.build_model(config.model, info)
    load_initial_weights(model, config.model, info)
    return assemble(model, config, batches, context)


def assemble(
    model: nn.Module, config: Experiment, batches: BatchArithmetic | None, context: RankContext
) -> TrainState:
    """Do the rest of ``build`` once the model has its weights."""
    pretrained = report_of(model)
    fine_tuning.prepare_for_training(model, config.model)
    counted = without_weights(model) if context.rank == 0 else None
    if config.parallel.sync_batchnorm and batches is not None:  # evaluations use the running statistics
        model = sync_batchnorm(model, context.device, batches.micro_batches)
    blocks = find_blocks(model)
    layer_decay = config.optimization.optimizer.layer_decay
    depths = None if layer_decay is None else layer_depths(model, blocks)
    matched = matched_groups(config.optimization.optimizer, model)
    if context.precision.has_float8_linears:
        use_float8(blocks, context.device)
    checkpoint_activations(blocks, config.activation_checkpointing)
    compile_model(model, blocks, config.compile, context.device)
    strategy = _strategy(config, context)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    normalises = has_batchnorm(model)
    wrapped = strategy.place(model, blocks)
    is_sparse = any(getattr(module, "sparse", False) for module in strategy.model.modules())  # embeddings
    optimizer = make_optimizer(
        config.optimization.optimizer,
        strategy.optimized(),
        config.optimization.global_batch_size,
        depths,
        matched,
        may_fuse=not (context.precision.needs_scaler or is_sparse),
    )
    optimization = Optimization(optimizer, _schedule(config, batches), context.precision, context.device)
    ema = None if config.optimization.ema is None else Ema(strategy.model, config.optimization.ema.decay)
    return TrainState(
        strategy.model, wrapped, strategy, optimization, ema, num_parameters, pretrained, normalises, counted
    )


def _schedule(config: Experiment, batches: BatchArithmetic | None) -> Schedule:
    if batches is None:
        return lambda step: 1.0
    return make_schedule(config.optimization.schedule, batches.total_steps, batches.steps_per_epoch)


def _strategy(config: Experiment, context: RankContext) -> Strategy:
    name = config.parallel.strategy
    strategy = cast(Any, registry.load("strategies", name))(context)
    missing = [method for method in _METHODS if not hasattr(strategy, method)]
    if missing:
        raise BadFileError(
            f"parallel.strategy: {name} has no {missing[0]}, which strategies.base.Strategy asks for; "
            "update its package, or write parallel.strategy: ddp"
        )
    return cast(Strategy, strategy)


def load_initial_weights(model: nn.Module, config: ModelConfig, info: DataInfo) -> None:
    """Load the weights by name, in place; ``models.weights.report_of`` returns the report.

    It mentions a head for as many, but other classes than those of ``info``. Raises BadFileError if the
    weights can't be read or do not fit the model.
    """
    if config.init_from is None:
        return
    source = find_source(config.init_from)
    if source.is_file():
        weights, name = weight_files.read_weights(str(source), KEY)
    else:
        weights, name, classes_hash = _weights_of_checkpoint(CheckpointPaths(source))
        if classes_hash not in (None, info.classes_hash) and has_fitting_head(model, weights):
            name += ", whose head is for other classes or for another order of them"
    load_what_fits(model, weights, name, building.converter_of(config.name), KEY)


def _weights_of_checkpoint(checkpoint: CheckpointPaths) -> tuple[StateDict, str, str | None]:
    """Return the weights that ``export`` would write, their source, and the hash of the classes if saved."""
    if problems := verify(checkpoint):
        raise BadFileError(f"{KEY}: {checkpoint.folder} is damaged: {'; '.join(problems)}; name another run")
    saved = SavedState.read(checkpoint)
    ema = uses_ema(RunPaths(checkpoint.folder.parent.parent), saved, None)
    weights = {name: entry.read() for name, entry in plain_weights(checkpoint, saved, ema=ema).items()}
    name = f"the EMA weights of {described(checkpoint.folder)}" if ema else described(checkpoint.folder)
    return weights, name, (saved.extra.get("data") or {}).get("classes")


def use_float8(blocks: Sequence[nn.Module], device: torch.device) -> None:
    """Make the linear layers inside ``blocks`` multiply in float8, in place; emulated on a CPU.

    Not converted: the model's first and last layers, which are in no block; sizes that 16 does not divide;
    subclasses of ``nn.Linear``, which have their own forward. Raises BadFileError if no layer can be
    converted or torchao is missing.
    """
    with importing("torchao", "fp8", needed_by="precision: fp8", otherwise=", or write bf16"):
        from torchao import float8
    # The number of rows of a micro-batch, the inner size of the weight gradient's product, is arbitrary.
    config = float8.Float8LinearConfig(pad_inner_dim=True, emulate=device.type == "cpu")
    # A block itself can't be replaced in place.
    if not any(_has_fitting_sizes(module) for block in blocks for module in list(block.modules())[1:]):
        raise BadFileError(
            f"precision: fp8 finds no linear layer in the model's blocks whose sizes {_FP8_SIZES} divides; "
            "write bf16"
        )
    for block in blocks:
        if not isinstance(block, nn.Linear):
            float8.convert_to_float8_training(
                block, module_filter_fn=lambda module, name: _has_fitting_sizes(module), config=config
            )


def _has_fitting_sizes(module: nn.Module) -> bool:
    return type(module) is nn.Linear and not any(size % _FP8_SIZES for size in module.weight.shape)


class Ema:
    """An exponential moving average (EMA) of the weights, placed and sharded like the model's.

    Averages parameters and floating-point buffers; other buffers have their newest value.

    ``averages``: name → tensor, shaped, placed and named like the model's. Each rank averages the tensors it
    owns, so only ``share_buffers`` is collective.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        """``model``: already placed, with its initial weights."""
        self._model = model
        self._decay = decay
        self._places = Buffers(model)
        # FSDP keeps these tensor objects for its shards, although the module shows others during a forward.
        self._values = NamedTensors.of(model).tensors
        self.averages = {name: value.detach().clone() for name, value in self._values.items()}
        self._averaged = [name for name, value in self._values.items() if _has_fractions(value)]
        self._copied = [name for name, value in self._values.items() if not _has_fractions(value)]
        self._buffers = [name for name, value in self._values.items() if not isinstance(value, nn.Parameter)]

    @torch.no_grad()
    def update(self) -> None:
        """Update the averages from the weights; called after each optimizer step."""
        self._places.write_back()
        averages, values = self._locals(self._averaged)
        if averages:
            torch._foreach_lerp_(averages, values, 1 - self._decay)
        for average, value in zip(*self._locals(self._copied), strict=True):
            average.copy_(value)

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """Swap the model's values with the averages; afterwards both are restored bitwise."""
        self._exchange(self._values)
        try:
            yield
        finally:
            self._exchange(self._values)

    def share_buffers(self, strategy: Strategy) -> None:
        """Broadcast rank 0's averages of buffers, before an evaluation or a save. Collective."""
        # Through the strategy, which knows the ranks that own the same buffers.
        self._exchange(self._buffers)
        try:
            strategy.share_buffers(all_persistent=True)
        finally:
            self._exchange(self._buffers)

    @torch.no_grad()
    def _exchange(self, names: Iterable[str]) -> None:
        # Free parameters that an evaluation's forward left gathered: the next forward would use them.
        for module in self._model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        self._places.write_back()
        for average, value in zip(*self._locals(names), strict=True):
            copied = value.clone()
            value.copy_(average)
            average.copy_(copied)

    def _locals(self, names: Iterable[str]) -> tuple[list[Tensor], list[Tensor]]:
        """Return this rank's parts of averages and values. Not cached: FSDP may replace a padded one."""
        pairs = [(local_part(self.averages[name]), local_part(self._values[name])) for name in names]
        return [average for average, _ in pairs], [value for _, value in pairs]


def _has_fractions(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()
