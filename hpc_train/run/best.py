"""The best evaluation of a run and the number of evaluations since, computed from evaluation rows alone.

Ranks follow the rows while they train, and again when they resume, so a resumed run has the same best
evaluation and stops at the same step. A checkpoint's manifest names the best evaluation up to its step.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from hpc_train.run.file_shapes import Count, encoded
from hpc_train.run.metric_rows import Row

#: Key of a checkpoint's ``extra`` and of its manifest.
BEST = "best"
#: Prefix of the metrics of EMA weights.
EMA_METRIC = "ema_"
#: Default metrics: the first one that an evaluation or a run has. Evaluations of detectors have no loss.
PREFERRED = ("accuracy", "map", "loss")
#: Metrics for which lower is better, such as ``step_s`` and ``val/loss``; for all others, such as
#: ``samples_per_s``, higher is.
_LESS_IS_BETTER = re.compile(
    r"(^|[_/.-])(loss|error|err|perplexity|ppl|mse|rmse|mae|mape|nll|bpb|bits_per_byte|cross_entropy|wer|cer"
    r"|fid|memory|time)($|[_/.-])|(?<!per)_s($|[_/.-])"
)


@dataclass(frozen=True)
class Best:
    """A metric's best value over the evaluations so far, and the step that was evaluated."""

    metric: str
    value: float
    step: Count

    @property
    def is_of_ema(self) -> bool:
        """Whether the EMA weights were evaluated."""
        return self.metric.startswith(EMA_METRIC)

    def __str__(self) -> str:
        return f"{self.metric} {self.value:.6g} at step {self.step}"


@dataclass
class BestSoFar:
    """Follows one metric over the evaluations, in the order of their steps.

    An evaluation is the new best if it is better than the best by more than ``min_delta``. A NaN or infinite
    value is never the best.
    """

    metric: str
    mode: Literal["min", "max"]
    min_delta: float = 0.0
    best: Best | None = None
    #: Evaluations since the best one.
    num_worse: int = 0
    num_evaluations: int = 0

    def add_row(self, row: Row) -> None:
        """Add the row of an evaluation; a row without the metric changes nothing."""
        if self.metric in row:
            self.add(row["step"], row[self.metric])

    def add(self, step: int, value: object) -> bool:
        """Add an evaluation; return whether it is the best so far."""
        number = _finite(value)
        self.num_evaluations += 1
        sign = -1 if self.mode == "min" else 1
        if number is not None and (self.best is None or sign * (number - self.best.value) > self.min_delta):
            self.best, self.num_worse = Best(self.metric, number, step), 0
            return True
        self.num_worse += 1
        return False

    def to_json(self) -> dict[str, Any] | None:
        """Return the best evaluation for ``status.json``, with ``mode``; None before the first."""
        return None if self.best is None else encoded(self.best) | {"mode": self.mode}


def shown_after(shown: BestSoFar | None, step: int, metrics: Mapping[str, Any]) -> BestSoFar | None:
    """Add an evaluation to the best value that ``status`` shows of a run whose file names no metric."""
    if shown is None and (name := default_metric(metrics)):
        shown = BestSoFar(name, goal_of(name))
    if shown is not None:
        shown.add(step, metrics.get(shown.metric))
    return shown


def goal_of(metric: str) -> Literal["min", "max"]:
    """Return whether lower or higher values are better, by the metric's name."""
    is_overlap = metric.removeprefix(EMA_METRIC).startswith("iou_")  # a class may be called time
    return "min" if _LESS_IS_BETTER.search(metric) and not is_overlap else "max"


def default_metric(metrics: Collection[str]) -> str | None:
    """Return the metric of comparisons if the file names none: one of ``PREFERRED``, or a task's first."""
    return next((name for name in PREFERRED if name in metrics), next(iter(metrics), None))


def _finite(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:
        return None
