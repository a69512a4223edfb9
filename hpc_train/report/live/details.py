"""Details of one run, for the pane below the table and the view on ``enter``, and the end of its log.

``ReadingThread`` reads runs and details and queries schedulers, so that keys work meanwhile.
"""

from __future__ import annotations

import math
import os
import textwrap
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path

from hpc_train.console import one_line
from hpc_train.errors import HpcTrainError, shortened
from hpc_train.launchers.lookup import launcher_of
from hpc_train.paths import AttemptPaths, RunPaths
from hpc_train.report import metrics_reader
from hpc_train.report.live.live_runs import LiveRun, RunsReader, mean, rate_words, stamp
from hpc_train.report.metrics_reader import Metric, MetricsReader, Row, in_words, metric_value, number
from hpc_train.report.run_files import RunFiles, attempt_span, node_words, short_duration
from hpc_train.run import spikes
from hpc_train.run.attempts import AttemptRecord, newest_number
from hpc_train.run.best import Best
from hpc_train.run.checkpoints import kept_best
from hpc_train.run.files import UnreadableFileError, open_regular
from hpc_train.run.storage_errors import error_words

#: Bytes read of an existing log, and of the text added between two calls; the rest is skipped.
TAIL_BYTES = 1 << 16
#: Characters of a line that are shown.
_MAX_LINE = 2000


def log_of(paths: RunPaths) -> Path:
    """Return rank 0's log of the newest attempt; before its ranks start, the job's output, if any."""
    return launcher_of(paths).output(paths) or paths.attempt(max(newest_number(paths), 1)).log(0)


class LogTail:
    """Yields the last lines of a file, then appended lines; a replaced file is read again."""

    def __init__(self, path: Path, tail_bytes: int = TAIL_BYTES) -> None:
        self.path = path
        self._tail_bytes = tail_bytes
        self._inode = self._offset = 0

    def new_lines(self) -> list[str]:
        """Return the complete lines since the last call, safe for a terminal; none if there is no file."""
        try:
            file = open_regular(self.path)
        except (OSError, UnreadableFileError):
            return []
        with file:
            seen = os.fstat(file.fileno())
            is_new = seen.st_ino != self._inode or seen.st_size < self._offset
            start = max(0 if is_new else self._offset, seen.st_size - self._tail_bytes)
            file.seek(start)
            data = file.read(self._tail_bytes)
        end = data.rfind(b"\n") + 1
        skips_part = start > 0 and (is_new or start > self._offset)
        self._inode, self._offset = seen.st_ino, start + end
        lines = data[:end].decode("utf-8", "replace").replace("\r\n", "\n").replace("\r", "\n").split("\n")
        return [one_line(line[:_MAX_LINE]) for line in lines[1 if skips_part else 0 : -1]]


#: Attempts in the pane and the minimum of its log lines; the view shows more.
FEW, MANY = 2, 100
_LABEL = 11
#: Lines of the charts while lines of the log would fill the rest; of a reason in the pane. Assumed.
_CHART_LINES, _REASON_LINES = 16, 6
#: Bytes of metric rows that are read for a curve. Assumed: thousands of rows, in milliseconds.
_CURVE_BYTES = 1 << 20
#: Curves of a file larger than that are drawn again once it has grown by this factor.
_GROWTH = 1.02
#: A row with more metrics, such as one per class, is cut here.
_MAX_METRICS = 40


@dataclass(frozen=True)
class Details:
    """The texts about one run: a label or none, and a line that is safe for a terminal."""

    paths: RunPaths
    lines: tuple[tuple[str, str], ...]
    #: The end of its log.
    log: tuple[str, ...] = ()
    #: By title.
    curves: Mapping[str, Points] = field(default_factory=dict)

    def fitted(self, width: int, height: int) -> list[tuple[str, str]]:
        """Return the lines that fit: the reason in full, the end of the log, and the curves in the rest."""
        room = max(1, width - _LABEL)
        texts = [fit for line in self.lines for fit in _fitted(*line, room)]
        left = height - len(texts)
        drawn = charts(self.curves, width, max(min(left - FEW, _CHART_LINES), left - len(self.log)))
        log = self.log[max(0, len(self.log) - max(0, left - len(drawn))) :]
        texts += _labelled("log", [shortened(text, room) for text in log])
        return [(label.ljust(_LABEL), text) for label, text in texts] + drawn

    def lines_wide(self) -> list[tuple[str, str]]:
        """Return all lines with padded labels."""
        return [(label.ljust(_LABEL), text) for label, text in (*self.lines, *_labelled("log", self.log))]


