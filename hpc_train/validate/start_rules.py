"""Settings that this number of ranks can't run: reported, never silently ignored."""

from __future__ import annotations

from hpc_train.config.problems import Problem
from hpc_train.config.schema import Experiment
from hpc_train.topology.batch_arithmetic import too_few_micro_batches
from hpc_train.topology.degrees import find_degrees
from hpc_train.topology.pipeline_schedules import problem_of_schedule
from hpc_train.validate.compatibility import auto_on_cpu, uneven_sync_batchnorm
from hpc_train.validate.layer_rules import problems_of_layers


def check_start(
    experiment: Experiment,
    ranks: int | None,
    ranks_per_node: int | None = None,
    fewest_ranks: int | None = None,
    found: int | None = None,
) -> list[Problem]:
    """Return the problems that prevent a start on this number of ranks (None: not known yet).

    ``ranks_per_node``: by default all ranks are on one node. ``fewest_ranks``: of a range of nodes, any of
    which a start may get. ``found``: the size that ``micro_batch_size: auto`` found in the run's first
    attempt; None before that.
    """
    is_auto = experiment.optimization.micro_batch_size == "auto"
    if is_auto and found is None and experiment.device == "cpu":
        return [auto_on_cpu()]
    if ranks is None:
        return []
    per_node = ranks_per_node or ranks
    possible = range(ranks, (fewest_ranks or ranks) - 1, -per_node)
    misfits = (_misfits(experiment, number, per_node, found) for number in possible)
    return next(filter(None, misfits), [])


def _misfits(experiment: Experiment, ranks: int, ranks_per_node: int, found: int | None) -> list[Problem]:
    degrees = find_degrees(experiment.parallel, ranks, ranks_per_node)
    if isinstance(degrees, Problem):
        return [degrees]
    if problems := problems_of_layers(experiment, degrees, ranks_per_node):
        return problems
    is_auto = experiment.optimization.micro_batch_size == "auto"
    if is_auto:  # the minimum that it may find
        experiment = experiment.with_micro_batch_size(found or 1)
    ranks_per_model = degrees.pipeline * degrees.tensor
    if problem := too_few_micro_batches(
        experiment.micro_batches, degrees.data_ranks, ranks_per_model, is_auto=is_auto, found=found
    ):
        return [problem]
    if is_auto and found is None:
        return []
    slots = -(-experiment.micro_batches // degrees.data_ranks)
    if problem := problem_of_schedule(experiment.parallel, degrees.pipeline, slots):
        return [problem]
    if not experiment.parallel.sync_batchnorm:
        return []
    uneven = uneven_sync_batchnorm(experiment.micro_batches, degrees.data_ranks)
    return [] if uneven is None else [uneven]
