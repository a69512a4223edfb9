"""Ranks agree about a checkpoint from one thread while training uses the same process group from another."""

from __future__ import annotations

import random
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hpc_train.training.checkpoint.control_group import ControlGroup
from hpc_train.training.distributed import process_group
from tests.ranks import run_ranks

RANKS = 3
#: Not used: nothing is sent.
NO_GROUP: Any = object()
ROUNDS = 60


def beside_training(rank: int, ranks: int) -> list[bool]:
    """Agree in one thread, reduce in the other, each at a pace that differs from rank to rank."""
    group = dist.new_group(backend="gloo")
    assert isinstance(group, dist.ProcessGroup)
    control, agreed, pace = ControlGroup(rank, ranks, group), [], random.Random(rank)

    def agree() -> None:
        for number in range(ROUNDS):
            agreed.append(control.smallest([rank + number, -rank]) == [number, 1 - ranks])
            agreed.append(control.total([rank, 1]) == [ranks * (ranks - 1) // 2, ranks])
            source = number % ranks
            agreed.append(control.broadcast([rank, number], source) == [source, number])
            time.sleep(0.002 * pace.random())

    saving = threading.Thread(target=agree)
    saving.start()
    reduced = []
    for number in range(2 * ROUNDS):
        values = torch.tensor([1, number])
        work = dist.all_reduce(values, group=group, async_op=True)
        time.sleep(0.001 * pace.random())
        assert work is not None
        work.wait()
        reduced.append(values.tolist() == [ranks, ranks * number])
    saving.join()
    return [all(agreed) and len(agreed) == 3 * ROUNDS, all(reduced)]


@pytest.mark.slow
def test_training_and_a_save_share_a_process_group(tmp_path: Path) -> None:
    assert run_ranks(RANKS, beside_training, folder=tmp_path) == [[True, True]] * RANKS


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7, 8])
@pytest.mark.parametrize("root", [0, 1, 3])
def test_messages_go_along_a_tree_that_reaches_every_rank_once(ranks: int, root: int) -> None:
    root %= ranks
    neighbours = [ControlGroup(rank, ranks, NO_GROUP)._neighbours(root) for rank in range(ranks)]
    assert [rank for rank, (parent, _) in enumerate(neighbours) if parent is None] == [root]
    for rank, (_, children) in enumerate(neighbours):
        assert len(children) <= (ranks - 1).bit_length()
        assert all(neighbours[child][0] == rank for child in children)
    assert sum(len(children) for _, children in neighbours) == ranks - 1


def opened_sockets(rank: int, world_size: int) -> tuple[int, int]:
    """Return how many sockets making the control group opens, and how many its use opens later."""
    before = num_sockets()
    with process_group._connecting_at_first_use():
        group = dist.new_group(backend="gloo")
    assert group is not None
    process_group._wait_until_connected(group, 60.0, lambda: False)
    made = num_sockets()
    control = ControlGroup(rank, world_size, group)
    assert control.total([rank]) == [world_size * (world_size - 1) // 2]
    dist.broadcast(torch.zeros(1), src=0, group=group)
    dist.all_reduce(torch.zeros(1), group=group)
    return made - before, num_sockets() - made


def num_sockets() -> int:
    links = []
    for file in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # the listing's own
            links.append(str(file.readlink()))
    return sum(link.startswith("socket:") for link in links)


@pytest.mark.slow
def test_a_rank_connects_to_few_peers_and_to_no_other_later(tmp_path: Path) -> None:
    ranks = 8
    found = run_ranks(ranks, opened_sockets, folder=tmp_path)
    assert [later for _, later in found] == [0] * ranks
    # One listens, two are of the ring, three of the tree; eagerly there would be one per rank.
    assert max(made for made, _ in found) <= 1 + 2 + 3 < ranks
