"""The part of ``plan`` on time and cost: how long each run takes, its GPU-hours and its attempts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

from hpc_train.console import rounded, say
from hpc_train.errors import counted, listed
from hpc_train.experiment.config.schema import EvaluationConfig, Experiment
from hpc_train.experiment.plan import planning
from hpc_train.experiment.plan.duration import (
    MeasuredRun,
    Prediction,
    Steps,
    StepTime,
    StepWork,
    fitted,
    given,
    predicted,
)
from hpc_train.experiment.plan.planning import Plan, PlannedRun, has_budget
from hpc_train.experiment.topology.batch_arithmetic import evaluation_interval
from hpc_train.experiment.validate.loading import Loaded
from hpc_train.paths import runs_root
from hpc_train.report.measured_runs import measured_runs, same_work
from hpc_train.report.run_times import short_duration


class RunCostJson(TypedDict):
    """The predicted cost of one run; null if unknown."""

    id: str
    duration_s: float | None
    step_s: float | None
    gpu_hours: float | None
    core_hours: float | None
    #: The number that the time limit makes necessary.
    attempts: int | None
    #: The names of the runs whose times were used.
    measured_runs: list[str]


class CostJson(TypedDict):
    """The predicted cost of all runs together."""

    runs: list[RunCostJson]
    gpu_hours: float | None
    core_hours: float | None


@dataclass(frozen=True)
class PlanCost:
    """The predicted cost of a plan's runs, in the plan's order; None if unknown."""

    runs: Sequence[Prediction | None]
    #: Name → measured run, for the runs that predictions are based on.
    measured: Mapping[str, MeasuredRun]

    @property
    def gpu_hours(self) -> float | None:
        """GPU-hours of all runs together."""
        return _sum([None if run is None else run.gpu_hours for run in self.runs])

    @property
    def core_hours(self) -> float | None:
        """The sum over all runs; None if any run's value is unknown."""
        return _sum([None if run is None else run.core_hours for run in self.runs])

    def columns(self) -> list[tuple[str, list[str]]]:
        """Return head and cells of each column of ``plan``'s table; none if nothing is known."""
        if not any(self.runs):
            return []
        times = [short_duration(run.duration_s) if run else "unknown" for run in self.runs]
        has_gpus = any(run is not None and run.gpu_hours for run in self.runs)
        values = [None if run is None else run.gpu_hours if has_gpus else run.core_hours for run in self.runs]
        cells = ["unknown" if value is None else rounded(value) for value in values]
        return [("predicted time", times), (f"predicted {'GPU' if has_gpus else 'core'}-hours", cells)]

    def to_json(self, plan: Plan) -> dict[str, Any]:
        """Return the key ``cost`` of ``plan --json``."""
        runs = [
            {"id": run.id} | _json(prediction) for run, prediction in zip(plan.runs, self.runs, strict=True)
        ]
        return {"cost": {"runs": runs, "gpu_hours": self.gpu_hours, "core_hours": self.core_hours}}


def cost_of(plan: Plan, launcher: str, throughput: float | None = None) -> PlanCost:
    """Predict the plan's runs from the launcher's earlier runs, or from each rank's samples per second."""
    measured: dict[str, MeasuredRun] = {}
    runs_by_work: dict[str, list[MeasuredRun]] = {}
    predictions: list[Prediction | None] = []
    for run in plan.runs:
        runs: list[MeasuredRun] = []
        if throughput is None:
            work = same_work(run.experiment)
            if work not in runs_by_work:
                runs_by_work[work] = measured_runs(runs_root(), run.experiment, launcher)
            runs = runs_by_work[work]
            measured |= {measured_run.name: measured_run for measured_run in runs}
        predictions.append(_prediction(run, runs, throughput))
    return PlanCost(predictions, measured)


