"""The progress of a step: reported to the watchdog, and how far the host may run ahead of the device.

The host runs ahead to the end of the micro-batch before the last one.

Training waits for the device nowhere else, so the host would fill the device's launch queue. A launch into a
full queue blocks, and compiled code does so without releasing the GIL: a device that hangs would also block
the watchdog, and progress would be the host's.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

import torch

from hpc_train.training.datasets.types import Batch
from hpc_train.training.health.progress import Progress
from hpc_train.training.step_times import ForwardTime

#: A waiting host yields its core for this long, then sleeps for this long at a time (assumed).
_YIELDING_S, _PAUSE_S = 0.2e-3, 0.2e-3
#: Interval at which a waiting host checks that the other ranks are alive (assumed).
_CHECK_EVERY_S = 0.1


class Event(Protocol):
    """A place in the device's queue, such as ``torch.cuda.Event``."""

    def record(self) -> None:
        """Move the event to the current end of the queue."""

    def query(self) -> bool:
        """Return True if the device has reached the event."""


class RunAhead:
    """Every rank calls ``begin`` at the same places. Costs a few microseconds if the host is behind."""

    def __init__(
        self,
        progress: Progress,
        check_peers: Callable[[], None],
        make_event: Callable[[], Event] = torch.cuda.Event,
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


class StepProgress:
    """Reports the forward passes of a step to the watchdog, times the first, and bounds the run-ahead."""

    def __init__(
        self, progress: Progress, forward_time: ForwardTime, run_ahead: RunAhead | None = None
    ) -> None:
        """``run_ahead``: None on the CPU, since the host computes."""
        #: ``first step``, then ``training``.
        self.phase = "first step"
        self.run_ahead = run_ahead
        self._progress, self._forward_time = progress, forward_time
        #: Counts the step's forward passes, the same number on every rank, including a rehearsal.
        self._slot = 0

    def begin_step(self, step: int) -> None:
        """Called before a step."""
        self._slot = 0
        if self.run_ahead is not None:
            self.run_ahead.begin(step)
        self._progress.at(self.phase, step)

    def begin_forward(self, batch: Batch) -> None:
        """Called before the forward pass of a micro-batch."""
        self._slot += 1
        if self.run_ahead is not None and self._slot > 1:
            self.run_ahead.begin(batch.step, self._slot)
        self._progress.at(self.phase, batch.step, part=self._slot)
        if self._slot == 1:
            self._forward_time.begin()

    def end_forward(self) -> None:
        """Called after it."""
        if self._slot == 1:
            self._forward_time.end()
