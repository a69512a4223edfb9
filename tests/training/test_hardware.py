"""A resumed run computes with the threads of its checkpoint; another processor is said."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from hpc_train.checkpoint.control_group import ControlGroup
from hpc_train.distributed.env import THREADS_BY_SHARE
from hpc_train.launchers.rank_processes import common_environment
from hpc_train.training.resuming import Hardware, processor, take_over
from tests.run.runs import small_run

CPU = torch.device("cpu")
ALONE = ControlGroup(0, 1, None)


@pytest.fixture(autouse=True)
def _threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Two threads by this rank's share of the cores, as the launcher tells."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    monkeypatch.setenv(THREADS_BY_SHARE, "1")
    yield
    torch.set_num_threads(before)


def taken_over(then: object) -> tuple[Hardware, list[str]]:
    said: list[str] = []
    return take_over(then, 7, CPU, ALONE, said.append), said


def saved(**changes: Any) -> dict[str, Any]:
    return Hardware(processor(CPU), [2]).to_json() | changes


def test_the_same_hardware_is_not_worth_a_word() -> None:
    assert taken_over(saved()) == (Hardware(processor(CPU), [2]), [])


def test_threads_of_the_checkpoint_are_used_on_fewer_and_on_more_cores() -> None:
    now, said = taken_over(saved(threads=[1]))
    assert (torch.get_num_threads(), now.threads, said) == (1, [1], [])
    now, said = taken_over(saved(threads=[3]))
    assert (torch.get_num_threads(), now.threads) == (3, [3])
    assert len(said) == 1
    assert said[0].startswith(
        "a rank computes with 3 threads as before, where its share of the cores is 1: slower"
    )


def test_threads_that_the_user_set_stay_and_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(THREADS_BY_SHARE)
    now, said = taken_over(saved(threads=[3]))
    assert (torch.get_num_threads(), now.threads) == (2, [2])
    assert len(said) == 1
    assert said[0].startswith("checkpoint 7 was computed with other threads per rank: 3 then, 2 now (OMP_NUM")


def test_another_processor_is_reported() -> None:
    _, said = taken_over(saved(processor="Abacus 3000"))
    words = (
        f"checkpoint 7 was computed on another processor: Abacus 3000 → {processor(CPU)}; the weights may "
    )
    assert said == [f"{words}differ in the last bit from here on"]


@pytest.mark.parametrize(
    "then", [None, [], {}, saved(threads=[2, 2]), saved(threads=["3"]), saved(threads=[0], processor=3)]
)
def test_no_or_forged_facts_and_other_numbers_of_ranks_change_nothing(then: object) -> None:
    assert taken_over(then) == (Hardware(processor(CPU), [2]), [])


def test_the_local_launcher_distinguishes_its_own_number_from_the_users(tmp_path: Path) -> None:
    paths = small_run(tmp_path)
    bare = {
        key: value for key, value in os.environ.items() if key not in {"OMP_NUM_THREADS", THREADS_BY_SHARE}
    }
    ours = common_environment(bare, paths, 1, 1)
    assert ours["OMP_NUM_THREADS"] == str(len(os.sched_getaffinity(0))) and THREADS_BY_SHARE in ours
    theirs = common_environment(bare | {"OMP_NUM_THREADS": "5"}, paths, 1, 1)
    assert theirs["OMP_NUM_THREADS"] == "5" and THREADS_BY_SHARE not in theirs
