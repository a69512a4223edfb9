"""The table of ``watch``: its runs and their order, the text of each cell, the columns that fit."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from hpc_train.console import STATE_STYLES, one_line
from hpc_train.errors import shortened
from hpc_train.report.live.live_runs import LiveRun
from hpc_train.report.run_files import short_duration
from hpc_train.run.run_status import STATES

STYLES = STATE_STYLES | {"failed": "bold red", "unknown": "red"}
_BAR, _SPARKS = 8, 10
_GAP = 1
#: From the lowest to the highest; NaN and infinity are shown as a cross.
_BLOCKS, _NOT_FINITE = "▁▂▃▄▅▆▇█", "×"


@dataclass(frozen=True)
class Column:
    """A column of the table; ``width``: the maximum, without the gap to the next."""

    head: str
    width: int
    text: Callable[[LiveRun], str]
    #: Columns with a higher number are dropped first if the screen is too narrow; 0: always shown.
    rank: int = 0
    #: The width to which it may be cut; None: it is not cut.
    least: int | None = None


def _note(run: LiveRun) -> str:
    if note := run.status.reason or run.status.activity:
        return note
    name, value = run.metric or ("", None)
    metric = f"{name} {'nan' if value is None else format(value, '.4g')}" if name else ""
    slow = run.status.slow_words if run.state == "running" else ""
    return "; ".join(filter(None, (metric, slow)))


def _steps(run: LiveRun) -> str:
    total = run.status.total_steps
    return f"{run.status.step}/{'?' if total is None else total}"


def _percent(share: float | None) -> str:
    return "" if share is None or not math.isfinite(share) else f"{share:.0%}"


def rate_words(run: LiveRun) -> str:
    """Return ``1.23k samples/s``; empty if unknown."""
    return "" if run.rate is None else f"{short_number(run.rate[0])} {run.rate[1]}"


#: In the order in which they are shown.
COLUMNS = (
    Column("run", 16, lambda run: run.name, least=10),
    Column("values", 32, lambda run: run.values, rank=2, least=20),
    Column("experiment", 16, lambda run: run.experiment, rank=8, least=8),
    Column("state", 11, lambda run: run.state),
    Column("progress", _BAR, lambda run: bar(run.share, _BAR), rank=4),
    Column("step", 15, _steps, least=8),
    Column("ETA", 6, lambda run: short_duration(run.eta_s)),
    Column("trend", _SPARKS, lambda run: sparkline(run.losses, _SPARKS), rank=3),
    Column("loss", 9, lambda run: format(run.losses[-1], ".4g") if run.losses else ""),
    Column("rate", 16, rate_words, rank=5),
    Column("wait", 4, lambda run: _percent(run.data_wait), rank=6),
    Column("MFU", 4, lambda run: _percent(run.mfu), rank=7),
    Column("nodes", 14, lambda run: ",".join(run.nodes), rank=10),
    Column("job", 12, lambda run: run.job or "", rank=11),
    Column("tries", 5, lambda run: str(run.status.attempt or ""), rank=9),
    Column("error or metric", 200, _note, rank=1, least=20),
)


def columns_for(runs: Sequence[LiveRun], width: int) -> dict[Column, int]:
    """Return the columns that fit, in order, with their widths; empty columns are omitted.

    Columns of a high rank are dropped before others are cut further than to ``least``; the last column gets
    the width that the others do not need.
    """
    texts = {column: [one_line(column.text(run)) for run in runs] for column in COLUMNS}
    full = {
        column: min(column.width, max(map(len, [column.head, *cells])))
        for column, cells in texts.items()
        if any(cells)
    }
    used = {column: min(place, column.least or place) for column, place in full.items()}
    for column in sorted(used, key=lambda column: -column.rank):
        if _surplus(used, width) <= 0 or column.rank == 0:
            break
        del used[column]
    for column in used:
        used[column] += max(0, min(full[column] - used[column], -_surplus(used, width)))
    if COLUMNS[-1] in used:
        used[COLUMNS[-1]] += max(0, -_surplus(used, width))
    return used


def _surplus(used: Mapping[Column, int], width: int) -> int:
    return sum(used.values()) + _GAP * (len(used) - 1) - width


def failures(runs: Sequence[LiveRun], columns: Mapping[Column, int]) -> list[str]:
    """Return ``NAME: REASON`` of the failed runs whose reason does not fit the table, the newest first.

    Runs with the same reason share a text: ``NAME and 3 more: REASON``.
    """
    width = columns.get(COLUMNS[-1], 0)
    names: dict[str, list[str]] = {}
    for run in sorted(runs, key=lambda run: run.since, reverse=True):
        if run.state == "failed" and len(one_line(_note(run))) > width:
            names.setdefault(run.status.reason or "", []).append(run.name)
    lines = []
    for reason, of_reason in names.items():
        more = f" and {len(of_reason) - 1} more" if len(of_reason) > 1 else ""
        lines.append(one_line(f"{of_reason[0]}{more}: {reason}"))
    return lines


def newest(runs: Sequence[LiveRun]) -> LiveRun | None:
    """Return the run that started last of those that run, else of all; None without runs."""
    return max(runs, key=lambda run: (run.state == "running", run.since), default=None)


def cells(run: LiveRun, columns: Mapping[Column, int]) -> tuple[str, ...]:
    """Return the run's line: safe for a terminal, no cell longer than its column."""
    return tuple(shortened(one_line(column.text(run)), width) for column, width in columns.items())


