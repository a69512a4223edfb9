"""What the file may say but this version can't start: named, never left out in silence."""

from __future__ import annotations

from hpc_train.config.part_rules import DEGREES, LATER_STRATEGIES
from hpc_train.config.problems import KeyPath, Problem
from hpc_train.config.schema import Experiment
from hpc_train.registry import parts

_MESSAGE = "does not work in this version"


def check_start(experiment: Experiment, ranks: int | None) -> list[Problem]:
    """Return what keeps the run from being started on ``ranks`` data-parallel ranks (None: not known yet)."""
    problems = [_not_yet(path) for path in _unsupported_keys(experiment)]
    if experiment.optimization.micro_batch_size == "auto":
        problems.append(
            Problem(("optimization", "micro_batch_size"), f"auto {_MESSAGE}", "write a number, like 64")
        )
    if experiment.compile.enabled and experiment.compile.mode != "default":
        message = f"{experiment.compile.mode} {_MESSAGE}"
        problems.append(Problem(("compile", "mode"), message, "write default, or take it out"))
    strategy = experiment.parallel.strategy
    if strategy in LATER_STRATEGIES and strategy not in parts("strategies"):
        problems.append(Problem(("parallel", "strategy"), f"{strategy} {_MESSAGE}", "write ddp or fsdp"))
    return problems + _too_many_ranks(experiment, ranks)


def _not_yet(path: KeyPath) -> Problem:
    return Problem(path, _MESSAGE, "take it out")


def _unsupported_keys(experiment: Experiment) -> list[KeyPath]:
    optimization, parallel = experiment.optimization, experiment.parallel
    found: list[KeyPath] = []
    if optimization.ema is not None:
        found.append(("optimization", "ema"))
    found += [("optimization", key) for key in ("mixup", "cutmix") if getattr(optimization, key) > 0]
    if parallel.sync_batchnorm:
        found.append(("parallel", "sync_batchnorm"))
    if parallel.strategy in {"ddp", "fsdp", *LATER_STRATEGIES}:
        found += [("parallel", key) for key in DEGREES if getattr(parallel, key) not in {None, 1}]
    return found


def _too_many_ranks(experiment: Experiment, ranks: int | None) -> list[Problem]:
    if ranks is None or experiment.optimization.micro_batch_size == "auto":
        return []
    most = experiment.micro_batches
    if ranks <= most:
        return []
    message = f"needs at most {most} ranks, one a micro-batch, got {ranks}"
    remedy = f"start {most} or fewer, or write a smaller micro_batch_size"
    return [Problem(("optimization", "micro_batch_size"), message, remedy)]
