"""The model as it is trained on this rank, its optimizer, and the state restored from a checkpoint."""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass
from typing import Any, cast

from torch import nn

from hpc_train import registry
from hpc_train.checkpoint.checkpointer import Checkpointer, Loaded
from hpc_train.checkpoint.state import TrainingState
from hpc_train.config.schema import Experiment
from hpc_train.config.training_sections import NormalizeConfig
from hpc_train.datasets.base import DataSource
from hpc_train.datasets.sampler import Position
from hpc_train.datasets.types import DataInfo
from hpc_train.distributed.seeds import seed_build
from hpc_train.errors import BadFileError, EnvironmentRefusesError
from hpc_train.models.blocks import find_blocks
from hpc_train.models.building import build_model
from hpc_train.models.depths import layer_depths
from hpc_train.models.fine_tuning import prepare_for_training
from hpc_train.models.weights import LoadReport, report_of
from hpc_train.run import versions
from hpc_train.strategies.base import RankContext, Strategy
from hpc_train.strategies.sync_batchnorm import has_batchnorm, sync_batchnorm
from hpc_train.topology.batch_arithmetic import BatchArithmetic
from hpc_train.topology.learning_rate import Schedule
from hpc_train.training import hardware, other_ranks
from hpc_train.training.activation_checkpointing import checkpoint_activations
from hpc_train.training.compiling import compile_model
from hpc_train.training.ema import Ema
from hpc_train.training.flops import without_weights
from hpc_train.training.fp8 import use_float8
from hpc_train.training.hardware import Hardware
from hpc_train.training.initial_weights import load_initial_weights
from hpc_train.training.optimization import Optimization, make_optimizer
from hpc_train.training.parameter_groups import matched_groups
from hpc_train.training.rank import Rank
from hpc_train.training.schedules import make_schedule

#: Methods that a plug-in's strategy may lack.
_METHODS = ("optimized", "weights_changed", "pieces", "owns_loss")


def part(kind: str, name: str) -> Any:
    """Return the plug-in of this name; its signature depends on its kind."""
    return registry.load(kind, name)


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
    config = rank.experiment
    return RankContext(
        rank=rank.facts.rank,
        degrees=rank.degrees,
        device=rank.device,
        precision=rank.precision,
        channels_last=config.model.channels_last,
        parallel=config.parallel,
        open_shared_sum=rank.group.open_shared_sum,
    )


def build(
    config: Experiment, info: DataInfo, batches: BatchArithmetic | None, context: RankContext
) -> TrainState:
    """Build, compile and place the model, then create the optimizer: torch requires this order.

    ``batches``: None to only evaluate, on any number of ranks and without the learning rates of steps.
    """
    seed_build(config.seed)
    model = build_model(config.model, info)
    load_initial_weights(model, config.model)
    return assemble(model, config, batches, context)


