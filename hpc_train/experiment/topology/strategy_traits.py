"""The properties of strategies that are needed without importing torch: one row per strategy.

Validation, planning and the batch size search read these rows instead of naming strategies. A plug-in exports
its row as an entry point under the strategy's name in the group ``hpc_train.strategy_traits``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from hpc_train.experiment.config.problems import Problem, shown
from hpc_train.registry import load_traits


@dataclass(frozen=True)
class StrategyTraits:
    """The defaults describe a data-parallel plug-in whose ranks each own the whole model."""

    #: The degrees (keys of ``parallel:``) that the strategy supports.
    degrees: tuple[str, ...] = ()
    #: The degrees that default to the remaining ranks: the first of them that the file does not set.
    rest: tuple[str, ...] = ("replicate",)
    #: A degree that defaults to all ranks of a node.
    spans_node: str | None = None
    #: A degree that defaults to the largest number of ranks that divides the remaining ranks of a node.
    divides_node: str | None = None
    #: The strategy that additionally replicates the shards of this strategy.
    replicated_by: str | None = None
    #: Boolean keys of ``parallel.args``; None: the strategy itself checks its arguments.
    arguments: tuple[str, ...] | None = None
    #: Whether parameters are DTensors that ``fully_shard`` placed.
    shards_parameters: bool = False
    #: Whether the optimizer receives shards instead of whole parameters.
    shards_optimizer: bool = False
    #: Whether a rank owns parts of layers, or some of the layers only.
    is_model_parallel: bool = False
    #: Whether the model is split into consecutive stages.
    has_stages: bool = False
    #: Whether stages work on several micro-batches at a time, by ``parallel.schedule``.
    has_schedule: bool = False
    #: Whether a rank runs its micro-batches one after the other, so that two need as much memory as all.
    runs_one_by_one: bool = False
    #: Whether a rank can compute another rank's micro-batches without communication, with the same result.
    computes_alone: bool = False
    #: Whether a DeviceMesh is created, with process groups along its axes.
    has_mesh: bool = True
    #: ``module:attr`` of a built-in strategy's class. A plug-in has an entry point instead.
    implementation: str = ""


_UNUSED = ("find_unused_parameters",)
#: A strategy whose ranks each own a shard of all parameters.
_SHARDED = StrategyTraits(
    degrees=("shard",),
    rest=("shard",),
    arguments=(),
    shards_parameters=True,
    shards_optimizer=True,
    runs_one_by_one=True,
    implementation="hpc_train.training.strategies.fully_sharded:FSDPStrategy",
)
#: The built-in strategies, one row each.
BUILT_IN = {
    "ddp": StrategyTraits(
        arguments=_UNUSED,
        runs_one_by_one=True,
        computes_alone=True,
        has_mesh=False,
        implementation="hpc_train.training.strategies.ddp:DDPStrategy",
    ),
    "fsdp": replace(_SHARDED, replicated_by="hsdp"),
    "hsdp": replace(
        _SHARDED,
        degrees=("shard", "replicate"),
        rest=("replicate", "shard"),
        spans_node="shard",
        implementation="hpc_train.training.strategies.fully_sharded:HSDPStrategy",
    ),
    "zero1": replace(
        _SHARDED,
        arguments=_UNUSED,
        shards_parameters=False,
        computes_alone=True,
        implementation="hpc_train.training.strategies.zero1:ZeRO1Strategy",
    ),
    "zero2": replace(_SHARDED, implementation="hpc_train.training.strategies.fully_sharded:ZeRO2Strategy"),
    "tensor": replace(
        _SHARDED,
        degrees=("shard", "replicate", "tensor"),
        rest=("replicate",),
        divides_node="tensor",
        is_model_parallel=True,
        implementation="hpc_train.training.strategies.tensor:TensorStrategy",
    ),
    "pipeline": replace(
        _SHARDED,
        degrees=("shard", "replicate", "tensor", "pipeline"),
        rest=("pipeline", "replicate"),
        is_model_parallel=True,
        has_stages=True,
        has_schedule=True,
        runs_one_by_one=False,
        implementation="hpc_train.training.strategies.pipeline:PipelineStrategy",
    ),
}
#: A pipeline with one micro-batch at a time.
BUILT_IN["split"] = replace(
    BUILT_IN["pipeline"],
    has_schedule=False,
    implementation="hpc_train.training.strategies.pipeline:SplitStrategy",
)


def traits_of(strategy: str) -> StrategyTraits:
    """Return the traits of a strategy by its name in the file.

    An unknown strategy, or one without a row, has the defaults. Raises BadFileError if a plug-in's row can't
    be imported or is not a ``StrategyTraits``.
    """
    return BUILT_IN.get(strategy) or load_traits("strategies", strategy, StrategyTraits())


def problems_of_arguments(strategy: str, arguments: Mapping[str, object]) -> Iterator[Problem]:
    """Yield the problems of ``parallel.args``. Called by validation and the strategies of this package."""
    taken = traits_of(strategy).arguments
    if taken is None:
        return
    for argument, value in arguments.items():
        path = ("parallel", "args", argument)
        if argument not in taken:
            remedy = f"write {' or '.join(taken)}, or take it out" if taken else "take it out"
            yield Problem(path, f"does not apply to strategy {strategy}", remedy, on_key=True)
        elif not isinstance(value, bool):
            message = f"needs true or false, got {shown(value)}"
            yield Problem(path, message, "write one of them, without quotes")


def taking(degree: str) -> tuple[str, ...]:
    """Return the strategies of this package that support a degree."""
    return tuple(name for name, traits in BUILT_IN.items() if degree in traits.degrees)
