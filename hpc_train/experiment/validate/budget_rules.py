"""The budget of GPU-hours of a file: its runs' shares, and whether a plan keeps within it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeVar

from hpc_train.console import rounded
from hpc_train.experiment.config.problems import Problem
from hpc_train.experiment.config.schema import Job

J = TypeVar("J", bound=Job)
_KEY = ("slurm", "max_gpu_hours")
#: Rounding error of sums and shares of floats.
_ROUNDING = 1e-9


def has_budget(experiment: Job) -> bool:
    """Return True if the file bounds the GPU-hours of its runs."""
    return experiment.slurm is not None and experiment.slurm.max_gpu_hours is not None


def planned_runs(experiment: Job, num_proposed: int) -> int:
    """Return the number of runs that share the budget: those of a search include later proposals."""
    search = experiment.sweep.search
    return search.trials if search else num_proposed


def with_share(experiment: J, num_runs: int) -> J:
    """Return the experiment of one of ``num_runs`` runs with its share of the budget, if there is one."""
    slurm = experiment.slurm
    if slurm is None or slurm.max_gpu_hours is None or num_runs == 1:
        return experiment
    share = slurm.model_copy(update={"max_gpu_hours": slurm.max_gpu_hours / num_runs})
    return experiment.model_copy(update={"slurm": share})


def exceeded(
    experiment: Job, predicted: Sequence[float | None], of_attempts: Sequence[float | None]
) -> Problem | None:
    """Return the problem if the planned runs need more GPU-hours than the budget, or one more than its share.

    ``predicted``: of each run, None if unknown; ``of_attempts``: at most in one attempt of each.
    """
    count = planned_runs(experiment, len(predicted))
    hours, attempt_hours = _of_all(predicted, count), _of_all(of_attempts, count)
    return over_budget(experiment, hours, attempt_hours) or over_share(experiment, predicted, count)


def _of_all(hours: Sequence[float | None], count: int) -> float | None:
    """Return the sum over ``count`` runs; a search has proposed only these so far."""
    proposed = total(hours)
    return None if proposed is None or not hours else proposed / len(hours) * count


def total(values: Sequence[float | None]) -> float | None:
    """Return the sum; None if any value is unknown."""
    return None if any(value is None for value in values) else float(sum(filter(None, values)))


def over_share(experiment: Job, hours: Sequence[float | None], num_runs: int) -> Problem | None:
    """Return the problem if one run is predicted to need more than its share, after which it ends.

    ``hours``: the prediction for each run, None if unknown. ``num_runs``: runs that share the budget.
    """
    budget = experiment.slurm.max_gpu_hours if experiment.slurm is not None else None
    most = max((predicted for predicted in hours if predicted is not None), default=0.0)
    if budget is None or most <= budget / num_runs * (1 + _ROUNDING):
        return None
    message = (
        f"{rounded(budget)} is divided evenly among {num_runs} runs; the longest is predicted to need "
        f"{rounded(most)} GPU-hours, and its share is {rounded(budget / num_runs)}"
    )
    enough = rounded(math.ceil(most * num_runs))
    remedy = f"raise it to {enough}, or submit runs of different length from files of their own"
    return Problem(_KEY, message, remedy, code="budget.share")


def over_budget(
    experiment: Job, predicted_hours: float | None, one_attempt_hours: float | None
) -> Problem | None:
    """Return the problem if the runs of the file need more than its budget.

    ``predicted_hours``: of all runs together; if that is unknown, ``one_attempt_hours`` counts, which they
    use at most in one attempt each.
    """
    budget = experiment.slurm.max_gpu_hours if experiment.slurm is not None else None
    if budget is None:
        return None
    if predicted_hours is not None:
        if predicted_hours <= budget:
            return None
        needed = f"{rounded(predicted_hours)} GPU-hours that the runs are predicted to need"
        message = f"{rounded(budget)} is less than the {needed}"
        return Problem(
            _KEY, message, "raise it, train fewer steps or runs, or request fewer GPUs", code="budget.runs"
        )
    if one_attempt_hours is None or one_attempt_hours <= budget:
        return None
    needed = f"{rounded(one_attempt_hours)} GPU-hours that one attempt of each run may use"
    message = f"{rounded(budget)} is less than the {needed}"
    remedy = (
        "write a shorter slurm.time_limit (runs resume automatically), raise it, or train a short run first, "
        "from which the time is predicted"
    )
    return Problem(_KEY, message, remedy, code="budget.attempts")
