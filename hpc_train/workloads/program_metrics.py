"""The metrics of a program: rows of ``metrics.jsonl`` from its output or from a file that it writes."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

from hpc_train.errors import shortened
from hpc_train.experiment.config.schema import Program
from hpc_train.loggers.metrics_writer import LoggerThread, MetricsWriter, call_all, start_loggers
from hpc_train.paths import RunPaths
from hpc_train.run import metric_rows
from hpc_train.run.best import BestSoFar, default_metric, goal_of

#: A longer line is not searched.
_MAX_LINE_BYTES = 1 << 16
#: A progress bar ends its lines with a carriage return.
_LINE_END = re.compile(rb"[\r\n]")
_MAX_STEP = 2**53
_SYNC_S = 30.0
#: Columns of a row that the program does not set.
_OWN_COLUMNS = {"time", "attempt", "split"}
#: Prefix of the names of validation metrics.
_VAL = ("val_", "val/", "eval_", "validation_")


class ProgramMetrics:
    """Reads the rows of one attempt: from ``session``, and from the source that the file names. Rank 0 only.

    They go to ``metrics.jsonl`` and the file's loggers. The first row of an attempt withdraws earlier
    attempts' rows from its step on, unless ``session`` tells the step from which it resumes. A row whose step
    is not beyond the newest one of its split, or behind that of another split, is dropped.
    """

    def __init__(self, job: Program, paths: RunPaths, attempt: int, folder: Path) -> None:
        self._job, self._paths, self._attempt = job, paths, attempt
        config = job.program.metrics
        regex, jsonl = (config.regex, config.jsonl) if config else (None, None)
        self._pattern = None if regex is None else re.compile(regex)
        #: Whether the program's output passes through this process.
        self.reads_output = regex is not None
        #: File → the offset of the first line that was not read.
        self._session = paths.attempt(attempt).session(0)
        self._sources = {self._session: 0}
        if jsonl is not None:  # its lines of earlier attempts are rows already
            self._sources[folder / jsonl] = _size(folder / jsonl)
        self._loggers: list[LoggerThread] = []
        self._writer: MetricsWriter | None = None
        self._best: BestSoFar | None = None
        #: Why ``early_stopping`` has ended the run.
        self.end_reason: str | None = None
        self._synced_at = time.monotonic()
        self._newest: dict[str, int] = {}
        #: The step from which ``session`` has resumed.
        self._resumed_step = -1
        self._has_dropped = self._has_text = False
        #: Of all rows and messages; None before the first.
        self.newest_at: float | None = None
        #: The number of steps in all, if the program tells it.
        self.total_steps: int | None = None
        self._progress = 0
        self._thread: threading.Thread | None = None
        #: Of the thread.
        self._error: Exception | None = None
        self._lock = threading.Lock()

    @property
    def step(self) -> int:
        """The newest step of this attempt; 0 before the first row."""
        return max([self._progress, *self._newest.values()])

    @property
    def best(self) -> dict[str, Any] | None:
        """The best evaluation, for ``status.json``; None before the first of this attempt."""
        return None if self._best is None else self._best.to_json()

    def start_loggers(self) -> None:
        """Start the file's loggers, each in a thread of its own."""
        self._loggers = start_loggers(self._job, self._paths, self._attempt)

    @property
    def is_short(self) -> bool:
        """Whether the program has shown fewer steps than it announced."""
        return self.total_steps is not None and self.step < self.total_steps

    def read_output(self, child: subprocess.Popen[bytes]) -> None:
        """Copy the program's output to this process's, and search it, in a thread."""
        if child.stdout is not None:
            output = cast("io.BufferedReader", child.stdout)
            self._thread = threading.Thread(target=self._copy, args=(output,), daemon=True)
            self._thread.start()

    def poll(self) -> None:
        """Read new lines of the files. Raises the error that a row of the output has met."""
        if self._error is not None:
            raise self._error
        for path in self._sources:
            self._read_file(path)
        with self._lock:
            if self._writer is not None and time.monotonic() - self._synced_at > _SYNC_S:
                self._sync(self._writer)

    def _sync(self, writer: MetricsWriter) -> None:
        """Sync the rows to disk. Until then they are in memory, too."""
        self._synced_at = time.monotonic()
        writer.metrics.sync()

    def finish(self) -> None:
        """Read the rest, after the program's end."""
        if self._thread is not None:
            self._thread.join(10)  # a process that it left behind may hold the pipe
        self.poll()
        with self._lock:
            if self._writer is not None:
                self._sync(self._writer)

    def close(self, state: str) -> None:
        """End the loggers; ``state``: how the attempt has ended. A run that has completed keeps all rows."""
        with self._lock:
            last = max((row["step"] for row in metric_rows.iter_rows(self._paths.metrics)), default=None)
            if state == "completed" and self._best is None:
                self._print_unread()
            if state == "completed" and last is not None:
                (self._writer or self._open(last)).committed(last)
            if self._writer is not None:
                self._writer.state = state
                self._writer.close()
            else:
                call_all(self._loggers, lambda logger: logger.close(state), is_last=True)

    def _print_unread(self) -> None:
        """Print which sections of the file had no effect, because there was no evaluation."""
        sections = {"checkpoint.best": self._job.checkpoint.best, "early_stopping": self._job.early_stopping}
        if names := ", ".join(name for name, section in sections.items() if section):
            print(f"hpc-train: {names} had no effect: the script has not called session.metric", flush=True)

    def _copy(self, output: io.BufferedReader) -> None:
        """Copy the output to its end, whatever fails, since the program would wait for a reader."""
        rest, is_too_long = b"", False
        while block := output.read1(_MAX_LINE_BYTES):
            with suppress(OSError):  # a full disk, of which the program's own writes tell
                sys.stdout.buffer.write(block)
                sys.stdout.buffer.flush()
            *lines, rest = _LINE_END.split(rest + block)
            for line in lines:
                if not is_too_long:
                    self._search(line)
                is_too_long = False
            if len(rest) > _MAX_LINE_BYTES:
                rest, is_too_long = b"", True
        self._search(rest)

    def _search(self, line: bytes) -> None:
        assert self._pattern is not None
        try:
            if match := self._pattern.search(line.decode("utf-8", "replace")):
                self._print_text(match.groupdict())
                self._add(match.groupdict())
        except Exception as error:
            self._error = self._error or error

    def _print_text(self, groups: Mapping[str, str | None]) -> None:
        """Print once that a group of the regular expression has matched something else than a number."""
        for name, text in groups.items():
            is_text = text is not None and name not in _OWN_COLUMNS and _number(text) is None
            if is_text and not self._has_text:
                self._has_text = True
                print(
                    f"hpc-train: program.metrics.regex: the group {name} has matched "
                    f"{shortened(text or '')!r}, which is not a number and not recorded; correct the "
                    "expression",
                    flush=True,
                )

    def _read_file(self, path: Path) -> None:
        try:
            with path.open("rb") as file:
                if _size(path) < self._sources[path]:  # the program began the file again
                    self._sources[path] = 0
                file.seek(self._sources[path])
                for line in file:
                    if not line.endswith(b"\n"):
                        break
                    self._sources[path] += len(line)
                    with suppress(ValueError, RecursionError):
                        row = json.loads(line)
                        if path == self._session:
                            self._receive(row)
                        elif isinstance(row, dict):
                            self._add(row)
        except OSError:
            return

    def _receive(self, message: list[Any]) -> None:
        """Handle a message of ``hpc_train.session``."""
        self.newest_at = time.monotonic()
        match message:
            case ["rows", rows]:
                with self._lock:
                    for at, step, split, metrics in rows:
                        self._append(split, step, metrics, at)
            case ["resumed", step] if self._writer is None:
                with self._lock:
                    self._resumed_step = step
                    self._open(step)
            case ["progress", step, total]:
                self._progress, self.total_steps = step, total
            case ["saved", step]:
                with self._lock:
                    if self._writer is not None:
                        self._sync(self._writer)
                        self._writer.committed(step)
            case ["finished", _, reason]:
                self.end_reason = reason

    def _add(self, row: Mapping[str, Any]) -> None:
        numbers = {name: _number(value) for name, value in row.items() if name not in _OWN_COLUMNS}
        values = {name: number for name, number in numbers.items() if number is not None}
        step = values.pop("step", None)
        if step is None or not 0 <= step < _MAX_STEP:
            return
        by_split: dict[str, dict[str, float]] = {}
        for name, value in values.items():
            prefix = next((prefix for prefix in _VAL if name.startswith(prefix)), "")
            by_split.setdefault("val" if prefix else "train", {})[name.removeprefix(prefix)] = value
        if row.get("split") == "val" and by_split:
            by_split = {"val": by_split.get("train", {}) | by_split.get("val", {})}
        with self._lock:
            for split, metrics in by_split.items():
                self._append(split, int(step), metrics, time.time())

    def _append(self, split: str, step: int, metrics: Mapping[str, float], at: float) -> None:
        self.newest_at = time.monotonic()
        writer = self._writer or self._open(step - 1)
        newest = max(self._newest.values(), default=self._resumed_step)
        if step <= self._newest.get(split, -1) or step < newest or writer.metrics.has(split, step):
            self._print_dropped(split, step)
            return
        self._newest[split] = step
        row = {"split": split, "step": step, "attempt": self._attempt, "time": at, **metrics}
        writer.write(row)
        self._follow(row)

    def _print_dropped(self, split: str, step: int) -> None:
        """Print once that a row is dropped: rows are in the order of their steps, one per step and split."""
        if not self._has_dropped:
            self._has_dropped = True
            newest = max(self._newest.values(), default=self._resumed_step)
            print(
                f"hpc-train: a {split} row of step {step} is dropped, since there are rows up to step "
                f"{newest}; write all values of a step at once, and count the steps of the whole training",
                flush=True,
            )

    def _open(self, resumed_step: int) -> MetricsWriter:
        self._writer = MetricsWriter(
            metric_rows.MetricsFile(self._paths.metrics, resumed_step), self._loggers, None
        )
        self._writer.begin(resumed_step)
        for row in metric_rows.evaluation_rows(self._paths.metrics):
            self._follow(row)
        return self._writer

    def _follow(self, row: metric_rows.Row) -> None:
        """Follow the best evaluation by the metric that the file names, or by the first one of a row."""
        if row["split"] != "val":
            return
        if self._best is None:
            chosen = self._job.checkpoint.best or self._job.early_stopping
            name = (
                chosen.metric
                if chosen
                else default_metric([key for key in row if key not in metric_rows.POSITION])
            )
            if name is None:
                return
            self._best = BestSoFar(name, chosen.mode if chosen else goal_of(name))
        self._best.add_row(row)


def recover_rows(job: Program, paths: RunPaths, attempt: int, folder: Path) -> None:
    """Record rows of ``session`` that the supervisor of an earlier attempt had not read when it was killed.

    A checkpoint may contain their steps, so that no resume repeats them. All messages of that attempt are
    read again. Nothing is done with ``program.metrics``, whose rows have no other copy.
    """
    numbers = [earlier.number for earlier in paths.attempt_folders() if earlier.number < attempt]
    if not numbers or job.program.metrics is not None:
        return
    before, last = max(numbers), None
    for line in metric_rows.lines_of(paths.attempt(before).session(0)):
        if line.startswith(b'["rows", ') and line.endswith(b"\n"):
            last = line
    recorded = metric_rows.newest_row(paths.metrics)
    if last is None:
        return
    _, step, *_ = json.loads(last)[1][-1]
    if recorded is None or (recorded.get("attempt", 0), recorded["step"]) < (before, step):
        metrics = ProgramMetrics(job, paths, before, folder)
        metrics.finish()
        metrics.close("failed")


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        return float(value)
    except (ValueError, OverflowError):
        return None


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
