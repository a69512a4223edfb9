"""``profile:`` of the file: a trace of some steps of rank 0, and a table of their bottlenecks.

``build`` creates the profiler on rank 0, and the loop calls it after each step. The trace is for
chrome://tracing or https://ui.perfetto.dev.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.profiler_util import DeviceType  # type: ignore[attr-defined]  # private elsewhere
from torch.profiler import ProfilerActivity, profile, record_function

from hpc_train.experiment.config.training_sections import ProfileConfig
from hpc_train.paths import AttemptPaths
from hpc_train.training.distributed.timed_call import TimedCall
from hpc_train.training.step_times import StepTimes

_log = logging.getLogger(__name__)

_WAIT = "wait for data"
#: Prefixes of communication events: NCCL's kernels and gloo's operations; c10d's events only start them.
_COMMUNICATION = ("nccl", "gloo:")
_STARTS_COMMUNICATION = ("c10d::", "nccl:")
_MEANING = {
    "input": "waiting for the next batch",
    "device": "computing",
    "network": "communication during which nothing is computed",
    "host": "Python and launches of kernels, while the device is idle",
}
_REMEDY = {
    "input": "raise data.workers, or simplify data.augment",
    "device": "use precision: bf16, compile, or more ranks",
    "network": "use a larger micro_batch_size, gradient accumulation, or fewer nodes",
    "host": "use compile, or a larger micro_batch_size",
}
#: For ranks on the CPU, where bf16 and compiled code are slower than fp32 (docs/performance.md, whole runs).
_CPU_REMEDY = _REMEDY | {"device": "use more ranks", "host": "use a larger micro_batch_size"}
_TABLE_ROWS = 15
#: Assumed: at the end of an attempt the device has finished, or hangs in a collective with a lost peer.
_SYNCHRONIZE_LIMIT_S = 5.0
Interval = tuple[float, float]


@dataclass(frozen=True)
class Shares:
    """The steps' time by category, in seconds; overlapping time counts for the first of its categories."""

    input: float
    device: float
    network: float
    host: float

    @classmethod
    def of(
        cls, total_s: float, waits: list[Interval], computing: list[Interval], sending: list[Interval]
    ) -> Shares:
        """``total_s``: time of the steps. Intervals are in seconds of one clock and may overlap."""
        input_s = union_length(waits)
        device_s = union_length(waits + computing) - input_s
        network_s = union_length(waits + computing + sending) - input_s - device_s
        host_s = max(0.0, total_s - input_s - device_s - network_s)
        return cls(input_s, device_s, network_s, host_s)

    @property
    def limit(self) -> str:
        """Return the name of the largest share."""
        return max(_MEANING, key=lambda name: getattr(self, name))

    def table(self, num_steps: int, device_type: str) -> str:
        """Return lines with milliseconds per step and percentages, and a remedy."""
        total_s = sum(getattr(self, name) for name in _MEANING)
        steps = "1 step" if num_steps == 1 else f"{num_steps} steps"
        lines = [f"{steps} of rank 0, {1000 * total_s / num_steps:.2f} ms each"]
        for name, meaning in _MEANING.items():
            part_s = getattr(self, name)
            per_cent = 100 * part_s / total_s if total_s else 0.0
            lines.append(f"  {name:8} {1000 * part_s / num_steps:9.2f} ms {per_cent:4.0f} %  {meaning}")
        remedies = _CPU_REMEDY if device_type == "cpu" else _REMEDY
        return "\n".join([*lines, f"limited by: {self.limit}; to go faster {remedies[self.limit]}"])


