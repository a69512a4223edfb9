"""Reports of the adapters to the session: one row per step and split, and the progress."""

from __future__ import annotations

import time
from collections.abc import Mapping
from numbers import Real
from typing import Any

from hpc_train import session

#: Not metrics: the row's own step and split, and a number that follows from the step.
_NO_METRICS = ("step", "split", "epoch")
_PROGRESS_S = 1.0


class Reports:
    """Joins the metrics that a library logs for one step, at several places, to one row."""

    def __init__(self) -> None:
        self._step = 0
        self._metrics: dict[str, Any] = {}
        #: Metrics of the step that have been sent: Lightning logs those of a checkpoint once more after it.
        self._sent = set[str]()
        self._shown_at = float("-inf")

    def add(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Add the numbers among ``metrics`` to the row of ``step``; a new step sends the previous row."""
        if step != self._step:
            self.send()
            self._sent.clear()
        self._step = step
        self._metrics |= {
            name: float(value)
            for name, value in metrics.items()
            if _is_number(value) and name not in _NO_METRICS and name not in self._sent
        }

    def send(self) -> None:
        """Send the row, if there is one. Call it before a checkpoint and at the end."""
        if self._metrics:
            session.log(self._step, **self._metrics)
        self._sent |= self._metrics.keys()
        self._metrics = {}

    def progress(self, step: int, total: float) -> None:
        """Show the progress, at most once per second; nothing if ``total`` is infinite or negative."""
        at = time.monotonic()
        if 0 < total < float("inf") and (step >= total or at - self._shown_at >= _PROGRESS_S):
            self._shown_at = at
            session.progress(step, int(total))


def _is_number(value: Any) -> bool:
    """Return True for numbers and for tensors without dimensions."""
    return isinstance(value, Real) or getattr(value, "ndim", None) == 0


def say_stop(step: int) -> None:
    """Tell in the log why the script ends now."""
    if session._session.rank == 0:
        print(f"hpc-train: saved step {step}; the script ends here and is to be started again", flush=True)
