"""Progress of a followed run: a bar on a terminal, plain lines elsewhere.

Reads only the run folder's files; the launcher calls ``update`` several times a second.
"""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from collections.abc import Set
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpc_train.console import one_line, say, tolerating_closed_stderr
from hpc_train.errors import shortened
from hpc_train.paths import RunPaths
from hpc_train.report.metrics_reader import MetricsReader, Row, in_words, main_metric, metric_value, number
from hpc_train.run.files import read_json
from hpc_train.run.find import run_name
from hpc_train.run.run_status import RunStatus, read_status

if TYPE_CHECKING:
    from rich.progress import BarColumn
    from rich.progress import Progress as RichProgress

READ_EVERY_S = 0.25
LINE_EVERY_S = 10.0
#: The rate is averaged over this many seconds.
_WINDOW_S = 15.0
#: Waits for data are shown above this share of a step.
_MIN_WAIT = 0.1


#: Width of the bar, minimum width of bar and name on a narrow terminal, and rich's column padding.
_BAR, _LEAST_BAR, _LEAST_NAME, _GAP = 24, 6, 12, " "


@dataclass(frozen=True)
class ProgressText:
    """The text beside the step count; each part may be empty."""

    rate: str = ""
    left: str = ""
    loss: str = ""
    #: All metrics of the last evaluation; and the judged one alone, if those don't fit.
    validation: str = ""
    judged: str = ""
    #: If training waits for data for more than a tenth of its time.
    wait: str = ""
    #: The run's activity if it is not training.
    activity: str = ""

    def all(self) -> str:
        """Return all parts; ``judged`` is within ``validation``."""
        return self.joined({self.activity, self.rate, self.left, self.loss, self.validation, self.wait})

    def joined(self, parts: Set[str]) -> str:
        """Return these parts in display order."""
        order = (
            self.activity, self.rate, self.left, self.loss, self.validation, self.judged, self.wait,
        )  # fmt: skip
        return ", ".join(part for part in dict.fromkeys(order) if part and part in parts)


class Progress:
    """Follows one attempt of one run; only rows of that attempt are shown."""

    def __init__(self, paths: RunPaths, attempt: int) -> None:
        self._paths = paths
        self._attempt = attempt
        self._metrics = MetricsReader(paths.metrics)
        self._pace = _Pace()
        self._loss = self._validation = self._judged = self._wait = ""
        #: Step and time of the evaluations shown: a rollback replaces the file, and its rows are read again.
        self._noted: set[tuple[float | None, float | None]] = set()
        self._has_notices = False
        self._read_at = float("-inf")
        is_live = sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
        self._display = _Bar(run_name(paths)) if is_live else _Lines(run_name(paths))

    def update(self) -> None:
        """Read the files if enough time has passed, and show changes."""
        now = time.monotonic()
        if now - self._read_at < READ_EVERY_S:
            return
        self._read_at = now
        with suppress(OSError):  # retried at the next update
            self._look(now)

    def _look(self, now: float) -> None:
        self._read_metrics()
        status = read_status(self._paths)
        if status.attempt != self._attempt or status.state != "running":
            return
        self._show_notices()
        self._pace.add(now, status.step)
        rate, left = self._pace.words(status)
        parts = (rate, left, self._loss, self._validation, self._judged, self._wait, status.activity)
        self._display.show(status, ProgressText(*map(one_line, parts)))

    def _show_notices(self) -> None:
        """Show, once, the lines that rank 0 wrote before it reported that it is running."""
        if self._has_notices:
            return
        content = read_json(self._paths.attempt(self._attempt).notices) or {}
        lines = content.get("lines")
        self._has_notices = lines is not None
        for line in lines if isinstance(lines, list) else []:
            say(f"{run_name(self._paths)}: {line}")

    def close(self) -> None:
        """Show the last rows and restore the terminal."""
        with suppress(OSError):
            self._show_notices()
            self._read_metrics()
        self._display.close()

    def _read_metrics(self) -> None:
        for row in self._metrics.new_rows():
            if row.get("attempt") != self._attempt:
                continue
            if row.get("split") == "val":
                self._validation, self._judged = f"val {in_words(row)}", _judged(row)
                evaluation = number(row.get("step")), number(row.get("time"))
                if evaluation not in self._noted:
                    self._noted.add(evaluation)
                    self._display.note(f"step {row.get('step')}: {self._validation}")
            elif (loss := metric_value(row, "loss")) is not None:
                self._loss = f"loss {loss:.4g}"
                self._wait = _wait(row)


def _judged(row: Row) -> str:
    name = main_metric(row)
    return f"val {in_words({name: row[name]})}" if name else ""


