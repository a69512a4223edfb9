"""The time between two rows of metrics by category, measured on this rank's host.

``training.meters`` owns one; the loop reports its waits. It never waits for the device, which may run behind,
but by no more than its queue over the steps of a row, so means over a row are the device's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TypeVar

from hpc_train.loggers.base import Row
from hpc_train.training.compiling import Compilation

T = TypeVar("T")


class StepTimes:
    """Mean times per step since the previous row."""

    def __init__(
        self,
        global_batch_size: int,
        sequence_length: int | None = None,
        rates: Callable[[float], Row] | None = None,
    ) -> None:
        """``sequence_length``: tokens per sample, None if samples are not sequences.

        ``rates``: samples per second of all ranks → further columns of a row (``training.flops``).
        """
        self._rates = rates
        self._global_batch_size = global_batch_size
        self._sequence_length = sequence_length
        #: Since the previous row.
        self.data_wait_s = 0.0
        self._paused_s = 0.0
        self._annotation: Callable[[], AbstractContextManager[object]] = nullcontext
        #: Step and time of the previous row.
        self._last: tuple[int, float] | None = None

    def reading(self, steps: Iterable[T]) -> Iterator[T]:
        """Yield from ``steps``; the time until each item arrives counts as a wait for data."""
        iterator = iter(steps)
        while True:
            began = time.monotonic()
            try:
                with self._annotation():
                    step = next(iterator)
            except StopIteration:
                return
            self.data_wait_s += time.monotonic() - began
            yield step

    def annotate_waits(self, annotation: Callable[[], AbstractContextManager[object]] | None) -> None:
        """From now on wait for data inside ``annotation()``, for a profiler; None: without a context."""
        self._annotation = annotation or nullcontext

    @contextmanager
    def waiting_for_data(self) -> Iterator[None]:
        """Count the time inside this context as a wait for data."""
        began = time.monotonic()
        try:
            with self._annotation():
                yield
        finally:
            self.data_wait_s += time.monotonic() - began

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude the time inside this context, such as an evaluation, from the times of steps."""
        began = time.monotonic()
        try:
            yield
        finally:
            self._paused_s += time.monotonic() - began

    def row(self, step: int) -> Row:
        """Return the means since the last call, which was at an earlier step; none at the first call.

        ``step_s`` and its part ``data_wait_s`` are seconds per step; ``samples_per_s`` and, for sequences,
        ``tokens_per_s`` are over all ranks.
        """
        now = time.monotonic()
        before, self._last = self._last, (step, now)
        data_wait_s, self.data_wait_s = self.data_wait_s, 0.0
        paused_s, self._paused_s = self._paused_s, 0.0
        if before is None:
            return {}
        num_steps = step - before[0]
        step_s = max(now - before[1] - paused_s, 1e-9) / num_steps
        samples_per_s = self._global_batch_size / step_s
        found: Row = {
            "step_s": _rounded(step_s),
            "data_wait_s": _rounded(data_wait_s / num_steps),
            "samples_per_s": _rounded(samples_per_s),
        }
        if self._sequence_length is not None:
            found["tokens_per_s"] = _rounded(samples_per_s * self._sequence_length)
        return found if self._rates is None else found | self._rates(samples_per_s)


class FirstStep:
    """The time of an attempt's first step by category, measured on this rank's host."""

    def __init__(self, times: StepTimes, compilation: Compilation) -> None:
        self._times, self._compilation = times, compilation
        self._began = self._data_s = self._compiled_s = 0.0

    def begin(self) -> None:
        """Called once the step's data have arrived."""
        self._data_s, self._compiled_s = self._times.data_wait_s, self._compilation.seconds
        self._began = time.monotonic()

    def parts(self) -> dict[str, float]:
        """Return the seconds, and the number of graphs compiled and of those read from caches."""
        compile_s = self._compilation.seconds - self._compiled_s
        found = {
            "data_s": self._data_s,
            "compile_s": compile_s,
            "run_s": time.monotonic() - self._began - compile_s,
        }
        return {key: round(value, 3) for key, value in found.items()} | self._compilation.counts()


def _rounded(value: float) -> float:
    return float(f"{value:.6g}")