def _fitted(label: str, text: str, room: int) -> list[tuple[str, str]]:
    """Return the text cut to ``room``; a reason is wrapped."""
    if label != "reason":
        return [(label, shortened(text, room))]
    return _labelled(label, textwrap.wrap(text, room, max_lines=_REASON_LINES, placeholder="…"))


class DetailsReader:
    """Reads the details of one run; keeps the rows of its evaluations and its curves."""

    def __init__(self, paths: RunPaths) -> None:
        self.paths = paths
        self._evaluations: list[Row] = []
        self._curves: dict[str, Points] = {}
        self._reader = MetricsReader(paths.metrics, part=b'"val"')
        self._stamp: tuple[int, int, int] | None = None
        self._curves_size = 0
        self._decisive: Metric | None = None
        self._spikes: tuple[tuple[int, int, int] | None, str] = (None, "")

    def read(self, run: LiveRun, *, is_full: bool) -> Details:
        """Return the current details; ``is_full``: with all attempts."""
        files = RunFiles.read(self.paths)
        self._decisive = metrics_reader.decisive_metric([run.status])
        self._read_metrics()
        nodes = f" on {', '.join(run.nodes)}" if run.nodes else ""
        job = f", job {run.job}" if run.job else ""
        values = f", {run.values}" if run.values else ""
        log = log_of(self.paths)
        lines = [
            ("run", f"{run.name} of {run.experiment}{values}, {run.state}{nodes}{job}"),
            ("reason", run.status.reason or ""),
            ("training", _row_words(run.train)),
            ("speed", _speed(run)),
            ("evaluation", _row_words(run.evaluation)),
            ("best", self._best_words()),
            ("spikes", self._spike_words()),
            *_labelled("attempts", _attempts(files, run, MANY if is_full else FEW)),
            *([("folder", str(self.paths.folder))] if is_full else []),
        ]
        end = LogTail(log).new_lines()[-MANY:] or [f"nothing in {log.name} yet"]
        texts = tuple((label, one_line(text)) for label, text in lines if text)
        return Details(self.paths, texts, tuple(map(one_line, end)), self._curves)

    def _read_metrics(self) -> None:
        """Read new evaluations and, if the file has changed, the curves."""
        seen = stamp(self.paths.metrics)
        if seen == self._stamp:
            return
        if seen is None or self._stamp is None or seen[0] != self._stamp[0]:
            self._evaluations, self._curves_size = [], 0  # a resume replaced the file: its rows come again
        self._stamp = seen
        self._evaluations += [row for row in self._reader.new_rows() if row.get("split") == "val"]
        size = seen[1] if seen else 0
        if size > _CURVE_BYTES and size < self._curves_size * _GROWTH:
            return
        self._curves_size = size
        sampled, _ = metrics_reader.spread_rows(self.paths.metrics, _CURVE_BYTES)
        rows = [*self._evaluations, *(row for row in sampled if row.get("split") == "train")]
        metrics = filter(None, (Metric("train", "loss"), self._metric()))
        self._curves = {str(metric): _points(rows, metric) for metric in metrics}

    def _spike_words(self) -> str:
        seen = stamp(self.paths.spikes)
        if seen != self._spikes[0]:
            self._spikes = (seen, spikes.in_words(self.paths) or "")
        return self._spikes[1]

    def _metric(self) -> Metric | None:
        newest = self._evaluations[-1] if self._evaluations else {}
        return metrics_reader.find_metric((Metric("val", name) for name in newest), None, self._decisive)

    def _best_words(self) -> str:
        """Return the best checkpoint's evaluation (``checkpoint.best``), else the best one so far."""
        with suppress(HpcTrainError):  # a checkpoint of a later version
            if best := kept_best(self.paths):
                return f"{best}, saved"
        metric = self._metric()
        best_point = metrics_reader.last_and_best(self._evaluations, metric)[1] if metric else None
        return str(Best(metric.name, best_point.value, best_point.step)) if metric and best_point else ""


def _points(rows: Sequence[Row], metric: Metric) -> Points:
    pairs = (
        (row.get("step"), metric_value(row, metric.name)) for row in rows if row.get("split") == metric.split
    )
    return [(step, value) for step, value in pairs if type(step) is int and value is not None]


def _row_words(row: Row) -> str:
    """Return ``step 120: loss 0.5 lr 0.01``, without the values that `_speed` shows."""
    if not row:
        return ""
    shown = {name: value for name, value in list(row.items())[:_MAX_METRICS] if name not in _SPEED}
    return f"step {row.get('step')}: {in_words(shown)}"


