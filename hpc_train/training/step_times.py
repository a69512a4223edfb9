"""Times of training: between two rows by category, of the first step, and of the forward passes of all ranks.

``training.meters`` owns a ``StepTimes``; the loop reports its waits. It never waits for the device, which may
run behind, but by no more than its queue over the steps of a row, so means over a row are the device's.

In a step all ranks wait for the slowest, so their step times are equal. Two times differ, by which
``Stragglers`` finds slow ranks: that of a forward pass, in which ranks that don't share layers or parameters
don't wait for each other, and the wait for data.

``StepProgress`` reports a step to the watchdog, and bounds how far the host may run ahead of the device: to
the end of the micro-batch before the last one. Training waits for the device nowhere else, so the host would
fill the device's launch queue. A launch into a full queue blocks, and compiled code does so without releasing
the GIL: a device that hangs would also block the watchdog, and progress would be the host's.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from statistics import median, median_low
from typing import TypeVar

import torch

from hpc_train.experiment.config.training_sections import CompileConfig
from hpc_train.loggers.base import Row
from hpc_train.training.compiling import Compilation, first_step
from hpc_train.training.datasets.types import Batch
from hpc_train.training.health.progress import Progress

T = TypeVar("T")
#: A rank is slow if it exceeds the median of all ranks by this share of a forward pass, or if its wait for
#: data does so by this share of a step. Assumed.
_EXCESS = 0.1
#: It must do so in this share of the last rows, of a minimum number of rows, since single rows are noise.
_ROWS, _MIN_ROWS, _SHARE = 8, 4, 0.75


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
        self._is_paused = False
        self._annotation: Callable[[], AbstractContextManager[object]] = nullcontext
        #: Step and time of the previous row.
        self._last: tuple[int, float] | None = None

    def reading(self, steps: Iterable[T]) -> Iterator[T]:
        """Yield from ``steps``; the time until each item arrives counts as a wait for data."""
        iterator = iter(steps)
        while True:
            began = time.monotonic()  # as ``waiting_for_data``, whose generator takes longer than the rest
            try:
                with self._annotation():
                    step = next(iterator)
            except StopIteration:
                return
            finally:
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
        """Exclude the time inside this context, such as an evaluation, from the times of steps.

        Nested contexts count once.
        """
        if self._is_paused:
            yield
            return
        began, self._is_paused = time.monotonic(), True
        try:
            yield
        finally:
            self._is_paused = False
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
        row: Row = {
            "step_s": _rounded(step_s),
            "data_wait_s": _rounded(data_wait_s / num_steps),
            "samples_per_s": _rounded(samples_per_s),
        }
        if self._sequence_length is not None:
            row["tokens_per_s"] = _rounded(samples_per_s * self._sequence_length)
        return row if self._rates is None else row | self._rates(samples_per_s)


@dataclass
class FirstStep:
    """The first step of an attempt, in which torch compiles, and its time by category on this rank's host."""

    times: StepTimes
    compilation: Compilation
    config: CompileConfig
    #: Receives the first micro-batch before its forward.
    on_batch: Callable[[Batch], None] = lambda batch: None
    #: Receives the ``parts``.
    on_end: Callable[[Mapping[str, float]], None] = lambda parts: None
    is_over: bool = False
    _began: float = 0.0
    _data_s: float = 0.0
    _compiled_s: float = 0.0

    def begin(self, batch: Batch) -> None:
        """Called once the step's data have arrived."""
        self.on_batch(batch)
        self._data_s, self._compiled_s = self.times.data_wait_s, self.compilation.seconds
        self._began = time.monotonic()

    def running(self) -> AbstractContextManager[None]:
        """Return the context of the first step."""
        return first_step(self.config)

    def end(self) -> None:
        """Called after the step."""
        self.is_over = True
        self.on_end(self.parts())

    def parts(self) -> dict[str, float]:
        """Return the seconds, and the number of graphs compiled and of those read from caches."""
        compile_s = self.compilation.seconds - self._compiled_s
        parts = {
            "data_s": self._data_s,
            "compile_s": compile_s,
            "run_s": time.monotonic() - self._began - compile_s,
        }
        return {key: round(value, 3) for key, value in parts.items()} | self.compilation.counts()


def _rounded(value: float) -> float:
    return float(f"{value:.6g}")


