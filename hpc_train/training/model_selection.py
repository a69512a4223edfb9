"""Decisions after an evaluation: ``checkpoint.best`` and ``early_stopping``.

Every rank has a ``ModelSelection``; rank 0 decides by the rows of metrics and broadcasts the decision.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from hpc_train.errors import BadFileError
from hpc_train.experiment.config.schema import Experiment
from hpc_train.paths import RunPaths
from hpc_train.run.best import BEST, EMA_METRIC, BestSoFar, shown_after
from hpc_train.run.checkpoints import committed
from hpc_train.run.early_stopping import MedianRule, stop_reason
from hpc_train.run.file_shapes import encoded
from hpc_train.run.metric_rows import POSITION, Row
from hpc_train.training.datasets.base import DataSource
from hpc_train.training.distributed.consensus import Agreement

#: Bits of rank 0's decision.
_IMPROVED, _STOPPED = 1, 2


@dataclass
class ModelSelection:
    """The best evaluation so far, and the state of early stopping; the same on all ranks."""

    config: Experiment
    agreement: Agreement
    #: Each is None if the file has no such section; on ranks other than 0 it receives no rows.
    best: BestSoFar | None = None
    stopping: BestSoFar | None = None
    #: The best evaluation that ``status`` shows: one of the two or, without both, by the main metric.
    shown: BestSoFar | None = None
    #: On rank 0, for ``median_after``.
    median: MedianRule | None = None
    #: Why the run ends at the current step, if it does. On rank 0.
    reason: str | None = field(default=None, init=False)
    #: ``early_stopping`` ends the run at the current step.
    has_stopped: bool = False
    #: The step of the best evaluation, if this attempt evaluated it.
    improved_at: int | None = field(default=None, init=False)

    @classmethod
    def of(
        cls,
        config: Experiment,
        agreement: Agreement,
        rows: Iterable[Row],
        paths: RunPaths | None = None,
        optional: Iterable[str] = (),
    ) -> ModelSelection:
        """Return the state after ``rows``, the rows of all evaluations up to the current step.

        Collective. Ranks other than 0 pass no rows and no ``paths``. ``optional``: as in ``evaluated``.
        """
        best, stopping = config.checkpoint.best, config.early_stopping
        selection, step = cls(config, agreement), 0
        if best is not None:
            selection.best = BestSoFar(best.metric, best.mode)
        if stopping is not None:
            selection.stopping = BestSoFar(stopping.metric, stopping.mode, stopping.min_delta)
            selection.median = None if paths is None else MedianRule(paths, stopping)
        selection.shown = selection.best or selection.stopping
        # A metric that was added at a resume has no checkpoints of better evaluations before it.
        saved = None if paths is None else {checkpoint.step for checkpoint in committed(paths)}
        for row in rows:
            step = row["step"]
            if not selection._is_on:
                selection._show(step, {name: row[name] for name in row if name not in POSITION})
            if selection.best is not None and (saved is None or step in saved):
                selection.best.add_row(row)
            # As ``evaluated`` counted it; other rows without the metric are of an earlier task.
            if (followed := selection.stopping) is not None and (
                followed.metric in row or followed.metric.removeprefix(EMA_METRIC) in optional
            ):
                followed.add(step, row.get(followed.metric))
        selection.has_stopped = bool(selection._agreed(selection._stops(step) * _STOPPED))
        return selection

    @property
    def _is_on(self) -> bool:
        return self.best is not None or self.stopping is not None

    def saves(self, step: int) -> bool:
        """Return True if the checkpoint of ``step``, which has been evaluated, must be saved."""
        return self.has_stopped or self.improved_at == step

    def evaluated(self, step: int, metrics: Mapping[str, float], optional: Iterable[str] = ()) -> None:
        """Add the metrics of an evaluation. Collective. ``optional``: metrics that only some evaluations
        have.

        Raises BadFileError, on all ranks, if a metric of the file is in neither.
        """
        if not self._is_on:
            self._show(step, metrics)
            return
        check_metrics(self.config, {*metrics, *optional})
        is_best = self.best is not None and self.best.add(step, metrics.get(self.best.metric))
        if self.stopping is not None:
            self.stopping.add(step, metrics.get(self.stopping.metric))
        decision = self._agreed(is_best * _IMPROVED + self._stops(step) * _STOPPED)
        self.has_stopped = bool(decision & _STOPPED)
        if decision & _IMPROVED:
            self.improved_at = step

    def _show(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Add an evaluation of a run whose file names no metric."""
        self.shown = shown_after(self.shown, step, metrics)

    def shown_best(self) -> dict[str, Any] | None:
        """Return the best evaluation for ``status.json``, with ``mode``."""
        return None if self.shown is None else self.shown.to_json()

    def extra(self) -> dict[str, Any]:
        """Return the entry for a checkpoint; only rank 0's is used."""
        best = None if self.best is None else self.best.best
        return {} if best is None else {BEST: encoded(best)}

    def _stops(self, step: int) -> bool:
        """Return True if the run ends after the evaluation of ``step``. Only rank 0's result is used."""
        config = self.config.early_stopping
        if config is None or self.stopping is None:
            return False
        self.reason = stop_reason(config, self.stopping, self.median, step)
        return self.reason is not None

    def _agreed(self, decision: int) -> int:
        return self.agreement.rank_0_says(decision) if self._is_on else 0


def check_metrics(config: Experiment, metrics: Iterable[str]) -> None:
    """Raise BadFileError if the file names a metric that is not in ``metrics``, the evaluations' metrics."""
    names = set(metrics)
    if config.optimization.ema is not None:
        names |= {f"ema_{name}" for name in names}
    for key, name in _metrics_of(config).items():
        if name not in names:
            raise BadFileError(
                f"{key}: {name} is not a metric of this run's evaluations; write one of "
                f"{', '.join(sorted(names))}"
            )


def refuse_no_evaluations(config: Experiment, source: DataSource) -> None:
    """Raise BadFileError if the file names a metric of evaluations but there are no validation data."""
    key = next(iter(_metrics_of(config)), None)
    if key is not None and source.val is None:
        raise BadFileError(
            f"{key}: {config.data.name} has no validation data to evaluate; add some, or take the section out"
        )


def _metrics_of(config: Experiment) -> dict[str, str]:
    sections = {"checkpoint.best": config.checkpoint.best, "early_stopping": config.early_stopping}
    return {f"{key}.metric": section.metric for key, section in sections.items() if section is not None}
