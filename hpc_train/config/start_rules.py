"""What the file may say but this version, or so many ranks, can't start: named, never left out in silence."""

from __future__ import annotations

from hpc_train.config.degrees import Degrees, find_degrees
from hpc_train.config.layer_rules import problems_of_layers
from hpc_train.config.pipelines import problem_of_schedule
from hpc_train.config.problems import KeyPath, Problem
from hpc_train.config.schema import Experiment

_MESSAGE = "does not work in this version"


def check_start(
    experiment: Experiment,
    ranks: int | None,
    ranks_per_node: int | None = None,
    fewest_ranks: int | None = None,
    found: int | None = None,
) -> list[Problem]:
    """Return what keeps the run from being started on so many ranks (None: not known yet).

    ``ranks_per_node``: all of them on one node where it is not said. ``fewest_ranks``: of a range of nodes,
    each of which a start may get. ``found``: what ``micro_batch_size: auto`` came to in the run's first
    attempt; None before that.
    """
    problems = [_not_yet(path) for path in _unsupported_keys(experiment)]
    if ranks is not None:
        per_node = ranks_per_node or ranks
        possible = range(ranks, (fewest_ranks or ranks) - 1, -per_node)
        misfits = (_misfits(experiment, number, per_node, found) for number in possible)
        problems += next(filter(None, misfits), [])
    return problems


def _not_yet(path: KeyPath) -> Problem:
    return Problem(path, _MESSAGE, "take it out")


def _unsupported_keys(experiment: Experiment) -> list[KeyPath]:
    optimization = experiment.optimization
    found: list[KeyPath] = []
    found += [("optimization", key) for key in ("mixup", "cutmix") if getattr(optimization, key) > 0]
    return found


def _misfits(experiment: Experiment, ranks: int, ranks_per_node: int, found: int | None) -> list[Problem]:
    degrees = find_degrees(experiment.parallel, ranks, ranks_per_node)
    if isinstance(degrees, Problem):
        return [degrees]
    if problems := problems_of_layers(experiment, degrees, ranks_per_node):
        return problems
    is_auto = experiment.optimization.micro_batch_size == "auto"
    if is_auto:  # the smallest that it may find
        experiment = experiment.with_micro_batch_size(found or 1)
    if degrees.data_ranks > experiment.micro_batches:
        return [_too_few_micro_batches(experiment.micro_batches, degrees, is_auto, found)]
    if is_auto and found is None:
        return []
    slots = -(-experiment.micro_batches // degrees.data_ranks)
    if problem := problem_of_schedule(experiment.parallel, degrees.pipeline, slots):
        return [problem]
    return _uneven_batchnorm(experiment, degrees.data_ranks)


def _too_few_micro_batches(most: int, degrees: Degrees, is_auto: bool, found: int | None) -> Problem:
    each = degrees.pipeline * degrees.tensor
    group = f"groups of {each} ranks with a model together" if each > 1 else "ranks"
    message = f"needs at most {most} {group}, one a micro-batch, got {degrees.data_ranks}"
    instead = "write a smaller micro_batch_size"
    if found is not None:
        message = f"auto found {found} in the run's first attempt, which {message}"
        instead = "find it anew with hpc-train submit --new"
    elif is_auto:
        message, instead = f"auto {message}", "write a greater global_batch_size"
    remedy = f"start {most * each} ranks or fewer, or {instead}"
    return Problem(("optimization", "micro_batch_size"), message, remedy)


def _uneven_batchnorm(experiment: Experiment, data_ranks: int) -> list[Problem]:
    """Refuse spare slots, whose samples would count twice in the statistics."""
    micro_batches = experiment.micro_batches
    if not experiment.parallel.sync_batchnorm or micro_batches % data_ranks == 0:
        return []
    message = f"needs a number of ranks that divides {micro_batches} micro-batches, got {data_ranks}"
    fitting = max(size for size in range(1, data_ranks) if micro_batches % size == 0)
    return [Problem(("parallel", "sync_batchnorm"), message, f"start {fitting}, or write false")]
