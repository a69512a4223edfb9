"""Predicted time and cost of a run: arithmetic on measured times, without reading files.

A step takes ``fixed_s`` + ``per_sample_s`` × the samples of one rank: its ⌈M/R⌉ micro-batches, whose time is
proportional to their size. With measured runs of one size, the fixed part is assumed to be zero, which is
exact for that size and predicts too much for larger steps; runs of two sizes give both parts. ``plan`` shows
it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hpc_train.experiment.config.schema import CheckpointConfig
from hpc_train.experiment.topology.batch_arithmetic import minutes_between_saves
from hpc_train.experiment.topology.degrees import Ranks


@dataclass(frozen=True)
class StepWork:
    """The work of one rank in a step."""

    #: Forward passes of one rank, ⌈M/R⌉.
    slots: int
    micro_batch_size: int
    #: Ranks, or groups of ranks with one copy of the model, that share a step.
    data_ranks: int

    @property
    def samples(self) -> int:
        """Samples of one rank per step."""
        return self.slots * self.micro_batch_size


@dataclass(frozen=True)
class MeasuredRun:
    """Times of a run's newest attempt, in seconds."""

    name: str
    work: StepWork
    step_s: float
    #: One evaluation of all validation data.
    evaluation_s: float = 0.0
    #: Time that training waits per checkpoint.
    save_s: float = 0.0
    #: From the start of an attempt to its first step, and from its last step to its end.
    start_s: float = 0.0
    stop_s: float = 0.0


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step as a function of one rank's samples, and the measured runs behind it."""

    fixed_s: float
    per_sample_s: float
    runs: tuple[MeasuredRun, ...] = ()

    def of(self, work: StepWork) -> float:
        """Return the seconds of a step."""
        return self.fixed_s + self.per_sample_s * work.samples


@dataclass(frozen=True)
class Steps:
    """Numbers of steps and evaluations of a run, and its checkpoint settings."""

    total: int
    evaluations: int
    checkpoint: CheckpointConfig


@dataclass(frozen=True)
class Prediction:
    """Predicted time of a run. ``attempts``: None if an attempt has too little time to train at all."""

    step_s: float
    duration_s: float
    attempts: int | None
    gpu_hours: float | None
    core_hours: float | None
    #: The measured runs; empty if the user specified the throughput.
    runs: tuple[str, ...]


def fitted(runs: Sequence[MeasuredRun], work: StepWork) -> StepTime | None:
    """Return the time of a step, from the most similar runs; None without any.

    These are the runs with the nearest number of ranks, on which communication depends. Runs of two sizes
    among them determine the fixed part.
    """
    if not runs:
        return None
    distances = {run.name: abs(math.log(run.work.data_ranks / work.data_ranks)) for run in runs}
    nearest = min(distances.values())
    similar = [run for run in runs if distances[run.name] == nearest]
    times: dict[int, list[MeasuredRun]] = {}
    for run in similar:
        times.setdefault(run.work.samples, []).append(run)
    if len(times) > 1 and (line := _line(times)) is not None:
        return line
    samples = min(times, key=lambda number: abs(math.log(number / work.samples)))
    return StepTime(0.0, _median(times[samples]) / samples, tuple(times[samples]))


def _line(times: dict[int, list[MeasuredRun]]) -> StepTime | None:
    """Return the line fitted through the sizes; None if noise makes it implausible."""
    sizes = sorted(times)
    line = statistics.linear_regression(sizes, [_median(times[size]) for size in sizes])
    if line.slope <= 0 or line.intercept < 0:
        return None
    return StepTime(line.intercept, line.slope, tuple(times[size][0] for size in sizes))


def _median(runs: Iterable[MeasuredRun]) -> float:
    return statistics.median(run.step_s for run in runs)


def given(samples_per_s: float) -> StepTime:
    """Return the time of a step if each rank processes this many samples per second."""
    return StepTime(0.0, 1 / samples_per_s)


def predicted(work: StepWork, steps: Steps, step_time: StepTime, size: Ranks) -> Prediction:
    """Return the run's predicted time, with the evaluations, saves and starts of the measured runs."""
    step_s, runs = step_time.of(work), step_time.runs
    training_s = steps.total * step_s
    evaluation_s = _mean([run.evaluation_s * run.work.data_ranks / work.data_ranks for run in runs])
    busy_s = training_s + steps.evaluations * evaluation_s
    busy_s += count_saves(steps.checkpoint, steps.total, training_s) * _mean([run.save_s for run in runs])
    start_s, stop_s = (_mean([getattr(run, key) for run in runs]) for key in ("start_s", "stop_s"))
    attempts = count_attempts(busy_s, start_s, size.attempt_s)
    duration_s = busy_s + (attempts or 1) * (start_s + stop_s)
    gpu_hours = None if size.gpus is None else duration_s / 3600 * size.gpus
    core_hours = None if size.cores is None else duration_s / 3600 * size.cores
    names = tuple(run.name for run in runs)
    return Prediction(step_s, duration_s, attempts, gpu_hours, core_hours, names)


def count_attempts(busy_s: float, start_s: float, attempt_s: float | None) -> int | None:
    """Return the number of attempts of ``attempt_s`` seconds for this work; None if they never finish it."""
    if attempt_s is None:
        return 1
    useful_s = attempt_s - start_s
    return max(1, math.ceil(busy_s / useful_s)) if useful_s > 0 else None


def count_saves(checkpoint: CheckpointConfig, num_steps: int, training_s: float) -> int:
    """Return the number of checkpoints of an attempt with this many steps, including the last one."""
    count = 1
    by_steps = [every for every in (checkpoint.every_steps, checkpoint.keep_every) if every is not None]
    for every in by_steps:
        count += max(0, num_steps - 1) // every
    if len(by_steps) == 2:  # saved once
        count -= max(0, num_steps - 1) // math.lcm(*by_steps)
    minutes = minutes_between_saves(checkpoint)
    return count + (int(training_s // (minutes * 60)) if minutes else 0)


def _mean(values: Sequence[float]) -> float:
    return statistics.fmean(values) if values else 0.0
