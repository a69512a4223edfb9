"""Which settings do not work together: the single source for validation, tests and docs/parallelism.md.

``FEATURES`` are settings that can be combined freely except for ``REFUSALS``. A refusal checks a whole
experiment, so its message can name the key to change, and how.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from hpc_train.config.problems import KeyPath, Problem
from hpc_train.config.schema import Experiment
from hpc_train.data_facts.by_name import task_facts
from hpc_train.errors import shortened
from hpc_train.topology.strategy_traits import StrategyTraits, traits_of
from hpc_train.validate import model_facts
from hpc_train.validate.base import Rule, rule

#: Precisions whose compute dtype differs from the dtype of the parameters.
_MIXED = ("bf16", "fp16", "fp8")


@dataclass(frozen=True)
class Feature:
    """One setting, as overrides of a file: a row of the docs' table, which tests combine."""

    title: str
    overrides: tuple[str, ...]
    #: Whether it runs on a CPU within seconds; otherwise it is left to ``make test-gpu``.
    on_cpu: bool = True


FEATURES = (
    Feature("fp32", ("precision=fp32",)),
    Feature("tf32", ("precision=tf32",)),
    Feature("bf16", ("precision=bf16",)),
    Feature("fp16 with a scaler", ("precision=fp16",)),
    Feature("fp8", ("precision=fp8",), on_cpu=False),
    Feature("fp64", ("precision=fp64",)),
    Feature("gradient clipping", ("optimization.clip_grad_norm=1.0",)),
    Feature("channels_last", ("model.channels_last=true",)),
    Feature("SyncBN", ("parallel.sync_batchnorm=true",)),
    Feature("EMA", ("optimization.ema={decay: 0.9}",)),
    Feature("layer-wise lr decay", ("optimization.optimizer.layer_decay=0.8",)),
    Feature("compile, by block", ("compile=true",)),
    Feature("compile, whole", ("compile={scope: model}",)),
    Feature("compile, reduce-overhead", ("compile={mode: reduce-overhead}",)),
    Feature("compile, max-autotune", ("compile={mode: max-autotune}",), on_cpu=False),
    Feature("compile, with fallback", ("compile={fallback: true}",)),
    Feature("activation checkpointing, all blocks", ("activation_checkpointing=blocks",)),
    Feature("activation checkpointing, every 2nd block", ("activation_checkpointing=every 2",)),
    Feature("activation checkpointing, selective", ("activation_checkpointing=selective",)),
)


@dataclass(frozen=True)
class Refusal:
    """Settings that do not work together. ``reads``: the dotted keys that ``holds`` reads."""

    reads: tuple[str, ...]
    path: KeyPath
    holds: Callable[[Experiment], bool]
    message: Callable[[Experiment], str]
    remedy: str
    #: Whether ``holds`` may start a child process to inspect a model.
    asks_model: bool = False

    def as_rule(self) -> Rule:
        """Return the rule that reports a problem at ``path`` if ``holds`` is true."""

        def find(experiment: Experiment) -> Iterator[Problem]:
            if self.holds(experiment):
                yield Problem(self.path, self.message(experiment), self.remedy)

        return rule(*self.reads)(find)


#: Optimizers of torch and timm that need whole parameters instead of DTensors. Compared by a test.
NEED_WHOLE_PARAMETERS = (
    "adafactor", "adamp", "adamuon", "cadafactor", "cadamp", "cmars", "csgdp", "mars", "nadamuon", "novograd",
    "novogradc", "novogradw", "sgdp",
)  # fmt: skip


#: Optimizers of timm that clip by the norm of all their parameters unless configured otherwise.
CLIP_BY_THEMSELVES = ("lamb", "lambc", "lambw")


def _clips_a_part(experiment: Experiment) -> bool:
    optimizer = experiment.optimization.optimizer
    name = optimizer.name.lower().rpartition("/")[2]
    is_off = optimizer.args.get("max_grad_norm", 1.0) is None
    return _traits(experiment).is_model_parallel and name in CLIP_BY_THEMSELVES and not is_off


def _needs_whole(experiment: Experiment) -> bool:
    name = experiment.optimization.optimizer.name.lower().rpartition("/")[2]
    return _traits(experiment).shards_optimizer and name in NEED_WHOLE_PARAMETERS


def _traits(experiment: Experiment) -> StrategyTraits:
    return traits_of(experiment.parallel.strategy)


def _needs_whole_model(experiment: Experiment) -> bool:
    return task_facts(experiment.task).needs_whole_model


def _ties_stages(experiment: Experiment) -> bool:
    """Check gpt only; for any other model the ranks find out when they split it."""
    model = experiment.model
    is_tied = model.name == "gpt" and model.args.get("tie_embeddings", True) is True
    return is_tied and _traits(experiment).has_stages and experiment.parallel.pipeline != 1