def bar(share: float, width: int) -> str:
    """Return a bar of ``width`` characters, filled by ``share``."""
    full = math.floor(share * width)
    return "█" * full + "░" * (width - full)


def sparkline(values: Sequence[float], width: int) -> str:
    """Return the values as at most ``width`` blocks between their minimum and maximum.

    With more values, each block is a mean; a block with NaN or infinity is a cross.
    """
    count = min(width, len(values))
    edges = [place * len(values) // count for place in range(count + 1)] if count else []
    shown = [mean(values[start:end]) for start, end in pairwise(edges)]
    finite = [value for value in shown if math.isfinite(value)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    return "".join(_block(value, low, high) for value in shown)


def mean(values: Sequence[float]) -> float:
    """Return the mean; the sum of the values may overflow."""
    return sum(value / len(values) for value in values)


def _block(value: float, low: float, high: float) -> str:
    if not math.isfinite(value):
        return _NOT_FINITE
    span = high / 2 - low / 2  # halves: no overflow
    place = (value / 2 - low / 2) / span if span > 0 else 0.0
    return _BLOCKS[min(len(_BLOCKS) - 1, int(place * len(_BLOCKS)))]


def short_number(value: float) -> str:
    """Return three digits and a unit of thousands: ``1.23k``, ``45.6M``."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if math.isfinite(value) and abs(value) >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.3g}"


#: In order of interest: states that need attention come first.
_BY_STATE = ("failed", "unknown", "running", "requeued", "pending", "interrupted", "cancelled", "completed")


def _newest_loss(run: LiveRun) -> float:
    loss = run.losses[-1] if run.losses else math.inf
    return loss if math.isfinite(loss) else math.inf


#: Name of an order → its key; runs with equal keys are ordered by experiment and name.
SORTS: dict[str, Callable[[LiveRun], Any]] = {
    "name": lambda run: 0,
    "state": lambda run: _BY_STATE.index(run.state),
    "progress": lambda run: -run.share,
    "ETA": lambda run: math.inf if run.eta_s is None else run.eta_s,
    "loss": _newest_loss,
}


def selected(runs: Sequence[LiveRun], filter_text: str, sort: str) -> list[LiveRun]:
    """Return the runs that match all words, in the order ``sort``.

    A word that is a state matches that state; any other matches a part of a run's name, swept values,
    experiment, job, nodes or reason, ignoring case.
    """
    matching = [run for run in runs if all(_matches(run, word) for word in filter_text.lower().split())]
    return sorted(matching, key=lambda run: (SORTS[sort](run), run.experiment, run.name))


def _matches(run: LiveRun, word: str) -> bool:
    if word in STATES:
        return run.state == word
    status = run.status
    texts = (run.name, run.values, run.experiment, run.state, run.job or "", *run.nodes, status.reason or "")
    return any(word in text.lower() for text in texts)


def next_sort(sort: str) -> str:
    """Return the order after this one."""
    names = list(SORTS)
    return names[(names.index(sort) + 1) % len(names)]


def counts(runs: Sequence[LiveRun]) -> str:
    """Return ``3 runs: 1 failed, 2 running``."""
    by_state = {state: sum(run.state == state for run in runs) for state in _BY_STATE}
    listed = ", ".join(f"{count} {state}" for state, count in by_state.items() if count)
    return f"{len(runs)} run{'' if len(runs) == 1 else 's'}{': ' if listed else ''}{listed}"
