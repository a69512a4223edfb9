"""What is logged where other ranks continue a run than those that saved its checkpoint."""

from __future__ import annotations

from typing import Any

import pytest

from hpc_train.topology.degrees import Degrees
from hpc_train.training.resuming import conditions, difference

TWO = conditions(2, "ddp", Degrees(replicate=2))
ONE = conditions(1, "ddp", Degrees())


def words(then: dict[str, Any], now: dict[str, Any], **facts: bool) -> str | None:
    return difference(then, now, 7, **({"has_batchnorm": False, "is_synced": False} | facts))


def test_the_same_ranks_are_not_reported() -> None:
    assert words({"position": {}, "seed": 3} | TWO, TWO, has_batchnorm=True, is_synced=True) is None


def test_fewer_ranks_go_on() -> None:
    assert words(TWO, ONE) == (
        "continuing with 1 rank under ddp from checkpoint 7 of 2 ranks under ddp: the same micro-batches in "
        "the same order; weights equal an uninterrupted run's up to rounding, not bitwise"
    )


@pytest.mark.parametrize(
    ("then", "now", "said"),
    [
        pytest.param(
            TWO, conditions(2, "fsdp", Degrees(shard=2)),
            "2 ranks under fsdp from checkpoint 7 of 2 ranks under ddp", id="strategy",
        ),
        pytest.param(
            conditions(4, "hsdp", Degrees(replicate=2, shard=2)), conditions(4, "hsdp", Degrees(shard=4)),
            "4 ranks under hsdp (shard 4) from checkpoint 7 of 4 ranks under hsdp (replicate 2 × shard 2)",
            id="degrees",
        ),
    ],
)  # fmt: skip
def test_what_differs_is_named(then: dict[str, Any], now: dict[str, Any], said: str) -> None:
    found = words(then, now)
    assert found is not None and said in found and "not bitwise" in found


def test_batchnorm_is_not_mentioned_since_its_statistics_do_not_depend_on_the_ranks() -> None:
    assert words(TWO, ONE, has_batchnorm=True) == words(TWO, ONE)


def test_synced_statistics_promise_no_equal_weights() -> None:
    said = words(TWO, ONE, has_batchnorm=True, is_synced=True)
    assert said is not None and "parallel.sync_batchnorm" in said and "rounding" not in said


def test_other_stages_draw_other_numbers() -> None:
    said = words(TWO, conditions(2, "pipeline", Degrees(pipeline=2)))
    assert said is not None and "dropout behind a pipeline's first stage" in said
    assert "dropout" not in (words(TWO, ONE) or "")