def _has_batchnorm(experiment: Experiment) -> bool:
    return model_facts.has_batchnorm(experiment.model.name, experiment.model.args) or False


def _adapts_shared_layers(experiment: Experiment) -> bool:
    traits, tensor = _traits(experiment), experiment.parallel.tensor
    is_shared = traits.is_model_parallel and not traits.has_stages and tensor != 1
    return experiment.model.lora is not None and (is_shared or (tensor or 1) > 1)


def _replays_graphs(experiment: Experiment) -> bool:
    return experiment.compile.enabled and experiment.compile.mode in {"reduce-overhead", "max-autotune"}


_FP32_OR_DDP = "write fp32, or parallel.strategy: ddp"
_WRITE_A_NUMBER = "write a number, like 64"
_WRITE_BLOCKS = "write blocks"
_NO_FLOAT8 = "write bf16, or use such a GPU"


def sharded_batchnorm(precision: str, strategy: str, model: str) -> Problem:
    """Return the problem with BatchNorm in mixed precision if the strategy shards parameters."""
    message = f"{precision} does not work under {strategy} for {model}, which has BatchNorm"
    return Problem(("precision",), message, _FP32_OR_DDP)


def auto_batchnorm(model: str) -> Problem:
    """Return the problem with ``micro_batch_size: auto`` for a model with BatchNorm."""
    message = f"auto would make BatchNorm's statistics depend on memory, and {model} has BatchNorm"
    return Problem(("optimization", "micro_batch_size"), message, _WRITE_A_NUMBER)


def auto_on_cpu() -> Problem:
    """Return what is wrong with ``micro_batch_size: auto`` for ranks without GPUs."""
    path = ("optimization", "micro_batch_size")
    return Problem(path, "auto finds what fits into the memory of a GPU, and ranks use CPUs", _WRITE_A_NUMBER)


def compiled_whole(strategy: str) -> Problem:
    """Return the problem with compiling the whole model if the strategy cuts it into stages."""
    message = f"model compiles the forward of the whole model, which no rank runs under {strategy}"
    return Problem(("compile", "scope"), message, _WRITE_BLOCKS)


def no_float8(found: str) -> Problem:
    """Return the problem with fp8 on a device without it; ``found``: the device or GPU that is used."""
    message = f"fp8 needs an NVIDIA GPU of compute capability 9.0 or higher (H100), and {found}"
    return Problem(("precision",), message, _NO_FLOAT8)


def uneven_sync_batchnorm(micro_batches: int, ranks: int) -> Problem | None:
    """Return the problem if SyncBN's ranks have spare slots, whose samples would count twice."""
    if micro_batches % ranks == 0:
        return None
    message = f"needs a number of ranks that divides {micro_batches} micro-batches, got {ranks}"
    fitting = max(size for size in range(1, ranks) if micro_batches % size == 0)
    return Problem(("parallel", "sync_batchnorm"), message, f"start {fitting}, or write false")


