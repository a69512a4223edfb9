"""Runs as pandas tables, for notebooks and scripts: ``pip install 'hpc-train[results]'``.

``runs()`` has a row per run, ``metrics()`` the rows of their metrics, ``attempts()`` their attempts. All
accept the arguments of commands: a run's id, ``name/id``, its folder, or an experiment's name; without any,
all runs below ``$HPC_TRAIN_RUNS`` (or ``runs``). They read files only, import no torch, and need no
scheduler: the state of a run is the last recorded one.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpc_train.errors import UsageError, UserError
from hpc_train.paths import RunPaths
from hpc_train.report.changed_keys import changed_keys
from hpc_train.report.metric_values import Metric, find_metric, last_and_best, metrics_in
from hpc_train.report.metrics_reader import Row, rows_in
from hpc_train.report.run_files import RunFiles, ranks_of
from hpc_train.report.run_times import attempt_span, elapsed_s
from hpc_train.report.time_use import attempt_cause, goodput
from hpc_train.run.find import find_runs, run_names
from hpc_train.run.run_status import read_status

if TYPE_CHECKING:
    import pandas as pd

#: Arguments of the functions: as typed on the command line, or a folder.
Word = str | Path


class MissingPandasError(UserError):
    """pandas is not installed: it is an optional dependency."""


def runs(*words: Word, metric: str | None = None) -> pd.DataFrame:
    """Return a row per run.

    Columns: ``run``, ``experiment``, ``state``, ``step``, ``total_steps``, ``attempts``, ``ranks``,
    ``elapsed_s`` (of all attempts), ``goodput``, ``metric``, ``last``, ``last_step``, ``best``,
    ``best_step``, ``commit``, ``path``, and one per key in which the runs differ, with its dotted name.
    ``metric``: ``accuracy`` or ``train/loss``, by default accuracy, map or loss of evaluations. Raises
    UsageError if no run has it, or if a word names no run.
    """
    pandas = _pandas()
    found = _find(words)
    names, values = run_names(found), changed_keys(found)
    rows = {paths: list(rows_in(paths.metrics)) for paths in found}
    chosen = _chosen(list(rows.values()), metric)
    return pandas.DataFrame(
        [{"run": names[paths]} | _run(paths, rows[paths], chosen) | values[paths] for paths in found]
    )


def metrics(*words: Word, split: str | None = None) -> pd.DataFrame:
    """Return the rows of ``metrics.jsonl`` of the runs in order, with the columns ``run`` and ``experiment``.

    ``split``: only the rows of ``train`` or of ``val``. ``time`` is a timestamp in UTC.
    """
    pandas = _pandas()
    found = _find(words)
    names = run_names(found)
    table = pandas.DataFrame(
        [
            {"run": names[paths], "experiment": paths.siblings.folder.name} | row
            for paths in found
            for row in rows_in(paths.metrics)
            if split is None or row.get("split") == split
        ]
    )
    if "time" in table:
        seconds = pandas.to_numeric(table["time"], errors="coerce")
        table["time"] = pandas.to_datetime(seconds, unit="s", utc=True, errors="coerce")
    return table


def attempts(*words: Word) -> pd.DataFrame:
    """Return a row per attempt of the runs.

    Columns: ``run``, ``experiment``, ``attempt``, ``start``, ``end`` (timestamps in UTC), ``duration_s``,
    ``cause`` (why it ended), ``reason``, ``nodes``, ``ranks``, ``job``, ``saved_step``.
    """
    pandas = _pandas()
    found = _find(words)
    names = run_names(found)
    table = pandas.DataFrame([each for paths in found for each in _attempts(paths, names[paths])])
    for column in ("start", "end"):
        if column in table:
            table[column] = pandas.to_datetime(table[column], unit="s", utc=True, errors="coerce")
    return table


def _pandas() -> Any:
    try:
        import pandas
    except ModuleNotFoundError as error:
        raise MissingPandasError(
            "hpc_train.results: pandas is not installed, and tables need it; install it with "
            "pip install 'hpc-train[results]'"
        ) from error
    return pandas


def _find(words: Sequence[Word]) -> list[RunPaths]:
    return find_runs([os.fspath(word) for word in words])


def _chosen(rows: Sequence[Sequence[Row]], wanted: str | None) -> Metric | None:
    known = metrics_in(row for run_rows in rows for row in run_rows)
    found = find_metric(known, wanted)
    if found is None and wanted is not None:
        listed = ", ".join(sorted(map(str, known))[:50]) or "none yet"
        raise UsageError(f"metric: {wanted} is in no run's metrics.jsonl; there are {listed}")
    return found


def _run(paths: RunPaths, rows: Sequence[Row], metric: Metric | None) -> dict[str, Any]:
    run, status = RunFiles.read(paths), read_status(paths)
    elapsed = elapsed_s(run, status)
    last, best = last_and_best(rows, metric) if metric else (None, None)
    code = run.facts.get("code")
    return {
        "experiment": paths.siblings.folder.name,
        "state": status.state,
        "step": status.step,
        "total_steps": status.total_steps,
        "attempts": len(run.attempts),
        "ranks": ranks_of(run.facts, run.newest_record),
        "elapsed_s": elapsed,
        "goodput": goodput(paths, status, elapsed),
        "metric": None if metric is None else str(metric),
        "last": None if last is None else last.value,
        "last_step": None if last is None else last.step,
        "best": None if best is None else best.value,
        "best_step": None if best is None else best.step,
        "commit": code.get("commit") if isinstance(code, dict) else None,
        "path": str(paths.folder),
    }


def _attempts(paths: RunPaths, name: str) -> list[dict[str, Any]]:
    run, status = RunFiles.read(paths), read_status(paths)
    found = []
    for attempt, record in run.recorded:
        is_running = run.is_running(record, status)
        span = attempt_span(attempt, record, is_running=is_running)
        found.append(
            {
                "run": name,
                "experiment": paths.siblings.folder.name,
                "attempt": attempt.number,
                "start": None if span is None else span[0],
                "end": None if span is None or is_running else span[1],
                "duration_s": None if span is None else span[1] - span[0],
                "cause": attempt_cause(record, is_running=is_running),
                "reason": record.reason,
                "nodes": " ".join(record.hosts),
                "ranks": record.ranks,
                "job": record.job,
                "saved_step": record.saved_step,
            }
        )
    return found
