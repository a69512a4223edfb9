"""The trials of a search, from the run folders of its experiment."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal

from hpc_train.errors import BadFileError, UserError
from hpc_train.experiment.config.explanations import value_at
from hpc_train.experiment.config.keys import split_key
from hpc_train.experiment.config.sweep_sections import SearchConfig, varied
from hpc_train.experiment.plan.sweep import id_of
from hpc_train.experiment.validate.child_process import one_child
from hpc_train.experiment.validate.loading import Loaded
from hpc_train.launchers.lookup import launcher_of, statuses
from hpc_train.paths import RunPaths
from hpc_train.report.metric_values import SPLITS, metrics_in
from hpc_train.report.metrics_reader import Row, number, rows_in
from hpc_train.run import frozen_experiment
from hpc_train.run.liveness import newest_record
from hpc_train.run.run_facts import recorded_values, run_facts
from hpc_train.run.run_status import GOING_ON, INTERRUPTED, RunStatus
from hpc_train.search.base import Trial


class NoResultError(UserError):
    """The runs of a search have no value of its metric."""


def trials_of(
    loaded: Loaded,
    search: SearchConfig,
    runs: Sequence[RunPaths],
    is_due: Callable[[RunPaths, RunStatus], bool],
) -> list[Trial]:
    """Return the runs that match the file with any values of the parameters, in order of creation.

    Other runs, such as those of an earlier version of the file, are not trials. Neither are runs that were
    not submitted to a scheduler. ``is_due``: whether a run that has ended is to be started again.

    Raises NoResultError if completed runs have values of other metrics only.
    """
    ordered = sorted(runs, key=lambda paths: (str(run_facts(paths).get("created")), paths.folder.name))
    with one_child():
        #: A run that was trained again (``--new``) replaces the previous one.
        created = {id_: (paths, values) for paths in ordered for id_, values in _made(loaded, search, paths)}
    values_of = {
        paths: values for paths, values in created.values() if not launcher_of(paths).is_unsubmitted(paths)
    }
    status_of = dict(zip(values_of, statuses(list(values_of)), strict=True))
    trials = [_trial(paths, values, status_of[paths], search, is_due) for paths, values in values_of.items()]
    completed = [paths for paths, status in status_of.items() if status.state == "completed"]
    if completed and not any(trial.value is not None for trial in trials):
        _check_metric(search, completed)
    return trials


def _made(loaded: Loaded, search: SearchConfig, paths: RunPaths) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the run's id and values, if it matches the file with values of the parameters."""
    try:
        data = frozen_experiment.read(paths).model_dump(mode="json")
        recorded = recorded_values(paths)
    except (BadFileError, OSError, TypeError):
        return
    values = {}
    for key in search.parameters:
        with suppress(KeyError, TypeError):  # a parameter whose condition is false may be missing
            values[key] = recorded[key] if key in recorded else value_at(data, split_key(key))
    reported = varied(search.parameters, values)
    id_ = paths.folder.name.partition("-")[0]
    if (
        all(search.parameters[key].contains(value) for key, value in reported.items())
        and id_of(loaded, reported) == id_
    ):
        yield id_, reported


def _trial(
    paths: RunPaths,
    values: Mapping[str, Any],
    status: RunStatus,
    search: SearchConfig,
    is_due: Callable[[RunPaths, RunStatus], bool],
) -> Trial:
    run_id = paths.folder.name
    if status.state in GOING_ON:
        return Trial(values, "running", run_id=run_id)
    record = newest_record(paths)
    if record is not None and record.cause == "diverged":
        return Trial(values, "diverged", run_id=run_id)
    if is_due(paths, status):
        state: Literal["running", "failed"] = "running" if status.state == INTERRUPTED else "failed"
        return Trial(values, state, run_id=run_id, is_due=True)
    if status.state != "completed":
        return Trial(values, "failed", run_id=run_id)
    best = best_value(rows_in(paths.metrics), search)
    return Trial(values, "failed" if best is None else "finished", best, run_id)


def best_value(rows: Iterator[Row], search: SearchConfig) -> float | None:
    """Return the best finite value of the metric, None without one."""
    split, name = _split_metric(search.metric)
    values = [number(row.get(name)) for row in rows if row.get("split") == split]
    finite = [value for value in values if value is not None and math.isfinite(value)]
    return (min if search.mode == "min" else max)(finite, default=None)


def _split_metric(text: str) -> tuple[str, str]:
    split, slash, name = text.partition("/")
    return (split, name) if slash and split in SPLITS else (SPLITS[0], text)


def _check_metric(search: SearchConfig, completed: Sequence[RunPaths]) -> None:
    metrics = sorted(map(str, metrics_in(row for paths in completed[:10] for row in rows_in(paths.metrics))))
    raise NoResultError(
        f"sweep.search.metric: {search.metric} is in no completed run's metrics.jsonl; there are "
        f"{', '.join(metrics[:50]) or 'none'}"
    )
