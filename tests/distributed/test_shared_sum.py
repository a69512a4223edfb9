"""Means over the ranks of a node in shared memory; what DDP makes of them is in test_data_parallel."""

from __future__ import annotations

import random
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from hpc_train.training.distributed import shared_flags
from hpc_train.training.distributed.shared_flags import SharedSum
from tests.distributed.test_shared_flags import all_alive as all_alive
from tests.distributed.test_shared_flags import of_ranks
from tests.ranks import run_ranks
from tests.waiting import HANG_LIMIT_S

PIECE = 1024


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_flags, "_PIECE", PIECE)


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
        thread.join(HANG_LIMIT_S)
    return own


@pytest.mark.usefixtures("all_alive", "small_pieces")
@pytest.mark.parametrize("world_size", [2, 3, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_all_ranks_have_the_same_mean(world_size: int, dtype: torch.dtype, tmp_path: Path) -> None:
    torch.manual_seed(0)
    row = PIECE // dtype.itemsize
    sizes = [(1,), (row,), (3, row // 2, 5), (2 * row + 1,)] * 5
    given = [[torch.randn(size).to(dtype) for size in sizes] for _ in range(world_size)]
    first, *others = averaged(tmp_path, given)
    for place, mean in enumerate(first):
        assert all(torch.equal(mean, tensors[place]) for tensors in others)
        expected = torch.stack([tensors[place].double() for tensors in given]).mean(0)
        torch.testing.assert_close(mean.double(), expected, rtol=0, atol=2 * torch.finfo(dtype).eps)


def by_both(rank: int, world_size: int) -> list[tuple[torch.dtype, int]]:
    """Return the cases in which a mean of gloo's differs from that of shared memory."""
    shared = shared_flags.open_shared_sum(rank, world_size, dist.group.WORLD, 60.0)  # type: ignore[arg-type]
    assert shared is not None
    torch.manual_seed(rank)
    differing = []
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        for count in (1, 2, 7, 8, 1000, 65_537, (1 << 20) + 3, 3 * (1 << 20) + 77):
            given = torch.randn(count).to(dtype)
            by_gloo = given * (1 / world_size)
            dist.all_reduce(by_gloo)
            shared.average(given)
            if not torch.equal(given, by_gloo):
                differing.append((dtype, count))
    return differing


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [3, 4])
def test_means_are_bitwise_those_of_gloo(world_size: int, tmp_path: Path) -> None:
    """A run moves between one node, where memory is shared, and several. gloo's order is of its source."""
    assert run_ranks(world_size, by_both, folder=tmp_path) == [[]] * world_size


@pytest.mark.parametrize(("world_size", "machine"), [(9, "x86_64"), (2, "aarch64")])
def test_gloo_is_left_to_many_ranks_and_to_cores_that_reorder_stores(
    world_size: int, machine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def opened(*_: object) -> None:
        raise AssertionError("opened")

    monkeypatch.setattr(shared_flags, "open_shared_flags", opened)
    monkeypatch.setattr(shared_flags.platform, "machine", lambda: machine)
    assert shared_flags.open_shared_sum(0, world_size, None, 60.0) is None  # type: ignore[arg-type]
