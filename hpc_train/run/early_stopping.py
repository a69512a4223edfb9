"""When ``early_stopping`` ends a run: called after each evaluation, on rank 0, by trainer and session.

``median_after`` is a variant of the median stopping rule of Golovin et al., "Google Vizier: A Service for
Black-Box Optimization", KDD 2017, section 3.2.2: the best value is compared with best values instead of
averages.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

from hpc_train.paths import RunPaths
from hpc_train.run.best import BestSoFar
from hpc_train.run.metric_rows import evaluation_rows
from hpc_train.run.run_facts import extensions

if TYPE_CHECKING:  # a program need not wait for pydantic
    from hpc_train.experiment.config.schema import EarlyStoppingConfig

#: With fewer runs the median means little.
MIN_RUNS = 3
#: More runs cost time at each evaluation and hardly change the median.
MAX_RUNS = 100


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
        if best is not None and not _is_worse(best.value, median, self.config.mode):
            return None
        reached = "none" if best is None else f"{best.value:.6g}"
        return (
            f"stopped early: best {self.config.metric} by step {step}: {reached}; "
            f"median of {len(others)} other runs: {median:.6g}"
        )

    def _others(self, step: int) -> Iterator[float]:
        """Yield the best value by ``step`` of up to ``MAX_RUNS`` other runs that have reached it."""
        folders = sorted(
            self.paths.siblings.folder.iterdir()
        )  # names are hashes: the first are as good as any
        others = (
            RunPaths(folder)
            for folder in folders
            if folder.name[0] != "." and folder.name != self.paths.folder.name
        )
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


def _is_worse(value: float, than: float, mode: str) -> bool:
    return value > than if mode == "min" else value < than
