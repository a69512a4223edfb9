"""Which rank a process is, from what its launcher left in the environment."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_train.errors import UsageError
from hpc_train.rank.env import RankFacts, parse_tasks_per_node

TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
SLURM = {
    "SLURM_PROCID": "6",
    "SLURM_NTASKS": "7",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "3",
    "SLURM_NNODES": "4",
    "SLURM_TASKS_PER_NODE": "2(x3),1",
}


@pytest.mark.parametrize(
    ("environ", "facts"),
    [
        ({}, RankFacts(0, 1, 0, 1, 0, 1)),
        (TORCHRUN, RankFacts(5, 8, 1, 4, node=1, num_nodes=2)),
        # The node of a rank, if nodes have different numbers of ranks.
        (TORCHRUN | {"GROUP_RANK": "2", "GROUP_WORLD_SIZE": "3"}, RankFacts(5, 8, 1, 4, node=2, num_nodes=3)),
        (SLURM, RankFacts(6, 7, 0, 1, node=3, num_nodes=4)),
        (SLURM | TORCHRUN, RankFacts(5, 8, 1, 4, node=1, num_nodes=2)),
        # An allocation without a task.
        ({name: SLURM[name] for name in ("SLURM_NTASKS", "SLURM_NNODES")}, RankFacts()),
    ],
)
def test_the_rank_of_an_environment(environ: dict[str, str], facts: RankFacts) -> None:
    assert RankFacts.from_environment(environ) == facts


@pytest.mark.parametrize("name", list(TORCHRUN))
def test_a_partly_set_group_names_what_is_missing(name: str) -> None:
    partly = {key: value for key, value in TORCHRUN.items() if key != name}
    with pytest.raises(UsageError, match=rf"^{name}: not set, while "):
        RankFacts.from_environment(partly)


@pytest.mark.parametrize(
    ("environ", "named"),
    [
        (TORCHRUN | {"RANK": "8"}, "RANK: 8 is not below WORLD_SIZE"),
        (TORCHRUN | {"LOCAL_RANK": "4"}, "LOCAL_RANK: 4"),
        (TORCHRUN | {"LOCAL_WORLD_SIZE": "9"}, "LOCAL_WORLD_SIZE: 9"),
        (TORCHRUN | {"WORLD_SIZE": "-8"}, "WORLD_SIZE: '-8'"),
        (TORCHRUN | {"LOCAL_WORLD_SIZE": "0"}, "LOCAL_RANK: 1"),
        (TORCHRUN | {"GROUP_RANK": "2"}, "GROUP_RANK: 2"),
        (SLURM | {"SLURM_PROCID": "7"}, "SLURM_PROCID: 7"),
        (SLURM | {"SLURM_LOCALID": "1"}, "SLURM_LOCALID: 1"),
        (SLURM | {"SLURM_NTASKS": "8"}, "SLURM_TASKS_PER_NODE: "),
        (SLURM | {"SLURM_TASKS_PER_NODE": "2(x3"}, "SLURM_TASKS_PER_NODE: "),
    ],
)
def test_contradictions_name_the_variable(environ: dict[str, str], named: str) -> None:
    with pytest.raises(UsageError) as caught:
        RankFacts.from_environment(environ)
    assert str(caught.value).startswith(named)


@given(st.lists(st.tuples(st.integers(1, 128), st.integers(1, 5)), min_size=1))
def test_tasks_per_node_in_short_form(runs: list[tuple[int, int]]) -> None:
    text = ",".join(f"{tasks}(x{count})" if count > 1 else str(tasks) for tasks, count in runs)
    assert parse_tasks_per_node(text) == [tasks for tasks, count in runs for _ in range(count)]
