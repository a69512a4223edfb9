"""The best ``session.metric`` so far, and early stopping, of a program; rank 0 adds the values."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

from hpc_train.paths import RunPaths
from hpc_train.run.best import BEST, Best, BestSoFar
from hpc_train.run.early_stopping import MedianRule, stop_reason
from hpc_train.run.file_shapes import decoded, encoded

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hpc_train.experiment.config.schema import EarlyStoppingConfig

_KEYS = {"best": "checkpoint.best", "early_stopping": "early_stopping"}


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
