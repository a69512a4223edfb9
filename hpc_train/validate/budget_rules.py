"""The budget of GPU-hours of a file: its runs' shares, and whether a plan keeps within it."""

from __future__ import annotations

from hpc_train.config.problems import Problem
from hpc_train.config.schema import Experiment
from hpc_train.console import rounded

_KEY = ("slurm", "max_gpu_hours")


def has_budget(experiment: Experiment) -> bool:
    """Tell whether the file bounds the GPU-hours of its runs."""
    return experiment.slurm is not None and experiment.slurm.max_gpu_hours is not None


def with_share(experiment: Experiment, num_runs: int) -> Experiment:
    """Return the experiment of one of ``num_runs`` runs with its share of the budget, if there is one."""
    slurm = experiment.slurm
    if slurm is None or slurm.max_gpu_hours is None or num_runs == 1:
        return experiment
    own = slurm.model_copy(update={"max_gpu_hours": slurm.max_gpu_hours / num_runs})
    return experiment.model_copy(update={"slurm": own})


def over_budget(
    experiment: Experiment, predicted_hours: float | None, one_attempt_hours: float | None
) -> Problem | None:
    """Return what is wrong where the runs of the file need more than its budget.

    ``predicted_hours``: of all runs together; where that is unknown, ``one_attempt_hours`` counts, which they
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
        return Problem(_KEY, message, "raise it, train fewer steps or runs, or request fewer GPUs")
    if one_attempt_hours is None or one_attempt_hours <= budget:
        return None
    needed = f"{rounded(one_attempt_hours)} GPU-hours that one attempt of each run may use"
    message = f"{rounded(budget)} is less than the {needed}"
    remedy = (
        "write a shorter slurm.time_limit (runs resume automatically), raise it, or train a short run first, "
        "from which the time is predicted"
    )
    return Problem(_KEY, message, remedy)
