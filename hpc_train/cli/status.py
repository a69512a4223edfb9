"""``status``: the rows of runs as a table, and the details of a single one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hpc_train.cli.many_runs import collecting_rarely
from hpc_train.cli.row_order import sorted_rows
from hpc_train.cli.run_row import RunRow, rows_at, rows_json
from hpc_train.cli.unreadable import find_readable
from hpc_train.console import columns, put, put_json, say
from hpc_train.errors import ExitCode
from hpc_train.launchers.lookup import statuses
from hpc_train.paths import RunPaths
from hpc_train.report.run_files import RunFiles
from hpc_train.report.run_table import print_table
from hpc_train.report.step_layout import layout_of
from hpc_train.report.usage import counts_by_state
from hpc_train.run import bad_samples
from hpc_train.run.attempts import newest_number
from hpc_train.run.files import read_text
from hpc_train.run.find import run_names
from hpc_train.run.run_status import read_status
from hpc_train.run.tracebacks import shortened_traceback

_HEADS = ("run", "experiment", "state", "step", "job", "elapsed", "ETA", "values", "last metric or reason")


@dataclass(frozen=True, kw_only=True)
class StatusOptions:
    """The options of ``status``."""

    as_json: bool = False
    #: A column or a swept key by which rows are sorted; None: by experiment and id.
    sort: str | None = None
    failed: bool = False


@collecting_rarely()
def status(words: Sequence[str], options: StatusOptions) -> ExitCode:
    """Show these runs, or all."""
    runs = find_readable(words)
    pairs = list(zip(runs, statuses(runs), strict=True))
    if options.failed:
        pairs = [(paths, now) for paths, now in pairs if now.state == "failed"]
    is_one = len(pairs) == 1
    rows = rows_at(pairs, is_full=options.as_json or is_one, with_accounting=is_one)
    if options.sort is not None:
        rows = sorted_rows(rows, options.sort)
    if options.as_json:
        put_json(rows_json(rows))
        return ExitCode.DONE
    if not runs:
        say("no runs yet; `hpc-train submit FILE` starts some")
    elif not rows:
        say("no run has failed")
    else:
        _print_rows(rows, is_grouped=options.sort is None)
    if words and len(rows) == 1:
        _print_details(rows[0].paths, rows[0])
    if len(rows) == 1 and rows[0].micro_batch_size is not None:
        say(f"optimization.micro_batch_size: auto is {rows[0].micro_batch_size} in this run")
    if len(rows) == 1 and rows[0].state == "failed":
        _print_error(rows[0].paths)
    return ExitCode.DONE


def _print_rows(rows: Sequence[RunRow], *, is_grouped: bool) -> None:
    """Print the table; above the runs of a sweep a line with their number by state."""
    paths = [row.paths for row in rows]
    names = run_names(paths)
    cells = [row.cells(names[each]) for each, row in zip(paths, rows, strict=True)]
    print_table(_HEADS, cells, _titles(rows) if is_grouped else {})


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
    layout = layout_of(RunFiles.read(paths))
    details = [*row.details(), *([("step", str(layout))] if layout else [])]
    if bad := bad_samples.in_words(paths):
        details.append(("bad samples", bad))
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