def _wait(row: Row) -> str:
    """Return the share of the steps in which training waited for data; empty if it is small or unknown."""
    wait_s, step_s = number(row.get("data_wait_s")), number(row.get("step_s"))
    if wait_s is None or not step_s or not wait_s / step_s > _MIN_WAIT:
        return ""
    return f"data wait {wait_s / step_s:.0%}"


class _Pace:
    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque()

    def add(self, time_s: float, step: int) -> None:
        if self._seen and step < self._seen[-1][1]:
            self._seen.clear()  # rolled back
        self._seen.append((time_s, step))
        while time_s - self._seen[0][0] > _WINDOW_S:
            self._seen.popleft()

    def steps_per_s(self) -> float:
        (start_s, first), (end_s, last) = self._seen[0], self._seen[-1]
        return (last - first) / (end_s - start_s) if end_s > start_s else 0.0

    def words(self, status: RunStatus) -> tuple[str, str]:
        """Return the rate and the remaining time; empty if unknown."""
        rate = self.steps_per_s()
        if rate == 0:
            return "", ""
        if status.total_steps is None:
            return f"{rate:.3g} steps/s", ""
        return f"{rate:.3g} steps/s", f"{duration((status.total_steps - status.step) / rate)} left"


def duration(seconds: float) -> str:
    """Return ``1:02:03`` or ``2:03``."""
    minutes, secs = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{secs:02}" if hours else f"{minutes}:{secs:02}"


class _Lines:
    def __init__(self, name: str) -> None:
        self._name = name
        self._said_at = time.monotonic()

    def show(self, now: RunStatus, text: ProgressText) -> None:
        if time.monotonic() - self._said_at >= LINE_EVERY_S:
            total = "" if now.total_steps is None else f"/{now.total_steps}"
            self.note(now.activity or f"step {now.step}{total} {text.all()}".rstrip())

    def note(self, line: str) -> None:
        say(f"{self._name}: {line}")
        self._said_at = time.monotonic()

    def close(self) -> None:
        pass


class _Bar:
    """rich's bar on stderr; other output appears above it."""

    def __init__(self, name: str) -> None:
        self._name = one_line(name)
        self._rich, self._column = _rich_progress()
        self._task = self._rich.add_task(self._name, total=None, words="starting", steps="")
        with tolerating_closed_stderr():
            self._rich.start()

    def show(self, now: RunStatus, text: ProgressText) -> None:
        steps = str(now.step) if now.total_steps is None else f"{now.step}/{now.total_steps}"
        name, bar, rest = fit(self._rich.console.width, self._name, steps, text)
        self._column.bar_width = bar
        with tolerating_closed_stderr():
            self._rich.update(
                self._task,
                description=name,
                completed=now.step,
                total=now.total_steps,
                words=rest,
                steps=steps,
                refresh=True,
            )

    def note(self, line: str) -> None:
        pass  # the bar always shows the newest evaluation

    def close(self) -> None:
        with tolerating_closed_stderr():
            self._rich.stop()


def fit(width: int, name: str, steps: str, text: ProgressText) -> tuple[str, int, str]:
    """Return the name, the bar's width and the text that fit one line of ``width`` characters.

    The step count, the remaining time and the loss are kept; the name and the bar shrink first, then the
    rate, the wait for data and the validation are dropped; the judged metric is dropped last.
    """
    kept_parts = {text.activity, text.left, text.loss}
    room = width - 1 - len(steps) - 3 * len(_GAP)
    for choice in ((text.validation, text.judged), (text.wait,), (text.rate,)):
        longer = (kept_parts | {part} for part in choice if part)
        fitting = (parts for parts in longer if len(text.joined(parts)) <= room - _LEAST_NAME - _LEAST_BAR)
        kept_parts = next(fitting, kept_parts)
    shown = text.joined(kept_parts)
    room -= len(shown)
    name_width = max(0, min(len(name), max(_LEAST_NAME, room - _BAR)))
    bar = max(0, min(_BAR, room - name_width))
    return shortened(name, name_width), bar, shown


def _rich_progress() -> tuple[RichProgress, BarColumn]:
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn
    from rich.progress import Progress as RichProgress

    def text(field: str) -> TextColumn:
        return TextColumn(f"{{task.{field}}}", markup=False)

    column = BarColumn(bar_width=_BAR)
    progress = RichProgress(
        text("description"),
        column,
        text("fields[steps]"),
        text("fields[words]"),
        console=Console(stderr=True),
        transient=True,  # the final message takes the place of the bar
        auto_refresh=False,  # no thread besides that of the signal handlers
        redirect_stdout=False,
    )
    return progress, column
