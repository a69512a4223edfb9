"""Which cores a rank takes on a node of Slurm."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from hpc_train.rank.env import RankFacts
from hpc_train.training.distributed import affinity
from hpc_train.training.distributed.affinity import (
    loader_processes,
    num_sharing,
    parse_cpu_list,
    physical_cores,
    slice_of,
)

CPU = torch.device("cpu")
#: 8 physical cores of two threads each, numbered as Linux does: core c is CPUs c and c + 8.
CORES = [frozenset({core, core + 8}) for core in range(8)]
LEFT, RIGHT = frozenset({*range(4), *range(8, 12)}), frozenset({*range(4, 8), *range(12, 16)})


@pytest.fixture
def mask() -> Iterator[set[int]]:
    before = os.sched_getaffinity(0)
    yield before
    os.sched_setaffinity(0, before)


def slices(near: list[frozenset[int]], num_ranks: int, cores: list[frozenset[int]] = CORES) -> list[set[int]]:
    return [set(slice_of(cores, near, rank, num_ranks) or ()) for rank in range(num_ranks)]


def test_ranks_take_whole_cores_side_by_side() -> None:
    assert slices([], 4) == [{0, 1, 8, 9}, {2, 3, 10, 11}, {4, 5, 12, 13}, {6, 7, 14, 15}]


def test_no_core_is_left_over_or_dealt_twice() -> None:
    dealt = slices([], 3)
    assert [len(each) for each in dealt] == [4, 6, 6]
    assert set().union(*dealt) == set(range(16))


def test_ranks_are_near_their_gpus() -> None:
    near = [RIGHT, LEFT, RIGHT, LEFT]
    assert slices(near, 4) == [{4, 5, 12, 13}, {0, 1, 8, 9}, {6, 7, 14, 15}, {2, 3, 10, 11}]


@pytest.mark.parametrize(
    "near",
    [
        [RIGHT, LEFT, RIGHT],  # not all ranks' GPUs are seen
        [RIGHT, LEFT, RIGHT, frozenset()],  # one GPU's place is unknown
        [RIGHT, LEFT, RIGHT, LEFT | {4, 12}],  # a core that is near two
        [frozenset({90}), LEFT, RIGHT, LEFT],  # the job has no core there
    ],
)
def test_where_nearness_can_not_decide_all_share_all(near: list[frozenset[int]]) -> None:
    assert slices(near, 4) == slices([], 4)


def test_fewer_cores_than_ranks_are_not_dealt() -> None:
    assert slice_of(CORES[:3], [], 0, 4) is None


@pytest.mark.parametrize(
    ("num_usable", "job_cpus", "local_world_size", "expected"),
    [
        (16, 16, 4, 4),  # the job's share, for all ranks
        (4, 16, 4, 1),  # bound by Slurm, or by us
        (8, 16, 4, 2),  # bound to sockets, two ranks each
        (64, 16, 4, 16),  # nobody confines the job: most is others'
        (1, 16, 1, 1),
        (4, 16, 3, 1),
    ],
)
def test_threads_per_rank(num_usable: int, job_cpus: int, local_world_size: int, expected: int) -> None:
    assert num_sharing(num_usable, job_cpus, local_world_size) == expected


def test_the_kernels_lists_are_read() -> None:
    assert parse_cpu_list("0-3,8,10-11\n") == {0, 1, 2, 3, 8, 10, 11}
    assert parse_cpu_list("") == parse_cpu_list("none") == frozenset()


def test_threads_of_one_core_stay_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        affinity, "_read", lambda path: f"{int(path.parts[-3][3:]) % 4},{int(path.parts[-3][3:]) % 4 + 4}"
    )
    assert physical_cores({0, 1, 2, 4, 5, 6, 7}) == [{0, 4}, {1, 5}, {2, 6}, {7}]
    monkeypatch.setattr(affinity, "_read", lambda path: "")
    assert physical_cores({3, 1}) == [{1}, {3}]


def test_the_whole_share_is_divided(mask: set[int]) -> None:
    if len(physical_cores(mask)) < 2:
        pytest.skip("needs two cores")
    facts = RankFacts(1, 2, 1, 2, 0, 1)
    assert affinity.bind(facts, CPU, {"SLURM_CPUS_ON_NODE": str(len(mask))}) == 1
    assert os.sched_getaffinity(0) < mask


@pytest.mark.parametrize("job_cpus", ["", "none", "0", "100000"])
def test_what_is_not_surely_ours_is_left_alone(mask: set[int], job_cpus: str) -> None:
    """Slurm has bound ranks already (the job has more than we may use), or says nothing."""
    affinity.bind(RankFacts(1, 2, 1, 2, 0, 1), CPU, {"SLURM_CPUS_ON_NODE": job_cpus})
    assert os.sched_getaffinity(0) == mask


def test_a_job_that_is_not_confined_takes_no_cores_of_others(mask: set[int]) -> None:
    if len(mask) < 2:
        pytest.skip("needs two CPUs")
    facts = RankFacts(0, 1, 0, 1, 0, 1)
    assert affinity.bind(facts, CPU, {"SLURM_CPUS_ON_NODE": "1"}) == len(mask)
    assert os.sched_getaffinity(0) == mask


@pytest.mark.parametrize(
    ("cpus", "sharing", "device", "expected"),
    [
        (8, 1, "cuda", 7),
        (8, 2, "cuda", 3),
        (64, 2, "cuda", 16),
        (1, 1, "cuda", 0),
        (2, 4, "cuda", 0),
        (8, 1, "cpu", 1),
        (2, 2, "cpu", 0),
    ],
)
def test_loader_processes_are_the_spare_cpus(
    cpus: int, sharing: int, device: str, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cpus)))
    assert loader_processes(sharing, torch.device(device)) == expected