def assemble(
    model: nn.Module, config: Experiment, batches: BatchArithmetic | None, context: RankContext
) -> TrainState:
    """Do the rest of ``build`` once the model has its weights."""
    pretrained = report_of(model)
    prepare_for_training(model, config.model)
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
    optimizer = make_optimizer(
        config.optimization.optimizer,
        strategy.optimized(),
        config.optimization.global_batch_size,
        depths,
        matched,
        may_fuse=not (context.precision.needs_scaler or _has_sparse_gradients(strategy.model)),
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
    strategy = part("strategies", name)(context)
    missing = [method for method in _METHODS if not hasattr(strategy, method)]
    if missing:
        raise BadFileError(
            f"parallel.strategy: {name} has no {missing[0]}, which strategies.base.Strategy asks for; "
            "update its package, or write parallel.strategy: ddp"
        )
    return cast(Strategy, strategy)


def _has_sparse_gradients(model: nn.Module) -> bool:
    """Return True if an embedding has ``sparse=True``."""
    return any(getattr(module, "sparse", False) for module in model.modules())


class OtherVersionsError(EnvironmentRefusesError):
    """The environment differs from that of the checkpoint, and ``environment.strict`` is set."""


@dataclass(frozen=True)
class Resumed:
    """The point from which training continues; ``skips``: steps skipped so far by ``on_non_finite: skip``."""

    position: Position
    hardware: Hardware
    skips: int = 0


def resumed(rank: Rank, checkpointer: Checkpointer, train_state: TrainState, source: DataSource) -> Resumed:
    """Restore the newest complete checkpoint; return step 0 if there is none.

    Raises StorageError if all are damaged, OtherVersionsError if versions differ under
    ``environment.strict``, BadFileError if the data have changed or the checkpoint has no position.
    """
    loaded = checkpointer.load_newest(train_state.state)
    then, step = (None, 0) if loaded is None else (loaded.extra.get("hardware"), loaded.step)
    now = hardware.take_over(then, step, rank.device, checkpointer.ranks, rank.warn)
    if loaded is None:
        return Resumed(Position(0), now)
    _compare_versions(rank, loaded)
    _compare_ranks(rank, loaded, train_state)
    _check_data(loaded, source)
    saved = loaded.extra.get("position")
    if saved is None:
        raise BadFileError(f"checkpoint {loaded.step}: state.json does not contain the position of training")
    if saved["step"] > 0:
        # The rate of the step that produced these weights: a save before the next step records it.
        train_state.optimization.set_learning_rate(saved["step"] - 1)
    return Resumed(Position(saved["step"], tuple(saved["skipped"])), now, loaded.extra.get("skips", 0))


def _compare_versions(rank: Rank, loaded: Loaded) -> None:
    """Warn about versions that differ from those at the save; refuse them under ``environment.strict``."""
    now = versions.versions()
    then = {key: value for key, value in loaded.extra.get("versions", {}).items() if key in now}
    found = versions.differences(then, {key: now[key] for key in then})
    if not found:
        return
    words = f"checkpoint {loaded.step} was saved with other versions: {versions.in_words(found)}"
    if rank.experiment.environment.strict:
        raise OtherVersionsError(
            f"environment.strict: {words}; use those versions, or resume with environment.strict=false"
        )
    rank.warn(f"{words}; the weights may differ in the last bit from here on")


def _compare_ranks(rank: Rank, loaded: Loaded, train_state: TrainState) -> None:
    """Warn if the ranks differ from the ranks that saved: results change, if only by rounding."""
    words = other_ranks.difference(
        loaded.extra,
        _ranks(rank),
        loaded.step,
        has_batchnorm=train_state.has_batchnorm,
        is_synced=rank.experiment.parallel.sync_batchnorm,
    )
    if words is not None:
        rank.warn(words)


def _ranks(rank: Rank) -> dict[str, Any]:
    return other_ranks.conditions(rank.facts.world_size, rank.experiment.parallel.strategy, rank.degrees)


def _check_data(loaded: Loaded, source: DataSource) -> None:
    """Refuse data with another number of samples or other classes than the checkpoint was trained on."""
    then, now = loaded.extra.get("data"), _data_facts(source)
    if then is None or all(then[key] == now[key] for key in ("num_samples", "classes")):
        return
    what = "training samples" if then["num_samples"] != now["num_samples"] else "classes"
    counts = f": {then['num_samples']} then, {now['num_samples']} now" if what == "training samples" else ""
    raise BadFileError(
        f"data.root: the {what} are not those that checkpoint {loaded.step} was trained on{counts}; "
        "restore the data, or train again with hpc-train submit --new"
    )


def refuse_other_classes(loaded: Loaded, source: DataSource) -> None:
    """Raise BadFileError if the data have other classes than the checkpoint was trained on."""
    then = loaded.extra.get("data")
    if then is not None and then["classes"] != _data_facts(source)["classes"]:
        raise BadFileError(
            f"data: the classes are not those that checkpoint {loaded.step} was trained on; use data with "
            "the same classes, in folders of the same names"
        )


def normalized_as_trained(experiment: Experiment, loaded: Loaded) -> Experiment:
    """Return the experiment with the mean and standard deviation of the data that the checkpoint was trained
    on, if the file has none.
    """
    then = loaded.extra.get("data") or {}
    if experiment.data.normalize is not None or not then.get("mean"):
        return experiment
    normalize = NormalizeConfig(mean=then["mean"], std=then["std"])
    data = experiment.data.model_copy(update={"normalize": normalize})
    return experiment.model_copy(update={"data": data})


def _data_facts(source: DataSource) -> dict[str, Any]:
    classes = hashlib.sha256("\n".join(source.info.class_names).encode(errors="surrogatepass")).hexdigest()
    own = {"mean": list(source.info.mean), "std": list(source.info.std)}
    return {"num_samples": len(source.train), "classes": classes[:16]} | own


def extra(
    rank: Rank,
    source: DataSource,
    batches: BatchArithmetic,
    position: Position,
    hardware: Hardware,
    skips: int,
) -> dict[str, Any]:
    """Return the content of a checkpoint besides tensors: its position and its history."""
    return {
        "position": {"step": position.step, "skipped": list(position.skipped)},
        "skips": skips,
        "seed": rank.experiment.seed,
        "data": _data_facts(source) | {"info": asdict(source.info)},
        "micro_batches": batches.micro_batches,
        "steps_per_epoch": batches.steps_per_epoch,
        "precision": rank.experiment.precision,
        "device": rank.device.type,
        "hardware": hardware.to_json(),
        "versions": versions.versions(),
        **_ranks(rank),
    }
