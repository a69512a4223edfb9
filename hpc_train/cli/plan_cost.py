"""The part of ``plan`` on time and cost: how long each run takes, its GPU-hours and its attempts.

Earlier runs that do the same work per sample predict a new one. Of these only the ends of metrics are read,
and only the newest of many runs.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

from pydantic import ValidationError

from hpc_train.console import rounded, say
from hpc_train.errors import HpcTrainError, counted, listed
from hpc_train.experiment.config.schema import CheckpointConfig, EvaluationConfig, Experiment, Job, kind_of
from hpc_train.experiment.plan import duration
from hpc_train.experiment.plan.duration import MeasuredRun, Prediction, StepWork
from hpc_train.experiment.plan.planning import Plan, PlannedRun
from hpc_train.experiment.topology.batch_arithmetic import evaluation_interval
from hpc_train.experiment.validate import budget_rules
from hpc_train.experiment.validate.loading import Loaded
from hpc_train.paths import CheckpointPaths, RunPaths, runs_root
from hpc_train.report.metrics_reader import Row, newest_rows, number
from hpc_train.report.run_files import RunFiles, layout_of, short_duration, timestamp
from hpc_train.report.usage import evaluation_seconds
from hpc_train.run.attempts import AttemptRecord, newest_number
from hpc_train.run.create import effective_experiment
from hpc_train.run.files import read_json
from hpc_train.run.find import folders_in, run_name
from hpc_train.run.run_status import run_facts


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
        return budget_rules.total([None if run is None else run.gpu_hours for run in self.runs])

    @property
    def core_hours(self) -> float | None:
        """The sum over all runs; None if any run's value is unknown."""
        return budget_rules.total([None if run is None else run.core_hours for run in self.runs])

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
    if not budget_rules.has_budget(loaded.experiment):
        return []
    cost = cost or cost_of(plan, launcher)
    hours = [None if prediction is None else prediction.gpu_hours for prediction in cost.runs]
    of_attempts = [run.size.gpu_hours for run in plan.runs]
    problem = budget_rules.exceeded(loaded.experiment, hours, of_attempts)
    return [] if problem is None else [loaded.source.render(problem)]


def _prediction(run: PlannedRun, runs: Sequence[MeasuredRun], throughput: float | None) -> Prediction | None:
    layout = run.layout
    if layout is None or layout.accumulation is None or layout.micro_batch_size is None:
        return None
    if run.total_steps is None:
        return None
    work = StepWork(layout.accumulation, layout.micro_batch_size, layout.data_ranks)
    step_time = duration.fitted(runs, work) if throughput is None else duration.given(throughput)
    if step_time is None:
        return None
    assert isinstance(run.experiment, Experiment), "it has a layout"
    evaluations = _evaluations(run.experiment.evaluation, run.total_steps, run.steps_per_epoch)
    steps = duration.Steps(run.total_steps, evaluations, run.experiment.checkpoint)
    return duration.predicted(work, steps, step_time, run.size)


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


#: Number of runs that are examined, the newest first: reading one takes a millisecond.
_MAX_RUNS = 100
_MAX_EXPERIMENTS = 50
#: Sections that define what a step computes: runs must have the same values there, except for the keys below.
_SECTIONS = (
    "device", "deterministic", "task", "model", "data", "optimization", "parallel", "precision", "compile",
    "activation_checkpointing",
)  # fmt: skip
#: Keys of these sections that do not change the time of a sample or of an update. A new key counts until it
#: is added here: a missing prediction is better than a wrong one.
_ANY = {
    "model.pretrained",
    "model.init_from",
    "model.lora.alpha",
    "data.args.num_samples",
    "data.augment.randaugment.magnitude",
    "data.normalize",
    "data.on_bad_sample",
    "data.max_bad_samples",
    "optimization.epochs",
    "optimization.steps",
    "optimization.global_batch_size",
    "optimization.micro_batch_size",
    "optimization.schedule",
    "optimization.optimizer.lr",
    "optimization.optimizer.lr_per_batch",
    "optimization.optimizer.weight_decay",
    "optimization.max_non_finite",
}
#: Only whether these are set matters: the folder may differ.
_WHETHER = {"data.cache", "data.stage"}
#: For floats in these sections, only whether they are 0 (off) matters: momentum, EMA decay, mixup, flips.
_FRACTIONS = ("optimization.", "data.augment.")
#: A name in an attempt's record, which may be damaged.
_CHECKPOINT = re.compile(r"step-[0-9]{8,15}")
#: Values by dotted key.
_Work = dict[str, Any]


def measured_runs(root: Path, experiment: Job, launcher: str | None = None) -> list[MeasuredRun]:
    """Return the runs below ``root`` that do the same work per sample.

    They are those of the same experiment or, if there are none, of others. Runs whose newest attempt another
    ``launcher`` started do not count, since a login node does not predict the GPUs of a cluster.
    """
    wanted, folders = _work_of(experiment), folders_in(root)

    def below(parents: Sequence[Path]) -> list[MeasuredRun]:
        runs = [run for folder in parents for run in _newest(folder)]
        return list(_measured(runs[:_MAX_RUNS], wanted, launcher))

    same_name = [folder for folder in folders if folder.name == experiment.name]
    others = [folder for folder in folders if folder.name != experiment.name]
    return below(same_name) or below(others[:_MAX_EXPERIMENTS])


def same_work(experiment: Job) -> str:
    """Return a value that is equal for experiments whose runs predict each other's time."""
    return repr((experiment.name, sorted(_work_of(experiment).items())))


