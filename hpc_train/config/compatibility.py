"""What does not work together: the one place that validation, tests and docs/parallelism.md take it from.

``FEATURES`` are settings of the file that can be combined freely but for what ``REFUSALS`` name. A refusal
holds for a whole experiment, so that it says where and what to write instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from hpc_train.config import names
from hpc_train.config.degrees import SHARING_LAYERS
from hpc_train.config.pipelines import BY_STAGES
from hpc_train.config.problems import KeyPath, Problem, Rule, rule, shortened
from hpc_train.config.schema import Experiment

#: Those of this suite; a plug-in's own is refused nothing here.
STRATEGIES = ("ddp", "fsdp", "hsdp", "zero1", "zero2", "tensor", "pipeline", "split")
#: Strategies that place parameters with ``fully_shard``.
FULLY_SHARDED = ("fsdp", "hsdp", "zero2", *SHARING_LAYERS)
#: Precisions that compute in another format than parameters are kept in.
_MIXED = ("bf16", "fp16", "fp8")


@dataclass(frozen=True)
class Feature:
    """One setting, as overrides of a file: what the docs' table has a row for, and tests combine."""

    title: str
    overrides: tuple[str, ...]
    #: Whether a CPU has it, and takes seconds for it: else it is left to ``make test-gpu``.
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
    """Settings that do not work together. ``reads``: the dotted keys that ``holds`` looks at."""

    reads: tuple[str, ...]
    path: KeyPath
    holds: Callable[[Experiment], bool]
    message: Callable[[Experiment], str]
    remedy: str
    #: Whether ``holds`` may start a child process, to ask for a model's parts.
    asks_model: bool = False

    def as_rule(self) -> Rule:
        def find(experiment: Experiment) -> Iterator[Problem]:
            if self.holds(experiment):
                yield Problem(self.path, self.message(experiment), self.remedy)

        return rule(*self.reads)(find)


#: Optimizers of torch and timm that reckon with a parameter as a whole, not with a DTensor. A test compares.
NEED_WHOLE_PARAMETERS = (
    "adafactor", "adamp", "adamuon", "cadafactor", "cadamp", "cmars", "csgdp", "mars", "nadamuon", "novograd",
    "novogradc", "novogradw", "sgdp",
)  # fmt: skip


#: Optimizers of timm that clip by the norm of all that they hold, unless told otherwise.
CLIP_BY_THEMSELVES = ("lamb", "lambc", "lambw")


def _clips_a_part(experiment: Experiment) -> bool:
    optimizer = experiment.optimization.optimizer
    name = optimizer.name.lower().rpartition("/")[2]
    is_off = optimizer.args.get("max_grad_norm", 1.0) is None
    return experiment.parallel.strategy in SHARING_LAYERS and name in CLIP_BY_THEMSELVES and not is_off


def _needs_whole(experiment: Experiment) -> bool:
    name = experiment.optimization.optimizer.name.lower().rpartition("/")[2]
    is_sharded = experiment.parallel.strategy == "zero1" or _is_fully_sharded(experiment)
    return is_sharded and name in NEED_WHOLE_PARAMETERS


def _is_fully_sharded(experiment: Experiment) -> bool:
    return experiment.parallel.strategy in FULLY_SHARDED


def _is_staged(experiment: Experiment) -> bool:
    return experiment.parallel.strategy in BY_STAGES


def _ties_stages(experiment: Experiment) -> bool:
    """Tell of gpt alone; of any other model the ranks find out when they cut it."""
    model = experiment.model
    is_tied = model.name == "gpt" and model.args.get("tie_embeddings", True) is True
    return is_tied and _is_staged(experiment) and experiment.parallel.pipeline != 1


def _has_batchnorm(experiment: Experiment) -> bool:
    return names.has_batchnorm(experiment.model.name, experiment.model.args) or False


def _replays_graphs(experiment: Experiment) -> bool:
    return experiment.compile.enabled and experiment.compile.mode in {"reduce-overhead", "max-autotune"}


