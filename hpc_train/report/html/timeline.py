"""Attempts over time, by node. Times in which nothing ran are shortened."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from hpc_train.report.html.collecting import Attempt, RunData
from hpc_train.report.html.limits import ATTEMPT_BARS, LANES, NODES
from hpc_train.report.run_times import short_duration

#: An idle time longer than this share of the busy time is shown as one of this share.
_LONGEST_IDLE = 0.03
_TICKS = 5
#: The years 1 and 9999, between which there are dates.
_FIRST, _LAST = -62135596800.0, 253402300799.0


@dataclass(frozen=True)
class Bar:
    """One attempt on one node; places and widths in percent of the time axis."""

    x: float
    width: float
    #: Of the time until its first step.
    start_width: float
    lane: int
    cause: str
    text: str


@dataclass(frozen=True)
class NodeRow:
    """The attempts of a node, in as many lanes as ran at the same time."""

    node: str
    lanes: int
    bars: list[Bar]


@dataclass(frozen=True)
class Timeline:
    """All nodes, those with the most attempts first if there are too many."""

    rows: list[NodeRow]
    ticks: list[tuple[float, str]]
    #: Place and duration of the idle times that are shortened.
    breaks: list[tuple[float, str]]
    first: str
    last: str
    hidden_nodes: int
    hidden_bars: int

    @property
    def causes(self) -> list[str]:
        """How the attempts ended, for the legend."""
        return sorted({bar.cause for row in self.rows for bar in row.bars})


class _Axis:
    """Maps times to percent, idle times shortened."""

    def __init__(self, spans: Sequence[tuple[float, float]]) -> None:
        self.busy = _merged(spans)
        busy_s = sum(end - start for start, end in self.busy) or 1.0
        self._idle_s = _LONGEST_IDLE * busy_s
        #: Times and their places in seconds, both rising.
        self._times: list[float] = []
        self._places: list[float] = []
        self.gaps: list[tuple[float, float]] = []
        place, before = 0.0, None
        for start, end in self.busy:
            if before is not None:
                place += min(start - before, self._idle_s)
                if start - before > self._idle_s:
                    self.gaps.append((before, start))
            self._times += [start, end]
            self._places += [place, place + end - start]
            place, before = place + end - start, end
        self._length = place or 1.0

    def percent(self, time: float) -> float:
        return round(100 * _interpolated(time, self._times, self._places) / self._length, 3)

    def time(self, percent: float) -> float:
        return _interpolated(percent / 100 * self._length, self._places, self._times)


def _interpolated(value: float, rising: Sequence[float], values: Sequence[float]) -> float:
    above = bisect_left(rising, value)
    if above == 0 or above == len(rising):
        return values[min(above, len(rising) - 1)]
    low, high = rising[above - 1], rising[above]
    share = (value - low) / (high - low)
    return values[above - 1] + share * (values[above] - values[above - 1])


def timeline(runs: Sequence[RunData]) -> Timeline | None:
    """Return the timeline; None if no attempt has a known start and end."""
    by_node: dict[str, list[tuple[RunData, Attempt, tuple[float, float]]]] = defaultdict(list)
    for run in runs:
        for attempt in run.attempts:
            if attempt.span is not None:
                for node in attempt.nodes or ["unknown node"]:
                    by_node[node].append((run, attempt, attempt.span))
    if not by_node:
        return None
    nodes = sorted(by_node, key=lambda node: (-len(by_node[node]), node))
    shown = sorted(nodes[:NODES])
    axis = _Axis([span for node in shown for _, _, span in by_node[node]])
    rows, left = [], ATTEMPT_BARS
    for node in shown:
        entries = sorted(by_node[node], key=lambda entry: entry[2])[:left]
        left -= len(entries)
        rows.append(_row(node, entries, axis))
    first, last = axis.busy[0][0], axis.busy[-1][1]
    is_short = last - first < 20 * 3600
    return Timeline(
        rows=rows,
        ticks=[
            (percent, _clock(axis.time(percent), last - first, is_short=is_short))
            for percent in (round(100 * number / (_TICKS - 1), 2) for number in range(_TICKS))
        ],
        breaks=[(axis.percent((start + end) / 2), short_duration(end - start)) for start, end in axis.gaps],
        first=_date(first),
        last=_date(last),
        hidden_nodes=len(nodes) - len(shown),
        hidden_bars=sum(len(by_node[node]) for node in shown) - sum(len(row.bars) for row in rows),
    )


def _row(node: str, entries: Sequence[tuple[RunData, Attempt, tuple[float, float]]], axis: _Axis) -> NodeRow:
    free_from: list[float] = []
    bars = []
    for run, attempt, (start, end) in entries:
        free = [lane for lane, until in enumerate(free_from) if until <= start]
        if free:
            lane = free[0]
        elif len(free_from) < LANES:
            lane = len(free_from)
            free_from.append(end)
        else:
            lane = min(range(LANES), key=free_from.__getitem__)
        free_from[lane] = max(free_from[lane], end)
        x = axis.percent(start)
        width = max(0.2, round(axis.percent(end) - x, 3))
        started = attempt.first_step
        start_width = 0.0 if started is None else min(width, max(0.0, axis.percent(min(started, end)) - x))
        bars.append(
            Bar(x, width, round(start_width, 3), lane, attempt.cause, _text(run, attempt, end - start))
        )
    return NodeRow(node, len(free_from), bars)


def _text(run: RunData, attempt: Attempt, seconds: float) -> str:
    words = f"{run.name}, attempt {attempt.number}: {attempt.cause} after {short_duration(seconds)}"
    if attempt.first_step_words:
        words += f"; first step: {attempt.first_step_words}"
    return words if attempt.reason is None else f"{words} ({attempt.reason})"


def _merged(spans: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    found: list[tuple[float, float]] = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((start, end))
    return found


def _date(time: float) -> str:
    return _utc(time).strftime("%Y-%m-%d %H:%M UTC")


def _clock(time: float, seconds: float, *, is_short: bool) -> str:
    pattern = "%H:%M:%S" if seconds < 1200 else "%H:%M" if is_short else "%m-%d %H:%M"
    return _utc(time).strftime(pattern)


def _utc(time: float) -> datetime:
    return datetime.fromtimestamp(min(max(time, _FIRST), _LAST), UTC)
