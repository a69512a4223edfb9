"""What the file may say but this version can't start: named, never left out in silence."""

from __future__ import annotations

from hpc_train.config.compatibility import STRATEGIES
from hpc_train.config.degrees import find_degrees
from hpc_train.config.part_rules import LATER_STRATEGIES
from hpc_train.config.problems import KeyPath, Problem
from hpc_train.config.schema import Experiment
from hpc_train.registry import parts

_MESSAGE = "does not work in this version"


def check_start(
    experiment: Experiment,
    ranks: int | None,
    ranks_per_node: int | None = None,
    fewest_ranks: int | None = None,
) -> list[Problem]:
    """Return what keeps the run from being started on so many ranks (None: not known yet).

    ``ranks_per_node``: all of them on one node where it is not said. ``fewest_ranks``: of a range of nodes,
    each of which a start may get.
    """
    problems = [_not_yet(path) for path in _unsupported_keys(experiment)]
    if experiment.optimization.micro_batch_size == "auto":
        problems.append(
            Problem(("optimization", "micro_batch_size"), f"auto {_MESSAGE}", "write a number, like 64")
        )
    strategy = experiment.parallel.strategy
    if strategy in LATER_STRATEGIES and strategy not in parts("strategies"):
        message = f"{strategy} {_MESSAGE}"
        problems.append(Problem(("parallel", "strategy"), message, f"write {' or '.join(STRATEGIES)}"))
    elif ranks is not None:
        per_node = ranks_per_node or ranks
        possible = range(ranks, (fewest_ranks or ranks) - 1, -per_node)
        misfits = (_misfits(experiment, number, per_node) for number in possible)
        problems += next(filter(None, misfits), [])
    return problems


def _not_yet(path: KeyPath) -> Problem:
    return Problem(path, _MESSAGE, "take it out")


def _unsupported_keys(experiment: Experiment) -> list[KeyPath]:
    optimization = experiment.optimization
    found: list[KeyPath] = []
    found += [("optimization", key) for key in ("mixup", "cutmix") if getattr(optimization, key) > 0]
    return found


def _misfits(experiment: Experiment, ranks: int, ranks_per_node: int) -> list[Problem]:
    degrees = find_degrees(experiment.parallel, ranks, ranks_per_node)
    if isinstance(degrees, Problem):
        return [degrees]
    if experiment.optimization.micro_batch_size == "auto":
        return []
    most = experiment.micro_batches
    if degrees.data_ranks <= most:
        return _uneven_batchnorm(experiment, degrees.data_ranks)
    message = f"needs at most {most} ranks, one a micro-batch, got {degrees.data_ranks}"
    remedy = f"start {most} or fewer, or write a smaller micro_batch_size"
    return [Problem(("optimization", "micro_batch_size"), message, remedy)]


def _uneven_batchnorm(experiment: Experiment, data_ranks: int) -> list[Problem]:
    """Refuse spare slots, whose samples would count twice in the statistics."""
    micro_batches = experiment.micro_batches
    if not experiment.parallel.sync_batchnorm or micro_batches % data_ranks == 0:
        return []
    message = f"needs a number of ranks that divides {micro_batches} micro-batches, got {data_ranks}"
    fitting = max(size for size in range(1, data_ranks) if micro_batches % size == 0)
    return [Problem(("parallel", "sync_batchnorm"), message, f"start {fitting}, or write false")]
