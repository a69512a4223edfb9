"""What does not work together: the one place that validation, tests and docs/parallelism.md take it from.

``FEATURES`` are settings of the file that can be combined freely but for what ``REFUSALS`` name. A refusal
holds for a whole experiment, so that it says where and what to write instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from hpc_train.config import names
from hpc_train.config.problems import KeyPath, Problem, Rule, rule, shortened
from hpc_train.config.schema import Experiment

#: Those of this suite; a plug-in's own is refused nothing here.
STRATEGIES = ("ddp", "fsdp", "hsdp", "zero2")
#: Strategies that place parameters with ``fully_shard``.
FULLY_SHARDED = ("fsdp", "hsdp", "zero2")


@dataclass(frozen=True)
class Feature:
    """One setting, as overrides of a file: what the docs' table has a row for, and tests combine."""

    title: str
    overrides: tuple[str, ...]


FEATURES = (
    Feature("fp32", ("precision=fp32",)),
    Feature("tf32", ("precision=tf32",)),
    Feature("bf16", ("precision=bf16",)),
    Feature("fp16 with a scaler", ("precision=fp16",)),
    Feature("fp64", ("precision=fp64",)),
    Feature("gradient clipping", ("optimization.clip_grad_norm=1.0",)),
    Feature("channels_last", ("model.channels_last=true",)),
    Feature("compile, by block", ("compile=true",)),
    Feature("compile, whole", ("compile={scope: model}",)),
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


def _is_fully_sharded(experiment: Experiment) -> bool:
    return experiment.parallel.strategy in FULLY_SHARDED


def _has_batchnorm(experiment: Experiment) -> bool:
    return names.has_batchnorm(experiment.model.name, experiment.model.args) or False


REFUSALS = (
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
        holds=lambda e: e.precision in {"bf16", "fp16"} and _is_fully_sharded(e) and _has_batchnorm(e),
        message=lambda e: (
            f"{e.precision} does not work under {e.parallel.strategy} for {shortened(e.model.name)}, "
            "which has BatchNorm"
        ),
        remedy="write fp32, or parallel.strategy: ddp",
        asks_model=True,
    ),
)

RULES = tuple(refusal.as_rule() for refusal in REFUSALS if not refusal.asks_model)
#: Those that may start a child process.
MODEL_RULES = tuple(refusal.as_rule() for refusal in REFUSALS if refusal.asks_model)
