"""The time and cost of a run by measured times."""

from __future__ import annotations

import pytest

from hpc_train.experiment.config.schema import CheckpointConfig
from hpc_train.experiment.plan.duration import (
    MeasuredRun,
    Steps,
    StepWork,
    count_attempts,
    count_saves,
    fitted,
    given,
    predicted,
)
from hpc_train.experiment.topology.degrees import Ranks

_ONCE = Steps(100, 1, CheckpointConfig(every_steps=1000))


def run(samples: int, step_s: float, *, ranks: int = 1, name: str = "a", **times: float) -> MeasuredRun:
    return MeasuredRun(name, StepWork(samples // 8, 8, ranks), step_s, **times)


def test_one_size_is_scaled_by_the_samples_of_a_rank() -> None:
    found = fitted([run(32, 0.4)], StepWork(8, 8, 1))
    assert found is not None and found.of(StepWork(8, 8, 1)) == pytest.approx(0.8)
    assert found.of(StepWork(2, 16, 1)) == pytest.approx(0.4), "fewer, larger micro-batches"


def test_two_sizes_give_the_fixed_part() -> None:
    found = fitted([run(32, 0.5), run(64, 0.9, name="b")], StepWork(16, 8, 1))
    assert found is not None
    assert found.fixed_s == pytest.approx(0.1) and found.of(StepWork(16, 8, 1)) == pytest.approx(1.7)
    assert {each.name for each in found.runs} == {"a", "b"}


def test_noise_that_makes_no_sense_is_no_line() -> None:
    found = fitted([run(32, 0.9), run(64, 0.5, name="b")], StepWork(8, 8, 1))
    assert found is not None and found.fixed_s == 0.0
    assert found.of(StepWork(8, 8, 1)) == pytest.approx(0.5), "the nearest size"


def test_runs_of_the_nearest_number_of_ranks_count() -> None:
    runs = [run(32, 0.4, ranks=2), run(32, 4.0, ranks=64, name="b")]
    found = fitted(runs, StepWork(4, 8, 4))
    assert found is not None and [each.name for each in found.runs] == ["a"]
    assert fitted([], StepWork(4, 8, 4)) is None


def test_evaluations_saves_and_starts_are_those_of_the_measured_run() -> None:
    step_time = fitted([run(32, 0.1, ranks=2, evaluation_s=4.0, save_s=1.0, start_s=20.0, stop_s=2.0)],
                       StepWork(4, 8, 4))  # fmt: skip
    assert step_time is not None
    steps = Steps(100, 3, CheckpointConfig(every_steps=50))
    found = predicted(StepWork(4, 8, 4), steps, step_time, Ranks(gpus=8, cores=64))
    # 10 s of steps, evaluations on twice the ranks, saves at steps 50 and 100, one start and end.
    assert found.duration_s == pytest.approx(10 + 3 * 2 + 2 * 1 + 20 + 2)
    assert found.gpu_hours == pytest.approx(8 * 40 / 3600)
    assert found.core_hours == pytest.approx(64 * 40 / 3600)


def test_each_attempt_starts_again() -> None:
    step_time = fitted([run(32, 1.0, start_s=10.0, stop_s=5.0)], StepWork(4, 8, 1))
    assert step_time is not None
    found = predicted(StepWork(4, 8, 1), _ONCE, step_time, Ranks(gpus=1, attempt_s=35.0))
    assert found.attempts == 4, "25 useful seconds of each"
    assert found.duration_s == pytest.approx(100 + 4 * 15)
    assert count_attempts(100, 40, 35) is None, "never reaches its first step"
    assert count_attempts(100, 40, None) == 1


def test_a_given_throughput_is_that_of_a_rank() -> None:
    found = predicted(StepWork(4, 8, 16), _ONCE, given(320.0), Ranks())
    assert (found.duration_s, found.gpu_hours, found.runs) == (pytest.approx(10.0), None, ())


@pytest.mark.parametrize(
    ("checkpoint", "steps", "seconds", "count"),
    [({"every_steps": 50}, 100, 1e6, 2), ({"every_steps": 30}, 100, 1.0, 4), ({}, 100, 1300.0, 3),
     ({"every_min": 5}, 100, 601.0, 3), ({"every_steps": 20, "keep_every": 30}, 100, 1.0, 7),
     ({"keep_every": 25}, 100, 1.0, 4), ({"every_steps": 1000, "every_min": 5}, 100, 601.0, 3)],
)  # fmt: skip
def test_saves_are_counted(checkpoint: dict[str, int], steps: int, seconds: float, count: int) -> None:
    assert count_saves(CheckpointConfig.model_validate(checkpoint), steps, seconds) == count