REFUSALS = (
    Refusal(
        reads=("optimization.optimizer", "parallel.strategy"),
        path=("optimization", "optimizer", "name"),
        holds=_clips_a_part,
        message=lambda e: (
            f"{shortened(e.optimization.optimizer.name)} clips by the norm of all that it holds, and under "
            f"{e.parallel.strategy} a rank holds a part of the model"
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
        holds=lambda e: e.model.channels_last and _is_fully_sharded(e),
        message=lambda e: f"can't be true under {e.parallel.strategy}, which shards no such weights",
        remedy="write false, or parallel.strategy: ddp",
    ),
    Refusal(
        reads=("model.name", "model.args", "precision", "parallel.strategy"),
        path=("precision",),
        holds=lambda e: e.precision in _MIXED and _is_fully_sharded(e) and _has_batchnorm(e),
        message=lambda e: (
            f"{e.precision} does not work under {e.parallel.strategy} for {shortened(e.model.name)}, "
            "which has BatchNorm"
        ),
        remedy="write fp32, or parallel.strategy: ddp",
        asks_model=True,
    ),
    Refusal(
        reads=("optimization.micro_batch_size", "model.name", "model.args"),
        path=("optimization", "micro_batch_size"),
        holds=lambda e: e.optimization.micro_batch_size == "auto" and _has_batchnorm(e),
        message=lambda e: (
            "auto would let memory decide BatchNorm's statistics, and "
            f"{shortened(e.model.name)} has BatchNorm"
        ),
        remedy="write a number, like 64",
        asks_model=True,
    ),
    Refusal(
        reads=("parallel.sync_batchnorm", "parallel.strategy"),
        path=("parallel", "sync_batchnorm"),
        holds=lambda e: e.parallel.sync_batchnorm and e.parallel.strategy in SHARING_LAYERS,
        message=lambda e: f"can't be true under {e.parallel.strategy}, whose ranks don't all have each layer",
        remedy="write false, or parallel.strategy: ddp",
    ),
    Refusal(
        reads=("precision", "device"),
        path=("precision",),
        holds=lambda e: e.precision == "fp8" and e.device == "cpu",
        message=lambda e: "fp8 needs a GPU with float8 (H100), and device is cpu",
        remedy="write bf16, or device: cuda",
    ),
    Refusal(
        reads=("precision", "parallel.strategy"),
        path=("precision",),
        holds=lambda e: e.precision == "fp8" and e.parallel.strategy in SHARING_LAYERS,
        message=lambda e: f"fp8 does not work under {e.parallel.strategy}, whose ranks share layers",
        remedy="write bf16, or parallel.strategy: fsdp",
    ),
    Refusal(
        reads=("compile", "parallel.strategy"),
        path=("compile", "mode"),
        # A CUDA graph finds its inputs elsewhere, or its results overwritten before their backward.
        holds=lambda e: _replays_graphs(e) and _is_fully_sharded(e),
        message=lambda e: (
            f"{e.compile.mode} replays CUDA graphs, which does not work under {e.parallel.strategy}: "
            "parameters or activations do not stay in one place from forward to backward"
        ),
        remedy="write default, or parallel.strategy: ddp",
    ),
    Refusal(
        reads=("compile", "parallel.strategy"),
        path=("compile", "scope"),
        holds=lambda e: e.compile.enabled and e.compile.scope == "model" and _is_staged(e),
        message=lambda e: (
            f"model compiles the forward of the whole model, which no rank runs under {e.parallel.strategy}"
        ),
        remedy="write blocks",
    ),
    Refusal(
        reads=("model.name", "model.args", "parallel"),
        path=("model", "args", "tie_embeddings"),
        holds=_ties_stages,
        message=lambda e: (
            f"true has the first and the last stage of {e.parallel.strategy} share a weight, which they can't"
        ),
        remedy="write false, or parallel.strategy: fsdp",
    ),
    Refusal(
        reads=("compile",),
        path=("compile", "fallback"),
        holds=lambda e: e.compile.enabled and e.compile.fallback and e.compile.fullgraph,
        message=lambda e: "can't be true beside fullgraph: true, which ends the run where it could go on",
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
#: Those that may start a child process.
MODEL_RULES = tuple(refusal.as_rule() for refusal in REFUSALS if refusal.asks_model)