class ForwardTime:
    """Mean seconds of a step's first forward pass on this rank's device, without waiting for the device."""

    def __init__(self, device: torch.device) -> None:
        self._is_host = device.type != "cuda"
        self._sum_s, self._count, self._began = 0.0, 0, 0.0
        #: Start and end of forward passes that may still be running on the device, the oldest first.
        self._pending: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()

    def begin(self) -> None:
        """Called before the forward pass."""
        if self._is_host:
            self._began = time.perf_counter()
        else:
            self._pending.append((torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)))
            self._pending[-1][0].record()

    def end(self) -> None:
        """Called after the forward pass."""
        if self._is_host:
            self._add(time.perf_counter() - self._began)
        else:
            self._pending[-1][1].record()
            while self._pending and self._pending[0][1].query():
                begin, end = self._pending.popleft()
                self._add(begin.elapsed_time(end) / 1000)

    def _add(self, seconds: float) -> None:
        self._sum_s, self._count = self._sum_s + seconds, self._count + 1

    def take(self) -> float:
        """Return the mean since the last call, 0 if nothing was measured."""
        mean_s = self._sum_s / self._count if self._count else 0.0
        self._sum_s, self._count = 0.0, 0
        return mean_s


class Stragglers:
    """Rank 0's record of the last rows."""

    def __init__(self) -> None:
        self._forward: deque[list[float]] = deque(maxlen=_ROWS)
        self._waits: deque[list[float]] = deque(maxlen=_ROWS)

    def add(self, forward_s: Sequence[float], data_wait_s: Sequence[float], step_s: float) -> None:
        """Add a row's numbers by rank; ``step_s`` is the same for all ranks."""
        middle_s, wait_s = median_low(forward_s), median_low(data_wait_s)
        self._forward.append([seconds / middle_s if middle_s > 0 else 1.0 for seconds in forward_s])
        self._waits.append([(seconds - wait_s) / step_s if step_s > 0 else 0.0 for seconds in data_wait_s])

    def slow(self) -> dict[str, dict[str, float]]:
        """Return rank → ``forward``, its time relative to the median, or ``data_wait``, the excess of its
        wait for data as a share of the step.
        """
        slow: dict[str, dict[str, float]] = {}
        for name, rows, normal in (("forward", self._forward, 1.0), ("data_wait", self._waits, 0.0)):
            for rank, values in enumerate(zip(*rows, strict=True)):
                num_over = sum(value > normal + _EXCESS for value in values)
                if len(values) >= _MIN_ROWS and num_over >= _SHARE * len(values):
                    slow.setdefault(str(rank), {})[name] = round(median(values), 2)
        return slow


#: A waiting host yields its core for this long, then sleeps for this long at a time (assumed).
_YIELDING_S, _PAUSE_S = 0.2e-3, 0.2e-3
#: Interval at which a waiting host checks that the other ranks are alive (assumed).
_CHECK_EVERY_S = 0.1


class RunAhead:
    """Every rank calls ``begin`` at the same places. Costs a few microseconds if the host is behind."""

    def __init__(
        self,
        progress: Progress,
        check_peers: Callable[[], None],
        make_event: Callable[[], torch.cuda.Event] = torch.cuda.Event,
    ) -> None:
        """``check_peers`` raises PeerLostError if a rank has ended."""
        self._progress, self._check_peers = progress, check_peers
        self._event = make_event()
        #: Step and micro-batch: the one being enqueued, and the one whose end ``_event`` marks.
        self._current: tuple[int, int] | None = None
        self._marked: tuple[int, int] | None = None

    def begin(self, step: int, part: int = 1) -> None:
        """Before micro-batch ``part`` of ``step``, wait until the device has done the one before the last."""
        if self._marked is not None:
            self._progress.at("waiting for the device", *self._marked)
            self._wait()
        if self._current is not None:
            self._event.record()
        self._marked, self._current = self._current, (step, part)

    def _wait(self) -> None:
        began, check_at_s = time.monotonic(), _CHECK_EVERY_S
        while not self._event.query():
            waited_s = time.monotonic() - began
            if waited_s >= check_at_s:
                self._check_peers()
                check_at_s = waited_s + _CHECK_EVERY_S
            time.sleep(0 if waited_s < _YIELDING_S else _PAUSE_S)


@dataclass
class StepProgress:
    """Reports the forward passes of a step to the watchdog, times the first, and bounds the run-ahead."""

    progress: Progress
    forward_time: ForwardTime
    #: None on the CPU, since the host computes.
    run_ahead: RunAhead | None = None
    #: ``first step``, then ``training``.
    phase: str = "first step"
    #: Counts the step's forward passes, the same number on every rank, including a rehearsal.
    _slot: int = 0

    def begin_step(self, step: int) -> None:
        """Called before a step."""
        self._slot = 0
        if self.run_ahead is not None:
            self.run_ahead.begin(step)
        self.progress.at(self.phase, step)

    def begin_forward(self, batch: Batch) -> None:
        """Called before the forward pass of a micro-batch."""
        self._slot += 1
        if self.run_ahead is not None and self._slot > 1:
            self.run_ahead.begin(batch.step, self._slot)
        self.progress.at(self.phase, batch.step, part=self._slot)
        if self._slot == 1:
            self.forward_time.begin()

    def end_forward(self) -> None:
        """Called after it."""
        if self._slot == 1:
            self.forward_time.end()