_SPEED = {"step_s", "data_wait_s", "samples_per_s", "tokens_per_s", "tflops_per_s", "mfu"}


def _speed(run: LiveRun) -> str:
    parts = [rate_words(run)]
    if (step_s := number(run.train.get("step_s"))) is not None:
        parts.append(f"{step_s:.3g} s per step")
    if run.data_wait is not None:
        parts.append(f"{run.data_wait:.1%} data wait")
    if run.mfu is not None:
        parts.append(f"MFU {run.mfu:.1%}")
    return ", ".join(filter(None, parts))


def _labelled(label: str, lines: Sequence[str]) -> list[tuple[str, str]]:
    return [("" if place else label, line) for place, line in enumerate(lines)]


def _attempts(files: RunFiles, run: LiveRun, limit: int) -> list[str]:
    """Return a line for each of the newest attempts, the newest one first."""
    lines = [_attempt(attempt, record, run) for attempt, record in reversed(files.attempts[-limit:])]
    skipped = len(files.attempts) - len(lines)
    return lines + ([f"and {skipped} earlier"] if skipped else [])


def _attempt(attempt: AttemptPaths, record: AttemptRecord | None, run: LiveRun) -> str:
    if record is None:
        return f"{attempt.number}: its record can't be read"
    is_running = attempt.number == run.status.attempt and run.state == "running"
    span = attempt_span(attempt, record, is_running=is_running)
    took = f" for {short_duration(span[1] - span[0])}" if span else ""
    nodes = f" on {node_words(record)}" if record.hosts else ""
    nodes += " in place" if record.in_place else ""
    end = "runs" if is_running else record.reason or record.cause or ("ended" if record.end else "no end")
    start = f"{record.start[:16].replace('T', ' ')} UTC"
    return f"{attempt.number}: {start}{took}{nodes}: {end}"


#: Steps and values, in the order of steps.
Points = Sequence[tuple[float, float]]
#: Lines of a chart's title and of its steps, below which two lines of dots are legible. Assumed.
MIN_LINES = 5
#: Columns of the labels of values, between two charts, and of the narrowest chart.
_LABELS, _GAP, _MIN_WIDTH = 9, 3, 34
#: Positive values that span more than this factor have a logarithmic scale. Assumed.
_LOG_FROM = 50.0
#: Bits of the dots of a braille character, by row and column.
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))


