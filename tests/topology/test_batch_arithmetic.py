from __future__ import annotations

from pathlib import Path

import pytest

from hpc_train.experiment.topology.batch_arithmetic import BatchArithmetic, StepLayout
from tests.plan.files import loaded


@pytest.mark.parametrize(("ranks", "accumulation"), [(1, 4), (2, 2), (3, 2), (4, 1)])
def test_ranks_share_the_micro_batches_of_a_step(tmp_path: Path, ranks: int, accumulation: int) -> None:
    optimization = loaded(tmp_path).experiment.optimization
    assert BatchArithmetic.of(optimization, 100, ranks) == BatchArithmetic(4, accumulation, 3, 9)


def test_steps_are_taken_as_given(tmp_path: Path) -> None:
    optimization = loaded(
        tmp_path, "optimization.epochs=null", "optimization.steps=7"
    ).experiment.optimization
    assert BatchArithmetic.of(optimization, 100, 1).total_steps == 7


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        ((64, 16, 2, 2, "bf16"), "4 micro-batches of 16, 2 per rank, 2 ranks, bf16"),
        ((64, 16, 3, 3, "fp32"), "4 micro-batches of 16, at most 2 per rank, 3 ranks, fp32"),
        ((8, 8, 1, 1, "fp32"), "1 micro-batch of 8, 1 per rank, 1 rank, fp32"),
        ((64, 8, 4, 2, "fp32"), "8 micro-batches of 8, 4 per rank, 4 ranks (2 data-parallel), fp32"),
        ((64, None, 2, 2, "tf32"), "micro-batches auto, 2 ranks, tf32"),
    ],
)
def test_a_steps_layout_in_words(layout: tuple[int, int | None, int, int, str], words: str) -> None:
    assert str(StepLayout(*layout)) == f"{layout[0]} samples per step: {words}"
