"""A node that can't do what training needs is found before training, and named."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hpc_train.errors import BadNodeError, HpcTrainError, PeerLostError, StorageError, TransientStorageError
from hpc_train.experiment.config.schema import Experiment, SlurmConfig
from hpc_train.paths import AttemptPaths
from hpc_train.rank.env import RankFacts
from hpc_train.training.health import node_check
from hpc_train.training.health.node_check import check
from tests.programs import answering, put_program
from tests.ranks import run_ranks
from tests.run.runs import small_experiment

CPU = torch.device("cpu")


@pytest.fixture
def attempt(tmp_path: Path) -> AttemptPaths:
    (tmp_path / "1").mkdir()
    return AttemptPaths(tmp_path / "1")


@pytest.fixture
def one_rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def lying(matmul: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return a product with one wrong bit, as a broken core makes it."""

    def lie(*arguments: Any) -> torch.Tensor:
        product = matmul(*arguments).clone()
        product[3, 5] += 1
        return product

    return lie


def refusing(number: int) -> Callable[..., int]:
    def refuse(*arguments: Any) -> int:
        raise OSError(number, os.strerror(number))

    return refuse


@pytest.mark.usefixtures("one_rank")
def test_a_good_node_passes_and_nothing_is_left(attempt: AttemptPaths) -> None:
    state = torch.get_rng_state()
    check(RankFacts(), CPU, attempt, "n1")
    assert list(attempt.folder.iterdir()) == []
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.fault(14)
@pytest.mark.usefixtures("one_rank")
def test_a_wrong_product_is_refused(attempt: AttemptPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "matmul", lying(torch.matmul))
    with pytest.raises(
        BadNodeError,
        match=r"node n1 failed its check of a product of matrices on cpu: 1 of 65536 .* another node",
    ):
        check(RankFacts(), CPU, attempt, "n1")


_NODE = "node n1 failed its check of the disk: .*{}"


@pytest.mark.fault(9, 14)
@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(
    ("number", "error", "message"),
    [
        *((number, BadNodeError, _NODE) for number in (errno.EROFS, errno.EACCES)),
        *((number, TransientStorageError, "(?i){}") for number in (errno.EIO, errno.ESTALE, errno.EREMOTEIO)),
        *((number, StorageError, r"\({}\); free some space") for number in (errno.ENOSPC, errno.EDQUOT)),
    ],
)
def test_an_error_of_a_write_blames_the_node_or_not(
    attempt: AttemptPaths, monkeypatch: pytest.MonkeyPatch, number: int, error: type[Exception], message: str
) -> None:
    monkeypatch.setattr(node_check.os, "fsync", refusing(number))
    with pytest.raises(error, match=message.format(os.strerror(number))):
        check(RankFacts(), CPU, attempt, "n1")
    assert error is not BadNodeError or list(attempt.folder.iterdir()) == []


@pytest.mark.usefixtures("one_rank")
def test_a_corrupting_disk_is_refused(attempt: AttemptPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_check.os, "pread", lambda *arguments: b"other")
    with pytest.raises(BadNodeError, match="contains other bytes than were written"):
        check(RankFacts(), CPU, attempt, "n1")


@pytest.mark.usefixtures("one_rank")
def test_a_missing_folder_is_reported(attempt: AttemptPaths) -> None:
    attempt.folder.rmdir()
    with pytest.raises(BadNodeError, match="No such file"):
        check(RankFacts(), CPU, attempt, "n1")


@pytest.mark.usefixtures("one_rank")
def test_a_node_without_memory_is_refused(attempt: AttemptPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_check, "_available_memory", lambda: 10 * 2**20)
    with pytest.raises(BadNodeError, match="only 10 MiB of the node's memory are free"):
        check(RankFacts(), CPU, attempt, "n1")


TAKEN = r"70.0 of 80.0 GiB of cuda:0 are used by other processes \(process 41, python, 69000 MiB\)"


@pytest.fixture
def filled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[int]:
    """A GPU with the free bytes of each look at it; the last ones stay."""
    free = [8 * 2**30]

    def look(device: torch.device) -> tuple[int, int]:
        return free.pop(0) if len(free) > 1 else free[0], 80 * 2**30

    monkeypatch.setattr(torch.cuda, "mem_get_info", look)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 2 * 2**30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="8f"))
    monkeypatch.setattr(node_check, "_PAUSE_S", 0.0)
    put_program(tmp_path, "nvidia-smi", answering({"compute-apps": "41, python, 69000 MiB"}), monkeypatch)
    return free


def check_gpu_memory(experiment: Experiment | None = None, *, owns_gpu: bool) -> None:
    node_check._check_memory(RankFacts(), torch.device("cuda", 0), experiment, owns_gpu)


