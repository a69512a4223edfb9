"""What ``parallel:`` makes of a number of ranks."""

from __future__ import annotations

from typing import Any

import pytest

from hpc_train.config.degrees import Degrees, find_degrees
from hpc_train.config.problems import Problem, dotted
from hpc_train.config.training_sections import ParallelConfig


@pytest.mark.parametrize(
    ("keys", "ranks", "per_node", "expected"),
    [
        ({}, 6, 2, Degrees(replicate=6)),
        ({"strategy": "someones-own"}, 6, 2, Degrees(replicate=6)),
        ({"strategy": "fsdp"}, 8, 4, Degrees(shard=8)),
        ({"strategy": "fsdp", "shard": 8}, 8, 4, Degrees(shard=8)),
        ({"strategy": "zero1"}, 4, 4, Degrees(shard=4)),
        ({"strategy": "zero2"}, 4, 2, Degrees(shard=4)),
        ({"strategy": "hsdp"}, 8, 4, Degrees(replicate=2, shard=4)),
        ({"strategy": "hsdp"}, 4, 4, Degrees(shard=4)),
        ({"strategy": "hsdp", "shard": 2}, 8, 4, Degrees(replicate=4, shard=2)),
        ({"strategy": "hsdp", "replicate": 2}, 8, 8, Degrees(replicate=2, shard=4)),
        ({"strategy": "hsdp", "replicate": 2, "shard": 4}, 8, 1, Degrees(replicate=2, shard=4)),
    ],
)
def test_degrees_follow_from_strategy_ranks_and_nodes(
    keys: dict[str, Any], ranks: int, per_node: int, expected: Degrees
) -> None:
    assert find_degrees(ParallelConfig(**keys), ranks, per_node) == expected
    assert expected.world_size == ranks


@pytest.mark.parametrize(
    ("keys", "ranks", "path", "remedy"),
    [
        ({"strategy": "fsdp", "shard": 2}, 8, "parallel.shard", "write strategy: hsdp"),
        ({"strategy": "fsdp", "shard": 16}, 8, "parallel.shard", "take it out, or start 16 ranks"),
        ({"strategy": "hsdp", "shard": 3}, 8, "parallel.shard", "write a shard that divides 8, like 2"),
        ({"strategy": "hsdp", "replicate": 3}, 8, "parallel.replicate", "write a shard that divides 8"),
        ({"strategy": "hsdp", "replicate": 4, "shard": 4}, 8, "parallel.shard", "write a shard that divides"),
        ({"strategy": "hsdp"}, 7, "parallel.strategy", "write a shard that divides 7, like 7"),
    ],
)
def test_degrees_that_do_not_fit_the_ranks_say_what_to_write(
    keys: dict[str, Any], ranks: int, path: str, remedy: str
) -> None:
    found = find_degrees(ParallelConfig(**keys), ranks, 4)
    assert isinstance(found, Problem)
    assert dotted(found.path) == path
    assert found.remedy.startswith(remedy)
    assert str(ranks) in found.message


def test_ranks_that_hold_one_model_together_are_one_data_rank() -> None:
    degrees = Degrees(pipeline=2, replicate=2, shard=1, tensor=2)
    assert [degrees.data_rank(rank) for rank in range(8)] == [0, 0, 1, 1, 0, 0, 1, 1]
    assert [Degrees(replicate=2, shard=2).data_rank(rank) for rank in range(4)] == [0, 1, 2, 3]
