"""The degrees that ``parallel`` gives for a number of ranks, and pipeline schedules."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.pipelining.schedules import ScheduleInterleaved1F1B

from hpc_train.experiment.config.problems import Problem, dotted
from hpc_train.experiment.config.training_sections import ParallelConfig
from hpc_train.experiment.topology.degrees import (
    Degrees,
    bubble,
    find_degrees,
    problem_of_schedule,
    stages_per_rank,
)
from tests.parallelism.cases import MODEL_PARALLEL


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
        ({"strategy": "hsdp", "shard": 3}, 8, "parallel.shard", "write 2, or start 6 ranks"),
        ({"strategy": "hsdp", "replicate": 3}, 8, "parallel.replicate", "write 2, or start 6 ranks"),
        ({"strategy": "hsdp", "replicate": 3, "shard": 2}, 4, "parallel.replicate", "write 2, or start 6"),
        ({"strategy": "hsdp", "replicate": 2, "shard": 3}, 4, "parallel.shard", "write 2, or start 6"),
        (
            {"strategy": "hsdp", "replicate": 3, "shard": 3},
            7,
            "parallel.replicate",
            "start 9 ranks, or write",
        ),
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


@pytest.mark.parametrize(
    ("keys", "ranks", "per_node", "expected"),
    [
        ({"strategy": "tensor"}, 8, 4, Degrees(replicate=2, tensor=4)),
        ({"strategy": "tensor", "shard": 2}, 8, 4, Degrees(replicate=2, shard=2, tensor=2)),
        ({"strategy": "tensor", "tensor": 2}, 8, 4, Degrees(replicate=4, tensor=2)),
        # Groups of five: seven a node would leave some over.
        ({"strategy": "tensor", "shard": 2}, 30, 15, Degrees(replicate=3, shard=2, tensor=5)),
        ({"strategy": "pipeline"}, 8, 4, Degrees(pipeline=8)),
        ({"strategy": "pipeline", "pipeline": 2}, 8, 4, Degrees(pipeline=2, replicate=4)),
        ({"strategy": "pipeline", "shard": 4}, 8, 4, Degrees(pipeline=2, shard=4)),
        (
            {"strategy": "pipeline", "pipeline": 2, "tensor": 2},
            8,
            4,
            Degrees(pipeline=2, replicate=2, tensor=2),
        ),
        ({"strategy": "split", "replicate": 2}, 8, 4, Degrees(pipeline=4, replicate=2)),
    ],
)
def test_degrees_of_ranks_that_share_layers(
    keys: dict[str, Any], ranks: int, per_node: int, expected: Degrees
) -> None:
    assert find_degrees(ParallelConfig(**keys), ranks, per_node) == expected


_SIZE = st.none() | st.integers(1, 12)


@given(
    strategy=st.sampled_from(("hsdp", *MODEL_PARALLEL)),
    sizes=st.tuples(_SIZE, _SIZE, _SIZE, _SIZE),
    nodes=st.integers(1, 6),
    per_node=st.integers(1, 12),
)
def test_what_is_to_be_written_instead_fits(
    strategy: str, sizes: tuple[int | None, ...], nodes: int, per_node: int
) -> None:
    """All that the remedy says, applied: another size of one key, another number of ranks on one node."""
    keys = dict(zip(("shard", "replicate", "tensor", "pipeline"), sizes, strict=True))
    if strategy in ("hsdp", "tensor"):
        keys["pipeline"] = None  # refused by the rules
    if strategy == "hsdp":
        keys["tensor"] = None
    parallel, ranks = ParallelConfig(strategy=strategy, **keys), nodes * per_node
    found = find_degrees(parallel, ranks, per_node)
    if isinstance(found, Degrees):
        assert found.world_size == ranks
        assert all(getattr(found, key) == size for key, size in keys.items() if size is not None)
        # Those who share layers are on one node, unless the file says how many they are.
        assert keys["tensor"] is not None or per_node % found.tensor == 0
        return
    if written := re.search(r"write (\d+)", found.remedy):
        changed = parallel.model_copy(update={str(found.path[1]): int(written[1])})
        assert isinstance(find_degrees(changed, ranks, per_node), Degrees)
    started = re.search(r"start (\d+) ranks", found.remedy)
    assert started is not None
    assert isinstance(find_degrees(parallel, int(started[1]), int(started[1])), Degrees)


def test_the_nearest_degree_that_fits_is_named() -> None:
    found = find_degrees(ParallelConfig(strategy="pipeline", pipeline=3, shard=2), 8, 8)
    assert isinstance(found, Problem)
    assert (dotted(found.path), found.remedy) == ("parallel.pipeline", "write 2, or start 6 ranks")
    assert found.message == "pipeline 3 × shard 2 needs 6 ranks, but there are 8"


def pipeline(**keys: Any) -> ParallelConfig:
    return ParallelConfig(**{"strategy": "pipeline", **keys})


def test_the_bubble_is_gpipes_and_by_several_stages_a_rank_smaller() -> None:
    for schedule in ("gpipe", "1f1b"):
        assert bubble(pipeline(schedule=schedule), ranks=4, slots=8) == pytest.approx(3 / 11)
    assert bubble(pipeline(schedule="interleaved"), ranks=4, slots=8) == pytest.approx(3 / 19)
    assert bubble(pipeline(schedule="interleaved", stages_per_rank=4), ranks=4, slots=8) == pytest.approx(
        3 / 35
    )
    assert bubble(pipeline(strategy="split"), ranks=4, slots=8) == pytest.approx(3 / 4)
    assert bubble(pipeline(), ranks=1, slots=8) == 0


def test_with_fewer_slots_than_ranks_several_stages_a_rank_help_less() -> None:
    # One micro-batch is in one place at a time.
    assert bubble(pipeline(schedule="interleaved"), ranks=4, slots=1) == pytest.approx(3 / 4)
    assert bubble(pipeline(schedule="interleaved"), ranks=4, slots=4) == pytest.approx(3 / 11)
    assert bubble(pipeline(schedule="1f1b"), ranks=4, slots=2) == pytest.approx(3 / 5)


def test_interleaved_has_two_stages_a_rank_unless_the_file_says_more() -> None:
    assert stages_per_rank(pipeline()) == 1
    assert stages_per_rank(pipeline(schedule="interleaved")) == 2
    assert stages_per_rank(pipeline(schedule="interleaved", stages_per_rank=3)) == 3
    # A key that split does not have.
    assert stages_per_rank(pipeline(strategy="split", schedule="interleaved")) == 1


class _Stage:
    """As much of torch's stage as its schedule looks at before it runs."""

    def __init__(self, ranks: int, index: int) -> None:
        self.group_size, self.num_stages, self.group_rank, self.stage_index = ranks, 2 * ranks, 0, index
        self.is_first, self.is_last, self.submod = index == 0, False, None


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_interleaved_takes_the_slots_that_torch_does(ranks: int) -> None:
    for slots in range(1, 20):
        problem = problem_of_schedule(pipeline(schedule="interleaved"), ranks, slots)
        stages = [_Stage(ranks, 0), _Stage(ranks, ranks)]
        try:
            ScheduleInterleaved1F1B(stages, slots)
        except ValueError:
            assert problem is not None
            number = int(problem.remedy.split()[-1])
            assert problem_of_schedule(pipeline(schedule="interleaved"), ranks, number) is None
        else:
            assert problem is None
    assert problem_of_schedule(pipeline(schedule="1f1b"), ranks, 1) is None
