"""Finds ranks that are slower than the others, by the times gathered with each row of metrics.

In a step all ranks wait for the slowest, so their step times are equal. Two times differ: that of a forward
pass, in which ranks that don't share layers or parameters don't wait for each other, and the wait for data.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from statistics import median, median_low

import torch

#: A rank is slow if it exceeds the median of all ranks by this share of a forward pass, or if its wait for
#: data does so by this share of a step. Assumed.
_EXCESS = 0.1
#: It must do so in this share of the last rows, of a minimum number of rows, since single rows are noise.
_ROWS, _MIN_ROWS, _SHARE = 8, 4, 0.75


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
        self._forward.append([each / middle_s if middle_s > 0 else 1.0 for each in forward_s])
        self._waits.append([(each - wait_s) / step_s if step_s > 0 else 0.0 for each in data_wait_s])

    def slow(self) -> dict[str, dict[str, float]]:
        """Return rank → ``forward``, its time relative to the median, or ``data_wait``, the excess of its
        wait for data as a share of the step.
        """
        found: dict[str, dict[str, float]] = {}
        for name, rows, normal in (("forward", self._forward, 1.0), ("data_wait", self._waits, 0.0)):
            for rank, values in enumerate(zip(*rows, strict=True)):
                num_over = sum(value > normal + _EXCESS for value in values)
                if len(values) >= _MIN_ROWS and num_over >= _SHARE * len(values):
                    found.setdefault(str(rank), {})[name] = round(median(values), 2)
        return found
