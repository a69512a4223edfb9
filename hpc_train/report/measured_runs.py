"""Earlier runs that predict the time of a new one, because they do the same work per sample.

Called by ``plan``. Reads only the ends of metrics, and only the newest of many runs.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from hpc_train.errors import HpcTrainError
from hpc_train.experiment.config.schema import CheckpointConfig, Job, kind_of
from hpc_train.experiment.plan.duration import MeasuredRun, StepWork, count_saves
from hpc_train.paths import CheckpointPaths, RunPaths
from hpc_train.report.metrics_reader import Row, newest_rows, number
from hpc_train.report.run_files import RunFiles, layout_of
from hpc_train.report.run_times import timestamp
from hpc_train.report.usage import evaluation_seconds
from hpc_train.run.attempts import AttemptRecord, newest_number
from hpc_train.run.create import effective_experiment
from hpc_train.run.files import read_json
from hpc_train.run.find import run_name
from hpc_train.run.run_status import run_facts

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
    wanted = _work_of(experiment)
    same_name = root / experiment.name
    if same_experiment := list(_measured(_newest(same_name), wanted, launcher)):
        return same_experiment
    others = [folder for folder in _folders(root) if folder != same_name]
    runs = [run for folder in others[:_MAX_EXPERIMENTS] for run in _newest(folder)]
    return list(_measured(runs[:_MAX_RUNS], wanted, launcher))


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
    for run in _folders(folder):
        paths = RunPaths(run)
        with suppress(OSError):
            times.append((paths.metrics.stat().st_mtime, str(run)))
    return [RunPaths(Path(name)) for _, name in sorted(times, reverse=True)[:_MAX_RUNS]]


def _folders(parent: Path) -> list[Path]:
    try:
        with os.scandir(parent) as entries:
            return [Path(entry.path) for entry in entries if entry.name[0] != "." and entry.is_dir()]
    except OSError:
        return []


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
    return record.checkpoint_stall_s / count_saves(checkpoint, trained, trained * step_s)
