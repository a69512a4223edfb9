"""Where the time between two rows of metrics goes, as this rank's host sees it.

``training.meters`` owns one; the loop tells it what it waits for. The device is never waited for: it may run
behind, but over the steps of a row not by more than its queue, so means over a row are those of the device.
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
    """Mean times per step since the row before."""

    def __init__(
        self,
        global_batch_size: int,
        sequence_length: int | None = None,
        rates: Callable[[float], Row] | None = None,
    ) -> None:
        """``sequence_length``: tokens per sample, None where samples are not sequences.

        ``rates``: what else a row says, by the samples per second of all ranks (``training.flops``).
        """
        self._rates = rates
        self._global_batch_size = global_batch_size
        self._sequence_length = sequence_length
        #: Since the row before.
        self.data_wait_s = 0.0
        self._paused_s = 0.0
        self._annotation: Callable[[], AbstractContextManager[object]] = nullcontext
        #: Step and time of the row before, whose numbers later ones are counted from.
        self._last: tuple[int, float] | None = None

    def reading(self, steps: Iterable[T]) -> Iterator[T]:
        """Yield what ``steps`` yields; the time that each takes to arrive is a wait for data."""
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
        """From now on wait for data inside ``annotation()``, for a profiler; None: inside nothing."""
        self._annotation = annotation or nullcontext

    @contextmanager
    def waiting_for_data(self) -> Iterator[None]:
        """Count what happens inside as a wait for data."""
        began = time.monotonic()
        try:
            with self._annotation():
                yield
        finally:
            self.data_wait_s += time.monotonic() - began

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude what happens inside, such as an evaluation, from the times of steps."""
        began = time.monotonic()
        try:
            yield
        finally:
            self._paused_s += time.monotonic() - began

    def row(self, step: int) -> Row:
        """Return the means since the last call, which was at an earlier step; none at the first call.

        ``step_s`` and its part ``data_wait_s`` are seconds per step; ``samples_per_s`` and, of sequences,
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
    """Where the time of an attempt's first step goes, as this rank's host sees it."""

    def __init__(self, times: StepTimes, compilation: Compilation) -> None:
        self._times, self._compilation = times, compilation
        self._began = self._data_s = self._compiled_s = 0.0

    def begin(self) -> None:
        """Called once the step's data are there."""
        self._data_s, self._compiled_s = self._times.data_wait_s, self._compilation.seconds
        self._began = time.monotonic()

    def parts(self) -> dict[str, float]:
        """Return the seconds, and the number of graphs compiled, of which caches had the code of some."""
        compile_s = self._compilation.seconds - self._compiled_s
        found = {
            "data_s": self._data_s,
            "compile_s": compile_s,
            "run_s": time.monotonic() - self._began - compile_s,
        }
        return {key: round(value, 3) for key, value in found.items()} | self._compilation.counts()


def _rounded(value: float) -> float:
    return float(f"{value:.6g}")