REFUSALS = (
    Refusal(
        reads=("optimization.optimizer", "parallel.strategy"),
        path=("optimization", "optimizer", "name"),
        holds=_clips_a_part,
        message=lambda e: (
            f"{shortened(e.optimization.optimizer.name)} clips by the norm of all its parameters, and under "
            f"{e.parallel.strategy} a rank has only a part of the model"
        ),
        remedy="write args: {max_grad_norm: null} with it, and optimization.clip_grad_norm: 1.0",
    ),
    Refusal(
        reads=("optimization.optimizer.name", "parallel.strategy"),
        path=("optimization", "optimizer", "name"),
        holds=_needs_whole,
        message=lambda e: (
            f"{shortened(e.optimization.optimizer.name)} needs whole parameters, and "
            f"{e.parallel.strategy} gives it shards"
        ),
        remedy="write adamw, or parallel.strategy: ddp",
    ),
    Refusal(
        reads=("model.channels_last", "parallel.strategy"),
        path=("model", "channels_last"),
        holds=lambda e: e.model.channels_last and _traits(e).shards_parameters,
        message=lambda e: f"can't be true under {e.parallel.strategy}, which can't shard such weights",
        remedy="write false, or parallel.strategy: ddp",
    ),
    Refusal(
        reads=("model.name", "model.args", "precision", "parallel.strategy"),
        path=("precision",),
        holds=lambda e: e.precision in _MIXED and _traits(e).shards_parameters and _has_batchnorm(e),
        message=lambda e: (
            sharded_batchnorm(e.precision, e.parallel.strategy, shortened(e.model.name)).message
        ),
        remedy=_FP32_OR_DDP,
        asks_model=True,
    ),
    Refusal(
        reads=("optimization.micro_batch_size", "model.name", "model.args"),
        path=("optimization", "micro_batch_size"),
        holds=lambda e: e.optimization.micro_batch_size == "auto" and _has_batchnorm(e),
        message=lambda e: auto_batchnorm(shortened(e.model.name)).message,
        remedy=_WRITE_A_NUMBER,
        asks_model=True,
    ),
    Refusal(
        reads=("parallel.sync_batchnorm", "parallel.strategy"),
        path=("parallel", "sync_batchnorm"),
        holds=lambda e: e.parallel.sync_batchnorm and _traits(e).is_model_parallel,
        message=lambda e: (
            f"can't be true under {e.parallel.strategy}, whose ranks have only some of the layers"
        ),
        remedy="write false, or parallel.strategy: ddp",
    ),
    Refusal(
        reads=("precision", "device"),
        path=("precision",),
        holds=lambda e: e.precision == "fp8" and e.device == "cpu",
        message=lambda e: no_float8("device is cpu").message,
        remedy=_NO_FLOAT8,
    ),
    Refusal(
        reads=("precision", "parallel.strategy"),
        path=("precision",),
        holds=lambda e: e.precision == "fp8" and _traits(e).is_model_parallel,
        message=lambda e: f"fp8 does not work under {e.parallel.strategy}, whose ranks share layers",
        remedy="write bf16, or parallel.strategy: fsdp",
    ),
    Refusal(
        reads=("model.lora", "parallel"),
        path=("model", "lora"),
        holds=_adapts_shared_layers,
        message=lambda e: f"does not work under {e.parallel.strategy} where ranks share linear layers",
        remedy="write parallel.strategy: fsdp",
    ),
    Refusal(
        reads=("model.lora", "precision"),
        path=("precision",),
        holds=lambda e: e.model.lora is not None and e.precision == "fp8",
        message=lambda e: "fp8 does not work with model.lora, whose layers have their own forward",
        remedy="write bf16",
    ),
    Refusal(
        reads=("compile", "parallel.strategy"),
        path=("compile", "mode"),
        # The inputs of a CUDA graph would have moved, or its results be overwritten before their backward.
        holds=lambda e: _replays_graphs(e) and _traits(e).shards_parameters,
        message=lambda e: (
            f"{e.compile.mode} replays CUDA graphs, which does not work under {e.parallel.strategy}: "
            "parameters or activations do not stay in one place from forward to backward"
        ),
        remedy="write default, or parallel.strategy: ddp",
    ),
    Refusal(
        reads=("compile", "parallel.strategy"),
        path=("compile", "scope"),
        holds=lambda e: e.compile.enabled and e.compile.scope == "model" and _traits(e).has_stages,
        message=lambda e: compiled_whole(e.parallel.strategy).message,
        remedy=_WRITE_BLOCKS,
    ),
    Refusal(
        reads=("model.name", "model.args", "parallel"),
        path=("model", "args", "tie_embeddings"),
        holds=_ties_stages,
        message=lambda e: (
            "true shares a weight between the first and the last stage, which "
            f"{e.parallel.strategy} does not support"
        ),
        remedy="write false, or parallel.strategy: fsdp",
    ),
    Refusal(
        reads=("task", "parallel.strategy"),
        path=("parallel", "strategy"),
        holds=lambda e: _needs_whole_model(e) and _traits(e).is_model_parallel,
        message=lambda e: f"{e.parallel.strategy} splits the model, and {e.task} needs it whole",
        remedy="write ddp, or fsdp",
    ),
    Refusal(
        reads=("task", "precision", "parallel.strategy"),
        path=("precision",),
        holds=lambda e: _needs_whole_model(e) and e.precision in _MIXED and _traits(e).shards_parameters,
        message=lambda e: (
            f"{e.precision} under {e.parallel.strategy} rounds the boxes that the model of {e.task} takes"
        ),
        remedy=_FP32_OR_DDP,
    ),
    Refusal(
        reads=("compile",),
        path=("compile", "fallback"),
        holds=lambda e: e.compile.enabled and e.compile.fallback and e.compile.fullgraph,
        message=lambda e: (
            "can't be combined with fullgraph: true, which ends the run where fallback would continue"
        ),
        remedy="take one of the two out",
    ),
    Refusal(
        reads=("parallel.sync_batchnorm", "compile"),
        path=("compile", "fullgraph"),
        holds=lambda e: e.compile.enabled and e.compile.fullgraph and e.parallel.sync_batchnorm,
        message=lambda e: "can't be true with parallel.sync_batchnorm, which breaks the graph",
        remedy="write false",
    ),
)

RULES = tuple(refusal.as_rule() for refusal in REFUSALS if not refusal.asks_model)
#: Refusals that may start a child process.
MODEL_RULES = tuple(refusal.as_rule() for refusal in REFUSALS if refusal.asks_model)