class StepProfiler:
    """Profiles the steps that ``config`` names, once per attempt. On rank 0 only."""

    def __init__(
        self, config: ProfileConfig, paths: AttemptPaths, device: torch.device, times: StepTimes
    ) -> None:
        self._config = config
        #: Steps before the profile.
        self.after_steps = config.after_steps
        self._paths = paths
        self._device = device
        self._times = times
        self._steps_done = 0
        self._began_at = 0.0
        self._profile: profile | None = None
        self.has_begun = False
        if config.after_steps == 0:  # in a replay
            self._begin()

    def step_done(self) -> None:
        """Called after each step: starts or ends the profile at its first or last step."""
        self._steps_done += 1
        if self._steps_done == self._config.after_steps:
            self._begin()
        elif self._steps_done == self._config.after_steps + self._config.steps:
            _synchronize(self._device)
            self._end()

    def close(self) -> None:
        """Write the profile, perhaps of fewer steps; nothing without any, or if the device hangs in them."""
        if self._profile is None:
            return
        finish = TimedCall[None]("profile")
        finish.do(lambda: _synchronize(self._device), _SYNCHRONIZE_LIMIT_S)
        if finish.is_under_way:
            self._times.annotate_waits(None)
            _log.warning("%s does not finish its steps: they have no profile", self._device)
        else:
            self._end()

    def _end(self) -> None:
        running, self._profile = self._profile, None
        assert running is not None
        total_s = time.perf_counter() - self._began_at
        running.stop()
        self._times.annotate_waits(None)
        num_steps = self._steps_done - self._config.after_steps
        if num_steps:
            self._write(running, total_s, num_steps)

    def _begin(self) -> None:
        self.has_begun = True
        is_cuda = self._device.type == "cuda"
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if is_cuda else [])]
        _synchronize(self._device)
        # Without acc_events torch 2.11 warns that events of earlier cycles are lost; there is only one cycle.
        self._profile = profile(activities=activities, acc_events=True)
        self._profile.start()
        self._times.annotate_waits(lambda: record_function(_WAIT))
        self._began_at = time.perf_counter()

    def _write(self, finished: profile, total_s: float, num_steps: int) -> None:
        shares = shares_of(finished.events() or (), total_s, self._device)
        by = f"self_{self._device.type}_time_total"
        operations = finished.key_averages().table(sort_by=by, row_limit=_TABLE_ROWS)
        table = shares.table(num_steps, self._device.type)
        try:
            finished.export_chrome_trace(str(self._paths.profile_trace))
            self._paths.profile_table.write_text(f"{table}\n\n{operations}\n", encoding="utf-8")
        except (OSError, RuntimeError) as error:
            _log.warning("the profile can't be written (%s); training continues", error)
        print(f"{table}\ntrace: {self._paths.profile_trace}", flush=True)


def shares_of(events: Iterable[Any], total_s: float, device: torch.device) -> Shares:
    """Split ``total_s`` seconds into shares. ``events``: from ``torch.profiler``, on ``device``."""
    listed = list(events)
    waits = [_interval(event) for event in listed if event.name == _WAIT]
    sending = [_interval(event) for event in listed if event.name.startswith(_COMMUNICATION)]
    kind = DeviceType.CUDA if device.type == "cuda" else DeviceType.CPU
    computing = [_interval(event) for event in listed if event.device_type == kind and _computes(event)]
    return Shares.of(total_s, waits, computing, sending)


def _computes(event: Any) -> bool:
    if event.is_user_annotation or event.name == _WAIT:
        return False
    # The time of nested operations is included in the outer ones.
    parent = event.cpu_parent if event.device_type == DeviceType.CPU else None
    is_outer = parent is None or parent.is_user_annotation or parent.name == _WAIT
    return is_outer and not event.name.startswith((*_COMMUNICATION, *_STARTS_COMMUNICATION))


def _interval(event: Any) -> Interval:
    return event.time_range.start / 1e6, event.time_range.end / 1e6


def union_length(intervals: Sequence[Interval]) -> float:
    """Return the length of the union of intervals."""
    total, end = 0.0, float("-inf")
    for begin, until in sorted(intervals):
        total += max(0.0, until - max(begin, end))
        end = max(end, until)
    return total


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
