"""The next runs of a search: as many as are missing and may run concurrently; and its trials so far."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

from hpc_train.errors import BadFileError, UserError
from hpc_train.experiment.config.keys import split_key, value_at
from hpc_train.experiment.config.sweep_sections import SearchConfig, comparable, varied
from hpc_train.experiment.plan.sweep import id_of, rounded
from hpc_train.experiment.validate.child_process import one_child
from hpc_train.experiment.validate.loading import Loaded
from hpc_train.launchers.lookup import launcher_of, statuses
from hpc_train.paths import RunPaths
from hpc_train.registry import load, refusing_exit
from hpc_train.report.metrics_reader import SPLITS, Row, metrics_in, number, rows_in
from hpc_train.run import frozen_experiment, liveness
from hpc_train.run.run_status import GOING_ON, INTERRUPTED, RunStatus, recorded_values, run_facts
from hpc_train.search.base import SearchMethod, SearchRequest, Trial

#: After this many answers without a new proposal, the search space is assumed to be exhausted.
_TRIES = 10


@dataclass(frozen=True)
class Round:
    """The state of a search, and the values of the runs to start now."""

    trials: list[Trial]
    #: The values of new trials.
    proposals: list[dict[str, Any]]
    #: The trials to start again: interrupted ones before new ones are proposed. Failed trials come last,
    #: since they may fail again.
    again: list[Trial]

    @property
    def starts(self) -> list[dict[str, Any]]:
        """The values of all runs to start now."""
        return [*(dict(trial.values) for trial in self.again), *self.proposals]

    @property
    def running(self) -> int:
        """The number of trials in the queue or in training, without those to start again."""
        return sum(trial.state == "running" and not trial.is_due for trial in self.trials)

    def best(self, mode: str) -> Trial | None:
        """Return the finished trial with the best value, the first of equal ones."""
        finished = [trial for trial in self.trials if trial.value is not None]
        sign = 1 if mode == "min" else -1
        return min(finished, key=lambda trial: sign * (trial.value or 0.0), default=None)


def next_round(
    search: SearchConfig,
    trials: Sequence[Trial],
    is_excluded: Callable[[Mapping[str, Any]], bool] = lambda values: False,
) -> Round:
    """Request the values of the runs to start now from the method; the same trials have the same result.

    ``is_excluded``: whether values are excluded. Raises BadFileError if the method is unknown or returns
    values outside the search space.
    """
    planned = Round(list(trials), [], [])
    free = max(0, search.max_concurrent - planned.running)
    due = [trial for trial in trials if trial.is_due]
    planned.again.extend([trial for trial in due if trial.state == "running"][:free])
    planned.proposals.extend(_proposals(search, planned, free - len(planned.again), is_excluded))
    left = free - len(planned.again) - len(planned.proposals)
    planned.again.extend([trial for trial in due if trial.state == "failed"][:left])
    return planned


def _proposals(
    search: SearchConfig, planned: Round, free: int, is_excluded: Callable[[Mapping[str, Any]], bool]
) -> list[dict[str, Any]]:
    count = min(search.trials - len(planned.trials), free)
    proposals: list[dict[str, Any]] = []
    if count <= 0:
        return proposals
    method = cast(SearchMethod, load("search", search.method))
    request = SearchRequest(search.parameters, planned.trials, count, search.mode, 0)
    for attempt in range(_TRIES):
        text = f"{search.seed} {len(planned.trials)} {attempt}"
        seed = int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big")
        pending = [Trial(values, "running") for values in proposals]
        missing = count - len(proposals)
        asked = replace(request, trials=[*planned.trials, *pending], count=missing, seed=seed)
        with refusing_exit(f"sweep.search.method: {search.method!r}"):
            answers = method(asked)
        proposals.extend(_new(answers, search, asked.trials, is_excluded))
        if len(proposals) >= count:
            break
    return proposals[:count]


def _new(
    answers: Sequence[Mapping[str, Any]],
    search: SearchConfig,
    trials: Sequence[Trial],
    is_excluded: Callable[[Mapping[str, Any]], bool],
) -> Iterator[dict[str, Any]]:
    """Yield the new answers that are not excluded, as written into files."""
    seen = {comparable(dict(trial.values)) for trial in trials}
    for answer in answers:
        values = varied(search.parameters, _checked(answer, search))
        if comparable(values) not in seen and not is_excluded(values):
            seen.add(comparable(values))
            yield values


def _checked(answer: Mapping[str, Any], search: SearchConfig) -> dict[str, Any]:
    values = {}
    for key, distribution in search.parameters.items():
        if key not in answer:
            continue
        values[key] = answer[key]
        if distribution.is_number(answer[key]):
            values[key] = rounded(answer[key], distribution)
        if not distribution.contains(values[key]):
            raise BadFileError(
                f"sweep.search.method: {search.method} proposes {key}={values[key]!r}, which is not in "
                f"sweep.search.parameters.{key}; fix the plug-in, or write tpe"
            )
    if unknown := next((key for key in answer if key not in search.parameters), None):
        raise BadFileError(
            f"sweep.search.method: {search.method} proposes {unknown}, which is not in "
            "sweep.search.parameters; fix the plug-in, or write tpe"
        )
    return values


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
        rows = (row for paths in completed[:10] for row in rows_in(paths.metrics))
        metrics = ", ".join(sorted(map(str, metrics_in(rows)))[:50]) or "none"
        raise NoResultError(
            f"sweep.search.metric: {search.metric} is in no completed run's metrics.jsonl; "
            f"there are {metrics}"
        )
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
    record = liveness.newest_record(paths)
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
    split, slash, name = search.metric.partition("/")
    if not slash or split not in SPLITS:
        split, name = SPLITS[0], search.metric
    values = [number(row.get(name)) for row in rows if row.get("split") == split]
    finite = [value for value in values if value is not None and math.isfinite(value)]
    return (min if search.mode == "min" else max)(finite, default=None)
