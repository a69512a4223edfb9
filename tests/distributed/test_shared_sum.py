"""Means over the ranks of a node in shared memory; what DDP makes of them is in test_data_parallel."""

from __future__ import annotations

import random
import threading
import time
from pathlib import Path

import pytest
import torch
from torch import Tensor

from hpc_train.distributed import shared_sum
from hpc_train.distributed.shared_sum import SharedSum
from tests.distributed.test_shared_flags import all_alive as all_alive
from tests.distributed.test_shared_flags import of_ranks

PIECE = 1024


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_sum, "_PIECE", PIECE)


def averaged(folder: Path, given: list[list[Tensor]]) -> list[list[Tensor]]:
    """Return what each rank has after all averaged their tensors one by one, some of them late."""
    ranks = of_ranks(folder, len(given), room=2 * len(given) * PIECE)
    own = [[tensor.clone() for tensor in tensors] for tensors in given]

    def run(rank: int) -> None:
        means, drawn = SharedSum(ranks[rank]), random.Random(rank)
        for tensor in own[rank]:
            if drawn.random() < 0.2:
                time.sleep(drawn.random() * 5e-3)
            means.average(tensor)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(given))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return own


@pytest.mark.usefixtures("all_alive", "small_pieces")
@pytest.mark.parametrize("world_size", [2, 3, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_all_ranks_have_the_mean_in_the_order_of_the_ranks(
    world_size: int, dtype: torch.dtype, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    row = PIECE // dtype.itemsize
    sizes = [(1,), (row,), (3, row // 2, 5), (2 * row + 1,)] * 5
    given = [[torch.randn(size).to(dtype) for size in sizes] for _ in range(world_size)]
    found = averaged(tmp_path, given)
    for place in range(len(sizes)):
        shares = [tensors[place] * (1 / world_size) for tensors in given]
        expected = shares[0]
        for share in shares[1:]:
            expected = expected + share
        assert all(torch.equal(tensors[place], expected) for tensors in found)


@pytest.mark.parametrize(("world_size", "machine"), [(9, "x86_64"), (2, "aarch64")])
def test_gloo_is_left_to_many_ranks_and_to_cores_that_reorder_stores(
    world_size: int, machine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def opened(*_: object) -> None:
        raise AssertionError("opened")

    monkeypatch.setattr(shared_sum, "open_shared_flags", opened)
    monkeypatch.setattr(shared_sum.platform, "machine", lambda: machine)
    assert shared_sum.open_shared_sum(0, world_size, None, 60.0) is None  # type: ignore[arg-type]