def test_a_gpu_filled_by_others_is_refused(filled: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_check, "_FREED_AFTER_S", 0.0)
    with pytest.raises(HpcTrainError, match=TAKEN):
        check_gpu_memory(owns_gpu=True)


def test_a_gpu_that_runs_of_a_job_share_may_be_filled_by_them(filled: list[int]) -> None:
    slurm = {"gpus_per_node": 1, "runs_per_job": 2, "runs_per_gpu": 2}
    sharing = small_experiment().model_copy(update={"slurm": SlurmConfig.model_validate(slurm)})
    check_gpu_memory(sharing, owns_gpu=True)


def test_the_memory_of_a_process_that_was_just_killed_is_waited_for(filled: list[int]) -> None:
    filled[1:] = [8 * 2**30, 79 * 2**30]
    check_gpu_memory(owns_gpu=True)
    assert filled == [79 * 2**30]


def test_a_shared_gpu_must_fit_the_run(filled: list[int], caplog: pytest.LogCaptureFixture) -> None:
    check_gpu_memory(small_experiment(), owns_gpu=False)
    assert re.search(rf"{TAKEN}; 8.0 GiB are free", caplog.text)
    filled[:] = [2**10]
    with pytest.raises(HpcTrainError, match=r"78.0 of 80.0 GiB .*, and a step takes \d+.\d+ GB"):
        check_gpu_memory(small_experiment(), owns_gpu=False)


@pytest.mark.usefixtures("one_rank")
def test_the_check_is_short(attempt: AttemptPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted, not timed: a few products and one small file."""
    products: list[int] = []
    matmul = torch.matmul
    monkeypatch.setattr(torch, "matmul", lambda a, b: products.append(a.numel()) or matmul(a, b))
    check(RankFacts(), CPU, attempt, "n1")
    assert products == [256 * 256] * 3


def _check_with_faults(rank: int, world_size: int, folder: Path) -> list[str]:
    """Two nodes of one rank each: a product wrong on the second, then a sum there, then a sum on both.

    At last rank 1 computes slowly.
    """
    facts = RankFacts(rank, world_size, 0, 1, rank, world_size)
    matmul, all_reduce = torch.matmul, dist.all_reduce
    found = []
    for product_is_wrong, sum_is_wrong in [(rank == 1, False), (False, rank == 1), (False, True)]:
        torch.matmul = lying(matmul) if product_is_wrong else matmul  # type: ignore[assignment]
        dist.all_reduce = spoiled(all_reduce, 2) if sum_is_wrong else all_reduce
        try:
            check(facts, CPU, AttemptPaths(folder), f"n{rank + 1}")
        except HpcTrainError as error:
            found.append(f"{type(error).__name__}: {error}")
    torch.matmul, dist.all_reduce = matmul, all_reduce  # type: ignore[assignment]
    node_check._log.warning = lambda words, *values: found.append(words % values)  # type: ignore[method-assign]
    for slow_s in (1.0, 4.0):
        node_check._name_slow_ranks(slow_s if rank == 1 else 1.0, facts, f"n{rank + 1}", None)
    return found


def spoiled(all_reduce: Callable[..., Any], which: int) -> Callable[..., None]:
    """Return an all-reduce that gets one number wrong in its ``which``-th call."""
    calls = [0]

    def spoil(numbers: torch.Tensor, *arguments: Any, **keywords: Any) -> None:
        all_reduce(numbers, *arguments, **keywords)
        calls[0] += 1
        if calls[0] == which:
            numbers[7] += 1

    return spoil


@pytest.mark.slow
@pytest.mark.fault(14)
def test_the_bad_node_names_itself_and_the_others_lose_a_peer(tmp_path: Path) -> None:
    (tmp_path / "1").mkdir()
    good, bad = run_ranks(2, _check_with_faults, tmp_path / "1", folder=tmp_path)
    lost = f"{PeerLostError.__name__}: the node of rank 1 failed its check; see rank-<r>.error of the attempt"
    assert good[:2] == [lost, lost]
    assert bad[0].startswith("BadNodeError: node n2 failed its check of a product")
    assert bad[1].startswith("BadNodeError: node n2 failed its check of an all-reduce over 2 ranks: 1 of 256")
    # Whether that says anything of a node is for who judges the attempt.
    for both in (good[2], bad[2]):
        assert both.startswith("BadNodeError: node n")
    assert good[3:] == ["slower than the median of all ranks: rank 1; see their logs"]
    assert bad[3:] == ["node n2: a product takes 1.60 times as long on rank 1 as on the median rank"]
