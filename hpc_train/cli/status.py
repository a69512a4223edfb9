"""``status``: the rows of runs as a table, and the details of a single one; ``watch``: on a full screen."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from hpc_train.cli.command_options import StatusOptions, WatchOptions
from hpc_train.cli.many_runs import find_readable
from hpc_train.cli.run_row import RunRow, notes_in_words, rows_at, rows_json
from hpc_train.console import columns, print_table, put, put_json, say
from hpc_train.errors import ExitCode, UsageError
from hpc_train.launchers.lookup import statuses
from hpc_train.paths import RunPaths
from hpc_train.recovery.diagnosis import LAUNCHER_DIED
from hpc_train.recovery.history import saved_step
from hpc_train.registry import suggestion
from hpc_train.report.changed_keys import short_names
from hpc_train.report.run_files import RunFiles, layout_of, node_words
from hpc_train.report.usage import counts_by_state
from hpc_train.run.attempts import newest_number
from hpc_train.run.files import read_text
from hpc_train.run.find import run_names
from hpc_train.run.run_status import read_status
from hpc_train.run.tracebacks import shortened_traceback

_HEADS = ("run", "experiment", "state", "step", "job", "elapsed", "ETA", "values", "last metric or reason")

#: Number of runs whose ``resume`` command is printed.
_RESUMED = 5

_Key = Callable[[RunRow], Any]
#: ``metric``: the metric that the table shows.
_COLUMNS: dict[str, _Key] = {
    "run": lambda row: row.id,
    "experiment": lambda row: row.name,
    "state": lambda row: row.state,
    "step": lambda row: row.step,
    "attempt": lambda row: row.attempt,
    "elapsed": lambda row: row.elapsed_s,
    "eta": lambda row: row.eta_s,
    "metric": lambda row: (row.best_metric or row.last_metric or {}).get("value"),
}


def status(options: StatusOptions) -> ExitCode:
    """Show these runs, or all."""
    runs = find_readable(options.runs)
    pairs = list(zip(runs, statuses(runs), strict=True))
    if options.failed:
        pairs = [(paths, now) for paths, now in pairs if now.state == "failed"]
    is_one = len(pairs) == 1
    rows = rows_at(pairs, is_full=options.as_json or is_one, with_accounting=is_one)
    if options.sort is not None:
        rows = _sorted_rows(rows, options.sort)
    if options.as_json:
        put_json(rows_json(rows))
        return ExitCode.DONE
    if not runs:
        say("no runs yet; `hpc-train submit FILE` starts some")
    elif not rows:
        say("no run has failed")
    else:
        names = run_names([paths for paths, _ in pairs])
        by_path = {str(paths.folder.absolute()): name for paths, name in names.items()}
        cells = [row.cells(by_path[row.path]) for row in rows]
        print_table(_HEADS, cells, _titles(rows) if options.sort is None else {})
    _say_how_to_resume(rows)
    if options.runs and len(rows) == 1:
        _print_details(rows[0].paths, rows[0])
    if len(rows) == 1 and rows[0].micro_batch_size is not None:
        say(f"optimization.micro_batch_size: auto is {rows[0].micro_batch_size} in this run")
    if len(rows) == 1 and rows[0].state == "failed":
        _print_error(rows[0].paths)
    return ExitCode.DONE


def _say_how_to_resume(rows: Sequence[RunRow]) -> None:
    """Print the command that continues runs whose launcher was killed: nothing else names it."""
    died = [row.paths for row in rows if row.state == "failed" and row.reason == LAUNCHER_DIED]
    names = run_names(died) if died else {}
    for paths in died[:_RESUMED]:
        step = saved_step(paths, newest_number(paths))
        say(f"launcher died: `hpc-train resume {names[paths]}` continues from step {step}")
    if len(died) > _RESUMED:
        say(f"launcher died: also {len(died) - _RESUMED} more runs")


def _titles(rows: Sequence[RunRow]) -> dict[int, str]:
    """Return index of the first row → line above it, for each experiment that is a sweep."""
    states: dict[str, list[str]] = {}
    first: dict[str, int] = {}
    for place, row in enumerate(rows):
        states.setdefault(row.name, []).append(row.state)
        if row.values:
            first.setdefault(row.name, place)
    return {
        place: f"{name}: {counts_by_state(states[name])}"
        for name, place in first.items()
        if len(states[name]) > 1
    }


def _print_details(paths: RunPaths, row: RunRow) -> None:
    put("")
    files = RunFiles.read(paths)
    layout, record = layout_of(files), files.newest_record
    details = [*row.details(), *([("step", str(layout))] if layout else [])]
    if record is not None and record.job and record.hosts:
        details.append(("nodes", node_words(record)))
    details += notes_in_words(paths)
    put(*columns([(f"  {label}", text) for label, text in details]))


def _print_error(paths: RunPaths) -> None:
    """Print the error of the newest attempt's rank; a long traceback is cut to the user's own frames."""
    newest = paths.attempt(newest_number(paths))
    errors = {rank: path for rank, path in newest.files_of_ranks(".error").items() if path.is_file()}
    # The rank named in the reason: errors of the others follow from its error.
    reason = read_status(paths).reason or ""
    named = [rank for rank in errors if reason.startswith(f"rank {rank}:")]
    for rank in (named or list(errors))[:1]:
        text = read_text(errors[rank], errors="replace").rstrip()
        put("", *shortened_traceback(text, newest.log(rank)).split("\n"))


def _sorted_rows(rows: Sequence[RunRow], key: str) -> list[RunRow]:
    """Return the rows by ascending value; rows without a value come last.

    ``key``: a column, or a swept key, also by its last part (``lr``). Raises UsageError for any other.
    """
    names = short_names(list(dict.fromkeys(name for row in rows for name in row.values)))
    swept = {short: name for name, short in names.items()} | {name: name for name in names}
    value_of = _COLUMNS.get(key.lower())
    if value_of is None and key in swept:
        value_of = partial(lambda name, row: row.values.get(name), swept[key])
    if value_of is None:
        remedy = suggestion(key, [*_COLUMNS, *swept])
        raise UsageError(f"--sort: there is no column or swept key {key!r}; {remedy}")
    return sorted(rows, key=lambda row: _comparable(value_of(row)))


def _comparable(value: Any) -> tuple[int, float, str]:
    """Return a key that orders numbers by value, then texts, then missing values."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return 2, 0.0, ""
    if isinstance(value, int | float):
        return 0, float(value), ""
    return 1, 0.0, str(value)


def watch(options: WatchOptions) -> ExitCode:
    """Show these runs, or all, until the user quits. Raises UsageError if there is no terminal."""
    streams = (sys.stdin, sys.stdout, sys.stderr)
    if not all(stream.isatty() for stream in streams) or os.environ.get("TERM", "dumb") == "dumb":
        raise UsageError(
            "watch: needs a terminal for input, output and errors; use `hpc-train status`, which prints the "
            "same once, or `hpc-train status --json`"
        )
    find_readable(options.runs)  # prints skipped runs; a word that names no run is an error
    from hpc_train.report.live.live_runs import RunsReader
    from hpc_train.report.live.watch_app import WatchApp  # with textual: 0.3 s

    app = WatchApp(RunsReader(options.runs), options.interval)
    app.run()
    for command in app.living_commands:
        say(f"{command.title}: continues in the background, process {command.pid}")
    return ExitCode(app.return_code or 0)
