from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import pytest

from hpc_train.config.training_sections import CompileConfig
from hpc_train.training.compiling import Compilation
from hpc_train.training.step_times import FirstStep, StepTimes


class Clock:
    """A clock that stands still until a test moves it."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr("hpc_train.training.step_times.time.monotonic", found)
    return found


def slow_data(clock: Clock, wait_s: float) -> Iterator[int]:
    for step in range(4):
        clock.now_s += wait_s
        yield step


def test_a_step_contains_its_wait_for_data_and_no_pause(clock: Clock) -> None:
    times = StepTimes(global_batch_size=8)
    assert times.row(0) == {}
    for _ in times.reading(slow_data(clock, wait_s=0.5)):
        clock.now_s += 1.5
    with times.paused():
        clock.now_s += 60
    assert times.row(4) == {"step_s": 2.0, "data_wait_s": 0.5, "samples_per_s": 4.0}


def test_a_wait_between_steps_counts_for_the_next_row_only(clock: Clock) -> None:
    times = StepTimes(global_batch_size=8)
    times.row(0)
    with times.waiting_for_data():
        clock.now_s += 3
    clock.now_s += 1
    assert times.row(2)["data_wait_s"] == 1.5
    clock.now_s += 4
    assert times.row(4) == {"step_s": 2.0, "data_wait_s": 0.0, "samples_per_s": 4.0}


def test_what_happened_before_an_attempts_first_row_is_not_counted(clock: Clock) -> None:
    times = StepTimes(global_batch_size=8)
    with times.paused(), times.waiting_for_data():
        clock.now_s += 60
    assert times.row(7) == {}
    clock.now_s += 2
    assert times.row(9) == {"step_s": 1.0, "data_wait_s": 0.0, "samples_per_s": 8.0}


def test_tokens_are_counted_for_sequences(clock: Clock) -> None:
    times = StepTimes(global_batch_size=8, sequence_length=128)
    times.row(0)
    clock.now_s += 1
    assert times.row(2)["tokens_per_s"] == 8 * 128 * 2


def test_a_clock_that_does_not_advance_is_no_error(clock: Clock) -> None:
    times = StepTimes(global_batch_size=8)
    times.row(0)
    assert times.row(1)["step_s"] > 0


def test_other_rates_follow_the_samples_per_second(clock: Clock) -> None:
    times = StepTimes(global_batch_size=8, rates=lambda samples_per_s: {"tflops_per_s": samples_per_s / 4})
    assert times.row(0) == {}
    clock.now_s += 1
    assert times.row(1)["tflops_per_s"] == 2.0


def test_the_first_step_is_split_into_data_compilation_and_the_rest(clock: Clock) -> None:
    times, compilation = StepTimes(global_batch_size=8), Compilation(lambda graph, seconds: None)
    batch, calls = cast(Any, "the first micro-batch"), list[Any]()
    first = FirstStep(times, compilation, CompileConfig(), calls.append, calls.append)
    compilation.seconds = 5.0  # in an evaluation before it
    for _ in times.reading(slow_data(clock, wait_s=0.5)):
        first.begin(batch)
        clock.now_s += 12.0
        compilation.seconds += 9.0
        break
    first.end()
    parts = {"data_s": 0.5, "compile_s": 9.0, "run_s": 3.0, "graphs": 0, "cached_graphs": 0}
    assert calls == [batch, parts] and first.is_over
