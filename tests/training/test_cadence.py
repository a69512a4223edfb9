"""Which steps are evaluated and saved."""

from __future__ import annotations

from typing import Any

import pytest

from hpc_train.config.schema import CheckpointConfig, EvaluationConfig
from hpc_train.topology.batch_arithmetic import DEFAULT_SAVE_EVERY_MIN
from hpc_train.training.loop import Cadence

STEPS_PER_EPOCH = 5
TOTAL_STEPS = 12


def cadence(evaluation: dict[str, Any] | None = None, checkpoint: dict[str, Any] | None = None) -> Cadence:
    return Cadence.of(
        EvaluationConfig(**evaluation or {}),
        CheckpointConfig(**checkpoint or {}),
        TOTAL_STEPS,
        STEPS_PER_EPOCH,
    )


@pytest.mark.parametrize(("evaluation", "steps"), [
    ({}, [5, 10, 12]),
    ({"every_epochs": 1}, [5, 10, 12]),
    ({"every_epochs": 2}, [10, 12]),
    ({"every_epochs": 9}, [12]),
    ({"every_steps": 4}, [4, 8, 12]),
    ({"every_steps": 7}, [7, 12]),
    ({"every_steps": 1}, list(range(1, 13))),
])  # fmt: skip
def test_evaluates_every_so_often_and_at_the_end(evaluation: dict[str, Any], steps: list[int]) -> None:
    found = cadence(evaluation)
    assert [step for step in range(TOTAL_STEPS + 1) if found.evaluates(step)] == steps


@pytest.mark.parametrize(("checkpoint", "steps", "every_s"), [
    ({}, [12], DEFAULT_SAVE_EVERY_MIN * 60),
    ({"every_min": 0.5}, [12], 30.0),
    ({"every_steps": 4}, [4, 8, 12], None),
    ({"every_steps": 5}, [5, 10, 12], None),
    ({"every_steps": 100}, [12], None),
])  # fmt: skip
def test_saves_by_steps_or_by_time_and_always_at_the_end(
    checkpoint: dict[str, Any], steps: list[int], every_s: float | None
) -> None:
    found = cadence(checkpoint=checkpoint)
    assert [step for step in range(1, TOTAL_STEPS + 1) if found.saves(step)] == steps
    assert found.save_every_s == every_s


def test_nothing_is_evaluated_before_the_first_step() -> None:
    assert not cadence({"every_steps": 1}).evaluates(0)
