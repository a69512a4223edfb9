"""The metrics of a program: rows of ``metrics.jsonl`` from its output or from a file that it writes."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from hpc_train.experiment.config.program_section import MetricsConfig
from hpc_train.paths import RunPaths
from hpc_train.run.metric_rows import MetricsFile

#: A longer line is not searched.
_MAX_LINE_BYTES = 1 << 16
_MAX_STEP = 2**53
#: Prefix of the names of validation metrics.
_VAL = ("val_", "val/", "eval_", "validation_")


class ProgramMetrics:
    """Reads the rows of one attempt: from ``session``, and from the source that the file names. Rank 0 only.

    The first row of an attempt withdraws earlier attempts' rows from its step on. A row whose step is not
    beyond the newest one of its split is dropped.
    """

    def __init__(self, config: MetricsConfig | None, paths: RunPaths, attempt: int, folder: Path) -> None:
        self._paths, self._attempt = paths, attempt
        regex, jsonl = (config.regex, config.jsonl) if config else (None, None)
        self._pattern = None if regex is None else re.compile(regex)
        #: File → the offset of the first line that was not read.
        self._sources = {paths.attempt(attempt).session(0): 0}
        if jsonl is not None:  # its lines of earlier attempts are rows already
            self._sources[folder / jsonl] = _size(folder / jsonl)
        self._file: MetricsFile | None = None
        self._newest: dict[str, int] = {}
        #: Of all rows and messages; None before the first.
        self.newest_at: float | None = None
        #: The number of steps in all, if the program tells it.
        self.total_steps: int | None = None
        self._progress = 0
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    @property
    def reads_output(self) -> bool:
        """Whether the program's output passes through this process."""
        return self._pattern is not None

    @property
    def step(self) -> int:
        """The newest step of this attempt; 0 before the first row."""
        return max([self._progress, *self._newest.values()])

    def read_output(self, child: subprocess.Popen[bytes]) -> None:
        """Copy the program's output to this process's, and search it, in a thread."""
        if child.stdout is not None:
            self._thread = threading.Thread(target=self._copy, args=(child.stdout,), daemon=True)
            self._thread.start()

    def poll(self) -> None:
        """Read new lines of the files."""
        for path in self._sources:
            self._read_file(path)

    def finish(self) -> None:
        """Read the rest, after the program's end."""
        if self._thread is not None:
            self._thread.join(10)  # a process that it left behind may hold the pipe
        self.poll()
        with self._lock:
            if self._file is not None:
                self._file.sync()
                self._file.close()

    def _copy(self, output: Iterable[bytes]) -> None:
        assert self._pattern is not None
        for line in output:
            sys.stdout.buffer.write(line)
            sys.stdout.buffer.flush()
            if len(line) > _MAX_LINE_BYTES:
                continue
            if match := self._pattern.search(line.decode("utf-8", "replace")):
                self._add(match.groupdict())

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
                    with suppress(ValueError):
                        row = json.loads(line)
                        if isinstance(row, dict):
                            self._add(row)
        except OSError:
            return

    def _add(self, row: Mapping[str, Any]) -> None:
        values = {name: number for name, value in row.items() if (number := _number(value)) is not None}
        if "total" in values and "progress" in values:
            self.total_steps, self._progress = int(values["total"]), int(values["progress"])
            self.newest_at = time.monotonic()
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
                self._append(split, int(step), metrics)

    def _append(self, split: str, step: int, metrics: Mapping[str, float]) -> None:
        self.newest_at = time.monotonic()
        if step <= self._newest.get(split, -1):
            return
        if self._file is None:
            self._file = MetricsFile(self._paths.metrics, step - 1)
        self._newest[split] = step
        # JSON has no NaN and infinity.
        values = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        self._file.append(
            {"split": split, "step": step, "attempt": self._attempt, "time": time.time(), **values}
        )


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