def _work_of(experiment: Job) -> _Work:
    return _work(experiment.model_dump(mode="json"))


def _work(resolved: Mapping[str, Any]) -> _Work:
    """Return the values that runs of the same work have in common, by dotted key."""
    values = dict(_counting({key: resolved[key] for key in _SECTIONS if key in resolved}))
    sections = [section for section in resolved.values() if isinstance(section, dict)]
    gpu_types = (section["gpu_type"] for section in sections if "gpu_type" in section)
    return values | {"gpu_type": next(gpu_types, None)}


def _counting(section: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted keys that count, with the values that must be equal."""
    for name, value in section.items():
        key = f"{prefix}{name}"
        if isinstance(value, dict) and key not in _ANY:
            yield from _counting(value, f"{key}.")
        elif key in _WHETHER:
            yield key, bool(value)
        elif key not in _ANY:
            yield key, _on_or_off(value) if key.startswith(_FRACTIONS) else value


def _on_or_off(value: Any) -> Any:
    """Replace floats by whether they are not 0."""
    if isinstance(value, list):
        return [_on_or_off(item) for item in value]
    return value != 0 if isinstance(value, float) else value


def _newest(folder: Path) -> list[RunPaths]:
    times = []
    for run in folders_in(folder):
        paths = RunPaths(run)
        with suppress(OSError):
            times.append((paths.metrics.stat().st_mtime, str(run)))
    return [RunPaths(Path(name)) for _, name in sorted(times, reverse=True)[:_MAX_RUNS]]


def _measured(runs: Sequence[RunPaths], wanted: _Work, launcher: str | None) -> Iterator[MeasuredRun]:
    for paths in runs:
        run = None
        # A damaged run, or another user's.
        with suppress(OSError, HpcTrainError, ArithmeticError, RecursionError):
            resolved: Mapping[str, Any] | None = read_json(paths.resolved)
            if run_facts(paths).get("changes"):
                resolved = effective_experiment(paths, newest_number(paths)).model_dump(mode="json")
            if resolved is not None and _does(resolved, wanted):
                run = measured(paths, resolved, launcher)
        if run is not None:
            yield run


def _does(resolved: Mapping[str, Any], wanted: _Work) -> bool:
    """Return True if a run did the same work. Keys that its version did not have get their defaults."""
    work = _work(resolved)
    if wanted.keys() - work.keys():
        try:
            work = _work_of(kind_of(resolved).model_validate(resolved))
        except ValidationError:
            return False
    return work == wanted


def measured(paths: RunPaths, resolved: Mapping[str, Any], launcher: str | None = None) -> MeasuredRun | None:
    """Return the times of the run's newest attempt; None if it has none, or another launcher started it."""
    run = RunFiles.read(paths)
    started_by = run.newest_record.launcher if run.newest_record is not None else None
    if None not in {launcher, started_by} and launcher != started_by:
        return None
    record, layout = run.newest_record, layout_of(run)
    if record is None or layout is None or layout.micro_batch_size is None or layout.accumulation is None:
        return None
    rows = [row for row in newest_rows(paths.metrics) if row.get("attempt") == record.attempt]
    step_s = mean_step_s(rows)
    if step_s is None:
        return None
    work = StepWork(layout.accumulation, layout.micro_batch_size, layout.data_ranks)
    begin, first = timestamp(record.start), timestamp(record.events.get("first_step"))
    end, last = timestamp(record.end), number(rows[-1].get("time"))
    start_s = 0.0 if begin is None or first is None else max(0.0, first - begin)
    stop_s = 0.0 if end is None or last is None else max(0.0, end - last)
    save_s = _save_s(record, rows, step_s, resolved)
    evaluations = evaluation_seconds(rows)
    evaluation_s = sum(evaluations) / len(evaluations) if evaluations else 0.0
    return MeasuredRun(run_name(paths), work, step_s, evaluation_s, save_s, start_s, stop_s)


def mean_step_s(rows: Sequence[Row]) -> float | None:
    """Return the mean time of a step; rows are weighted by their steps."""
    seconds, steps, before = 0.0, 0, None
    for row in rows:
        step, step_s = row.get("step"), number(row.get("step_s"))
        if row.get("split") != "train" or type(step) is not int:
            continue
        if step_s is not None and before is not None and step > before:
            seconds, steps = seconds + step_s * (step - before), steps + step - before
        before = step
    return seconds / steps if steps and seconds > 0 else None


def _save_s(record: AttemptRecord, rows: Sequence[Row], step_s: float, resolved: Mapping[str, Any]) -> float:
    """Return the seconds that training waited per checkpoint; the file's interval determines their number."""
    steps = [step for row in rows if type(step := row.get("step")) is int]
    if not record.checkpoint_stall_s or not steps:
        return 0.0
    if saves := record.save_interval.get("saves"):
        return record.checkpoint_stall_s / saves
    try:
        checkpoint = CheckpointConfig.model_validate(resolved.get("checkpoint"))
    except ValidationError:
        return 0.0
    # The time covers the whole attempt, but the rows are only the last ones.
    names = [str(name) for name in record.checkpoints]
    saved = [CheckpointPaths(Path(name)).step for name in names if _CHECKPOINT.fullmatch(name)]
    trained = max(steps) - max((step for step in saved if step < min(steps)), default=0)
    return record.checkpoint_stall_s / duration.count_saves(checkpoint, trained, trained * step_s)
