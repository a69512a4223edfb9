"""The table of ``watch``: its runs and their order, the text of each cell, the columns that fit."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from hpc_train.console import one_line
from hpc_train.errors import shortened
from hpc_train.report.live.live_runs import LiveRun
from hpc_train.report.run_times import short_duration
from hpc_train.run.run_status import STATES

STATE_STYLES = {
    "running": "cyan",
    "completed": "green",
    "failed": "bold red",
    "interrupted": "yellow",
    "cancelled": "yellow",
    "requeued": "magenta",
    "unknown": "red",
}
_BAR, _SPARKS, _VALUE = 8, 10, 9
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
    #: Kept even if it is cut to this width.
    least: int | None = None


def _note(run: LiveRun) -> str:
    if note := run.status.reason or run.status.activity:
        return note
    name, value = run.metric or ("", None)
    metric = f"{name} {'nan' if value is None else format(value, '.4g')}" if name else ""
    slow = run.status.slow_words if run.state == "running" else ""
    return "; ".join(filter(None, (metric, slow)))


def _loss(run: LiveRun) -> str:
    if not run.losses:
        return ""
    return f"{sparkline(run.losses, _SPARKS).ljust(_SPARKS)} {run.losses[-1]:.4g}"


def _progress(run: LiveRun) -> str:
    total = run.status.total_steps
    return f"{bar(run.share, _BAR)} {run.status.step}/{'?' if total is None else total}"


def _percent(share: float | None) -> str:
    return "" if share is None or not math.isfinite(share) else f"{share:.0%}"


def rate_words(run: LiveRun) -> str:
    """Return ``1.23k samples/s``; empty if unknown."""
    return "" if run.rate is None else f"{short_number(run.rate[0])} {run.rate[1]}"


#: In the order in which they are shown.
COLUMNS = (
    Column("run", 16, lambda run: run.name, least=10),
    Column("experiment", 16, lambda run: run.experiment, rank=5, least=8),
    Column("state", 11, lambda run: run.state),
    Column("progress", 24, _progress, least=_BAR),
    Column("ETA", 6, lambda run: short_duration(run.eta_s)),
    Column("loss", _SPARKS + 1 + _VALUE, _loss, least=_SPARKS),
    Column("rate", 16, rate_words, rank=2),
    Column("wait", 4, lambda run: _percent(run.data_wait), rank=3),
    Column("MFU", 4, lambda run: _percent(run.mfu), rank=4),
    Column("nodes", 14, lambda run: ",".join(run.nodes), rank=7),
    Column("job", 12, lambda run: run.job or "", rank=8),
    Column("tries", 5, lambda run: str(run.status.attempt or ""), rank=6),
    Column("error or metric", 200, _note, rank=1, least=16),
)


def columns_for(runs: Sequence[LiveRun], width: int) -> dict[Column, int]:
    """Return the columns that fit, in order, with their widths; empty columns are omitted."""
    texts = {column: [one_line(column.text(run)) for run in runs] for column in COLUMNS}
    used = {
        column: min(column.width, max(map(len, [column.head, *cells])))
        for column, cells in texts.items()
        if any(cells) or column.rank == 0
    }
    for column in sorted(used, key=lambda column: -column.rank):
        surplus = sum(used.values()) + _GAP * (len(used) - 1) - width
        if surplus <= 0:
            break
        if column.least is not None and used[column] - surplus >= column.least:
            used[column] -= surplus
        elif column.rank:
            del used[column]
        elif column.least is not None:
            used[column] = max(min(column.least, used[column]), used[column] - surplus)
    left = width - sum(used.values()) - _GAP * (len(used) - 1)
    return {column: place + (max(0, left) if column is COLUMNS[-1] else 0) for column, place in used.items()}


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
    shown = [_mean(values[start:end]) for start, end in pairwise(edges)]
    finite = [value for value in shown if math.isfinite(value)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    return "".join(_block(value, low, high) for value in shown)


def _mean(values: Sequence[float]) -> float:
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

    A word that is a state matches that state; any other matches a part of a run's name, experiment, job,
    nodes or reason, ignoring case.
    """
    matching = [run for run in runs if all(_matches(run, word) for word in filter_text.lower().split())]
    return sorted(matching, key=lambda run: (SORTS[sort](run), run.experiment, run.name))


def _matches(run: LiveRun, word: str) -> bool:
    if word in STATES:
        return run.state == word
    texts = (run.name, run.experiment, run.state, run.job or "", *run.nodes, run.status.reason or "")
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