def over_budget_lines(loaded: Loaded, plan: Plan, launcher: str, cost: PlanCost | None = None) -> list[str]:
    """Return the line on runs that need more GPU-hours than the file allows, if they do.

    ``cost``: predicted here if it is not given and the file has a budget.
    """
    if not has_budget(loaded.experiment):
        return []
    cost = cost or cost_of(plan, launcher)
    count = planning.planned_runs(loaded.experiment, len(plan.runs))
    hours = [None if prediction is None else prediction.gpu_hours for prediction in cost.runs]
    of_attempts = _of_all([run.size.gpu_hours for run in plan.runs], count)
    problem = planning.over_budget(loaded.experiment, _of_all(hours, count), of_attempts)
    problem = problem or planning.over_share(loaded.experiment, hours, count)
    return [] if problem is None else [loaded.source.render(problem)]


def _prediction(run: PlannedRun, runs: Sequence[MeasuredRun], throughput: float | None) -> Prediction | None:
    layout = run.layout
    if layout is None or layout.accumulation is None or layout.micro_batch_size is None:
        return None
    if run.total_steps is None:
        return None
    work = StepWork(layout.accumulation, layout.micro_batch_size, layout.data_ranks)
    step_time: StepTime | None = fitted(runs, work) if throughput is None else given(throughput)
    if step_time is None:
        return None
    assert isinstance(run.experiment, Experiment), "it has a layout"
    evaluations = _evaluations(run.experiment.evaluation, run.total_steps, run.steps_per_epoch)
    steps = Steps(run.total_steps, evaluations, run.experiment.checkpoint)
    return predicted(work, steps, step_time, run.size)


def _evaluations(config: EvaluationConfig, total_steps: int, steps_per_epoch: int | None) -> int:
    if steps_per_epoch is None and config.every_steps is None:
        return 1  # at the end
    return -(-total_steps // evaluation_interval(config, steps_per_epoch or 1))


def say_cost(cost: PlanCost) -> None:
    """Print the runs that predictions are based on, the sum, and the number of attempts needed."""
    predictions = [prediction for prediction in cost.runs if prediction is not None]
    if not predictions:
        return
    for source in dict.fromkeys(_source(prediction, cost.measured) for prediction in predictions):
        say(f"time: predicted by {source}")
    if len(cost.runs) > 1:
        hours, unit = (cost.gpu_hours, "GPU-hours") if cost.gpu_hours else (cost.core_hours, "core-hours")
        if hours is not None:
            say(f"all {len(cost.runs)} runs together: {rounded(hours)} {unit}")
    if any(prediction.attempts is None for prediction in predictions):
        say("time: the time limit of a job ends before its first step; write a longer one")
    elif (most := max(prediction.attempts or 1 for prediction in predictions)) > 1:
        say(f"time: {most} attempts, by the time limit of a job; the run resumes automatically in between")


def _source(prediction: Prediction, measured: Mapping[str, MeasuredRun]) -> str:
    if not prediction.runs:
        return "the given samples per second of a rank"
    names = sorted(set(prediction.runs))
    shown = listed(names, 3)
    work = measured[prediction.runs[0]].work
    size = f"{counted(work.data_ranks, 'rank')}, {counted(work.samples, 'sample')} per rank and step"
    return f"run {shown} ({size})" if len(names) == 1 else f"runs {shown} (the first with {size})"


def _json(prediction: Prediction | None) -> dict[str, Any]:
    keys = ("duration_s", "step_s", "gpu_hours", "core_hours", "attempts")
    values = {key: None if prediction is None else getattr(prediction, key) for key in keys}
    return values | {"measured_runs": [] if prediction is None else sorted(set(prediction.runs))}


def _of_all(values: Sequence[float | None], count: int) -> float | None:
    """Return the sum over ``count`` runs; a search has proposed only these so far."""
    total = _sum(values)
    return None if total is None or not values else total / len(values) * count


def _sum(values: Sequence[float | None]) -> float | None:
    return None if any(value is None for value in values) else float(sum(filter(None, values)))
