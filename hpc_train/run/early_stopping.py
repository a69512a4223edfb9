"""When ``early_stopping`` ends a run, for trainer and session; and what else a program's evaluations decide.

``median_after`` is a variant of the median stopping rule of Golovin et al., "Google Vizier: A Service for
Black-Box Optimization", KDD 2017, section 3.2.2: the best value is compared with best values instead of
averages.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

from hpc_train.paths import RunPaths
from hpc_train.run.best import BEST, Best, BestSoFar
from hpc_train.run.file_shapes import decoded, encoded
from hpc_train.run.metric_rows import evaluation_rows
from hpc_train.run.run_status import extensions

if TYPE_CHECKING:  # a program need not wait for pydantic
    from hpc_train.experiment.config.schema import EarlyStoppingConfig

#: With fewer runs the median means little.
MIN_RUNS = 3
#: More runs cost time at each evaluation and hardly change the median.
MAX_RUNS = 100
#: Settings of a ``Selection`` → their keys in the file.
_KEYS = {"best": "checkpoint.best", "early_stopping": "early_stopping"}


def stop_reason(
    config: EarlyStoppingConfig, so_far: BestSoFar, median: MedianRule | None, step: int
) -> str | None:
    """Return why the run ends after the evaluation of ``step``; None if it continues."""
    if config.patience is not None and so_far.num_worse >= config.patience:
        best = f" ({so_far.best})" if so_far.best else ""
        return f"stopped early: no better {config.metric} in {config.patience} evaluations{best}"
    return None if median is None else median.reason(so_far, step)


@dataclass(frozen=True)
class MedianRule:
    """Compares a run with the other runs in its experiment's folder. On rank 0."""

    paths: RunPaths
    config: EarlyStoppingConfig

    def reason(self, so_far: BestSoFar, step: int) -> str | None:
        """Return why the run ends after the evaluation of ``step``; None if it continues."""
        after = self.config.median_after
        if after is None or so_far.num_evaluations < after:
            return None
        try:
            others = list(self._others(step))
        except OSError:  # the next evaluation tries again
            return None
        if len(others) < MIN_RUNS:
            return None
        median, best = statistics.median(others), so_far.best
        sign = 1 if self.config.mode == "min" else -1
        if best is not None and sign * best.value <= sign * median:
            return None
        reached = "none" if best is None else f"{best.value:.6g}"
        return (
            f"stopped early: best {self.config.metric} by step {step}: {reached}; "
            f"median of {len(others)} other runs: {median:.6g}"
        )

    def _others(self, step: int) -> Iterator[float]:
        folders = self.paths.siblings.folder.iterdir()
        names = {folder.name for folder in folders if folder.name[0] != "."} - {self.paths.folder.name}
        # Names are hashes: the first are as good as any.
        others = (RunPaths(self.paths.siblings.folder / name) for name in sorted(names))
        # The rows of an extended run are also in the run that extends it.
        values = (self._best_by(step, paths) for paths in others if not extensions(paths))
        yield from islice((value for value in values if value is not None), MAX_RUNS)

    def _best_by(self, step: int, paths: RunPaths) -> float | None:
        so_far, has_reached = BestSoFar(self.config.metric, self.config.mode, self.config.min_delta), False
        with suppress(OSError):  # not this run's problem
            for row in evaluation_rows(paths.metrics):
                if row["step"] <= step:
                    so_far.add_row(row)
                has_reached |= row["step"] >= step
        return so_far.best.value if has_reached and so_far.best is not None else None


class Selection:
    """Follows the metrics that the file names. ``settings``: its sections ``best`` and ``early_stopping``."""

    def __init__(self, settings: Mapping[str, Any], run: Path | None) -> None:
        self._settings = {key: settings[key] for key in _KEYS if settings.get(key)}
        self._followed = {
            key: BestSoFar(section["metric"], section["mode"], section.get("min_delta", 0.0))
            for key, section in self._settings.items()
        }
        stopping = self._settings.get("early_stopping")
        # With the fields of the class, which takes pydantic to import.
        self._stopping = cast("EarlyStoppingConfig | None", stopping and SimpleNamespace(**stopping))
        self._median = MedianRule(RunPaths(run), self._stopping) if run and self._stopping else None
        #: Why the run ends early; None if it continues.
        self.reason: str | None = None

    def add(self, step: int, metrics: Mapping[str, float]) -> tuple[bool, bool]:
        """Add an evaluation; return whether its checkpoint is the best, and whether it is the last."""
        is_best = False
        for key, followed in self._followed.items():
            if followed.metric not in metrics:
                names = ", ".join(metrics) or "none"
                message = f"{followed.metric} is not among the values of session.metric: {names}"
                raise ValueError(f"{_KEYS[key]}.metric: {message}")
            if followed.add(step, float(metrics[followed.metric])):
                is_best |= key == "best"
        if self._stopping is not None:
            so_far = self._followed["early_stopping"]
            self.reason = stop_reason(self._stopping, so_far, self._median, step)
        return is_best, self.reason is not None

    def state(self) -> dict[str, Any]:
        """Return the entries for a checkpoint's ``state.json``."""
        if not self._settings:
            return {}
        best = self._followed[BEST].best if BEST in self._followed else None
        followed = {key: encoded(so_far) for key, so_far in self._followed.items()}
        selection = {"settings": self._settings, "followed": followed, "reason": self.reason}
        return {"selection": selection} | ({} if best is None else {BEST: encoded(best)})

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue as of a checkpoint, except for sections whose metric or mode has changed since."""
        before = state.get("selection") or {}
        for key, followed in self._followed.items():
            saved = before.get("followed", {}).get(key) or {}
            if (saved.get("metric"), saved.get("mode")) == (followed.metric, followed.mode):
                followed.best = decoded(Best, saved["best"])
                followed.num_worse, followed.num_evaluations = saved["num_worse"], saved["num_evaluations"]
        self.reason = None
        if self._stopping is None:
            return
        if before.get("settings", {}).get("early_stopping") == self._settings["early_stopping"]:
            self.reason = before["reason"]
        else:
            self.reason = stop_reason(self._stopping, self._followed["early_stopping"], None, 0)
