"""Shared by ``submit`` and ``resume``: starts runs with a launcher, and reports their end."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from hpc_train.cli.next_steps import next_steps
from hpc_train.cli.run_row import RunRow, rows_json
from hpc_train.console import columns, put, put_json, say
from hpc_train.errors import BadFileError, ExitCode
from hpc_train.launchers.base import Launcher, StartRequest
from hpc_train.launchers.following import LOCAL
from hpc_train.paths import RunPaths, from_here
from hpc_train.report.metrics_reader import PREFERRED, Row, in_words, validation_rows
from hpc_train.report.progress_display import Progress
from hpc_train.run import bad_samples
from hpc_train.run.attempts import newest_number
from hpc_train.run.best import BestSoFar
from hpc_train.run.create import effective_experiment
from hpc_train.run.files import read_text
from hpc_train.run.find import run_name, run_names
from hpc_train.run.liveness import newest_record
from hpc_train.run.run_status import GOING_ON, read_status


def start(launcher: Launcher, runs: Sequence[StartRequest]) -> ExitCode:
    """Start the runs of one experiment, within the launcher's ``submitting``; print their status."""
    folder = runs[0].paths.siblings
    code = launcher.start(folder, runs)
    if launcher.is_queue:
        _say_queued([run.paths for run in runs])
    else:
        say_end(runs[0].paths, code)
    return code


@contextmanager
def polling(paths: RunPaths, attempt: int) -> Iterator[Callable[[], None]]:
    """Show the attempt's progress while its launcher follows it."""
    progress = Progress(paths, attempt)
    try:
        yield progress.update
    finally:
        progress.close()


def _say_queued(runs: Sequence[RunPaths]) -> None:
    first = runs[0]
    which, folder = run_name(first), first.folder
    if len(runs) > 1:
        which, folder = first.siblings.folder.name, first.siblings.folder
    say(f"{which}: queued, in {folder}")
    _say_details(
        ("status", f"`hpc-train status {which}`"),
        ("log", f"`hpc-train logs -f {run_name(first)}`"),
        ("log files", f"{from_here(first.attempts)}/<attempt>/rank-<rank>.log"),
    )


def _say_details(*details: tuple[str, str]) -> None:
    """Print labels and texts below the line on a run."""
    for line in columns([(f"  {label}", text) for label, text in details]):
        say(line)


def report(rows: Sequence[RunRow], *, as_json: bool) -> None:
    """Print one line per run, or JSON, to stdout."""
    if as_json:
        put_json(rows_json(rows))
        return
    names = run_names([row.paths for row in rows])
    lines = ((names[row.paths], row.state, row.progress, row.path) for row in rows)
    put(*("  ".join(line) for line in lines))


def say_end(paths: RunPaths, code: ExitCode) -> None:
    """Print the run's status, its results, its folder, and the next command."""
    row, name = RunRow.of(paths), run_name(paths)
    if code == ExitCode.DONE and row.state in GOING_ON:
        say(f"{name}: {'queued' if row.state == 'pending' else row.state}")
        _say_details(("run folder", from_here(paths.folder)), ("status", f"`hpc-train status {name}`"))
        return
    record = newest_record(paths)
    has_said_why = record is not None and record.launcher == LOCAL
    reason = f" ({row.reason})" if row.reason and not has_said_why else ""
    say(f"{name}: {row.state}{reason} at step {row.progress}")
    details = [*_results(paths, validation_rows(paths.metrics)), ("run folder", from_here(paths.folder))]
    if paths.metrics.exists():
        details.append(("metrics", from_here(paths.metrics)))
    if bad := bad_samples.in_words(paths):
        details.append(("bad samples", bad))
    details += _profile(paths)
    steps = next_steps(paths, read_status(paths))
    _say_details(*details, *zip(("next", *[""] * len(steps)), steps, strict=False))


def _profile(paths: RunPaths) -> list[tuple[str, str]]:
    """Return the lines on the run's bottleneck, if its newest attempt was profiled."""
    attempts = paths.attempt_folders()
    table = attempts[-1].profile_table if attempts else None
    if table is None or not table.is_file():
        return []
    limits = [line for line in read_text(table).splitlines() if line.startswith("limited by: ")]
    return [("profile", from_here(table)), *(("", line) for line in limits[:1])]


def _results(paths: RunPaths, rows: Sequence[Row]) -> list[tuple[str, str]]:
    if not rows:
        return []
    last, best = rows[-1], _best(paths, rows)
    results = [("last val", f"step {last.get('step')}: {in_words(last)}")]
    if best is last:
        return [("last val", f"{results[0][1]} (the best)")]
    return results if best is None else [*results, ("best val", f"step {best.get('step')}: {in_words(best)}")]


def _best(paths: RunPaths, rows: Sequence[Row]) -> Row | None:
    """Return the best row by the metric of ``checkpoint.best`` or else ``early_stopping``, or without both by
    the first metric of ``PREFERRED`` that rows have; None without any.
    """
    preferred = [BestSoFar(name, "min" if name == "loss" else "max") for name in PREFERRED]
    for best in (*_chosen(paths), *preferred):
        found = None
        for row in rows:
            if best.metric in row and best.add(row.get("step", 0), row[best.metric]):
                found = row
        if found is not None:
            return found
    return None


def _chosen(paths: RunPaths) -> list[BestSoFar]:
    """Return the metric by which the run itself selects its best evaluation, if it does."""
    try:
        experiment = effective_experiment(paths, newest_number(paths))
    except BadFileError:
        return []
    chosen = experiment.checkpoint.best or experiment.early_stopping
    return [] if chosen is None else [BestSoFar(chosen.metric, chosen.mode)]