def charts(curves: Mapping[str, Points], width: int, height: int) -> list[tuple[str, str]]:
    """Return curves side by side as titles and lines, as many as fit; none without two finite points."""
    finite = {
        title: [point for point in points if math.isfinite(point[1])] for title, points in curves.items()
    }
    shown = [(title, points) for title, points in finite.items() if len(points) > 1]
    shown = shown[: max(1, (width + _GAP) // (_MIN_WIDTH + _GAP))]
    if not shown or height < MIN_LINES:
        return []
    place = (width + _GAP) // len(shown) - _GAP
    drawn = [_chart(title, points, place, height) for title, points in shown]
    titles, *lines = ((" " * _GAP).join(parts) for parts in zip(*drawn, strict=True))
    return [(titles, ""), *(("", line) for line in lines)]


def _chart(title: str, points: Points, width: int, height: int) -> list[str]:
    """Return ``height`` lines of ``width`` characters: title, curve with its labels, first and last step."""
    values = [value for _, value in points]
    low, high = min(values), max(values)
    is_log = low > 0 and high / low > _LOG_FROM
    columns = width - _LABELS - 1
    rows = _dots(
        [(step, math.log(value) if is_log else value) for step, value in points], columns, height - 2
    )
    labels = [f"{high:.3g}", *[""] * (height - 4), f"{low:.3g}"]
    first, last = (f"{points[place][0]:g}" for place in (0, -1))
    head = f"{title}{', logarithmic' if is_log else ''}: {values[-1]:.4g} at step {last}"
    steps = f"{'step':>{_LABELS}} {first}{last.rjust(max(0, columns - len(first)))}"
    curve = [f"{label:>{_LABELS}} {row}" for label, row in zip(labels, rows, strict=True)]
    return [shortened(line, width).ljust(width) for line in (head, *curve, steps)]


def _dots(points: Points, columns: int, lines: int) -> list[str]:
    """Return the curve as ``lines`` of ``columns`` braille characters."""
    heights = _heights(points, 2 * columns, 4 * lines)
    cells = [[0] * columns for _ in range(lines)]
    for x, y in enumerate(heights):
        low, high = sorted((heights[max(0, x - 1)], y))
        for row in {y, *range(low + 1, high)}:  # a steep part without gaps
            cells[row // 4][x // 2] |= _DOTS[row % 4][x % 2]
    return ["".join(chr(0x2800 + bits) for bits in line) for line in cells]


def _heights(points: Points, columns: int, rows: int) -> list[int]:
    """Return for each column of dots the row of the curve, 0 at the top."""
    first, last = points[0][0], points[-1][0]
    low, high = (limit(value for _, value in points) for limit in (min, max))
    span = high / 2 - low / 2  # halves: no overflow

    def column(point: tuple[float, float]) -> int:
        return round((point[0] - first) / (last - first) * (columns - 1)) if last > first else 0

    means = {x: mean([value for _, value in group]) for x, group in groupby(points, column)}
    known = sorted(means)
    heights, place = [], 0
    for x in range(columns):
        while place + 1 < len(known) and known[place + 1] <= x:
            place += 1
        left, right = known[place], known[min(place + 1, len(known) - 1)]
        share = (x - left) / (right - left) if right > left else 0.0
        value = means[left] * (1 - share) + means[right] * share
        heights.append(round((1 - ((value / 2 - low / 2) / span if span > 0 else 0.5)) * (rows - 1)))
    return heights


@dataclass(frozen=True)
class Reading:
    """The result of one reading. ``details``: of the selected run, if there is one."""

    runs: list[LiveRun]
    details: Details | None
    #: Why something could not be read; the rest is unchanged.
    problem: str = ""


class ReadingThread(threading.Thread):
    """Reads every ``interval_s`` seconds, and at once when something else is selected.

    Daemonic: a file server or scheduler that does not answer does not delay exit.
    """

    def __init__(self, reader: RunsReader, interval_s: float, deliver: Callable[[Reading], object]) -> None:
        super().__init__(name="reading runs", daemon=True)
        self._reader, self._interval_s, self._deliver = reader, interval_s, deliver
        self._condition = threading.Condition()
        self._selected: RunPaths | None = None
        self._is_full = self._wants_runs = self._is_stopped = False
        self._wants_details = False
        self._details: DetailsReader | None = None
        self._runs: list[LiveRun] = []

    def select(self, paths: RunPaths | None, *, is_full: bool) -> None:
        """Read the details of this run from now on."""
        with self._condition:
            if (paths, is_full) != (self._selected, self._is_full):
                self._selected, self._is_full, self._wants_details = paths, is_full, True
                self._condition.notify()

    def read_now(self) -> None:
        """Read everything without waiting for the next time."""
        with self._condition:
            self._wants_runs = True
            self._condition.notify()

    def stop(self) -> None:
        """End the thread after it has delivered its current reading; return at once."""
        with self._condition:
            self._is_stopped = True
            self._condition.notify()

    def run(self) -> None:
        """Read and deliver until ``stop``."""
        while not self._is_stopped:
            due_s = time.monotonic() + self._interval_s
            self._deliver(self._read(with_runs=True))
            while self._wait(due_s):
                self._deliver(self._read(with_runs=False))

    def _wait(self, due_s: float) -> bool:
        """Wait until ``due_s`` or a request; return True if only details are requested."""
        with self._condition:
            self._condition.wait_for(
                lambda: self._wants_runs or self._wants_details or self._is_stopped,
                max(0.0, due_s - time.monotonic()),
            )
            details_alone = self._wants_details and not self._wants_runs and not self._is_stopped
            self._wants_runs = self._wants_details = False
            return details_alone

    def _read(self, *, with_runs: bool) -> Reading:
        problem = ""
        try:
            self._runs = self._reader.read() if with_runs else self._runs
            details = self._read_details()
        except Exception as error:  # an error of a plug-in or a disk: shown, and retried
            details, problem = None, problem_words(error)
        return Reading(self._runs, details, problem)

    def _read_details(self) -> Details | None:
        with self._condition:
            selected, is_full = self._selected, self._is_full
        run = next((run for run in self._runs if run.paths == selected), None)
        if run is None:
            return None
        if self._details is None or self._details.paths != run.paths:
            self._details = DetailsReader(run.paths)
        return self._details.read(run, is_full=is_full)


def problem_words(error: Exception) -> str:
    """Return why something could not be read."""
    if isinstance(error, OSError):
        return error_words(error)
    return str(error) if isinstance(error, HpcTrainError) else f"{type(error).__name__}: {error}"
