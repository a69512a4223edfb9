"""Checkpoints of several real ranks: other numbers of ranks, other strategies, and failures of one rank."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from hpc_train.errors import BadFileError, StorageError
from hpc_train.paths import RunPaths
from hpc_train.run.checkpoints import Manifest, all_set_aside
from hpc_train.training.checkpoint import writing
from hpc_train.training.checkpoint.checkpointer import Checkpointer
from hpc_train.training.checkpoint.export import export
from hpc_train.training.checkpoint.state import TrainingState
from tests.checkpoint.checkpoint_runs import (
    Trainee,
    begin_attempt,
    differences,
    error_of,
    folder_names,
    forge,
    make_run,
)
from tests.ranks import run_ranks

#: strategy → the precision of its run: a sharded bf16 model, too.
DTYPES = {"ddp": torch.float32, "fsdp": torch.bfloat16, "zero1": torch.float32}
#: Attempt → what reads the attempt before it.
READERS = ((2, "fsdp"), (3, "zero1"), (4, "ddp"), (5, "zero1"), (6, "fsdp"))


def save_two_runs(rank: int, world_size: int, folder: Path) -> None:
    """Train and save under each strategy; leave what must come back beside the runs."""
    for strategy, dtype in DTYPES.items():
        trainee = Trainee(1, strategy, rank, world_size, dtype)
        trainee.train(2)
        checkpointer = trainee.checkpointer(RunPaths(folder / strategy))
        for step in (1, 2):
            checkpointer.save(trainee.state, step, {"step": step})
        everything = trainee.everything()
        if rank == 0:
            torch.save(everything, folder / f"{strategy}.pt")


def load_and_save_again(rank: int, world_size: int, folder: Path) -> dict[str, Any]:
    """Read every run under one strategy, save under that, read it under the next one."""
    found: dict[str, Any] = {}
    for source, dtype in DTYPES.items():
        expected = torch.load(folder / f"{source}.pt")
        run = RunPaths(folder / source)
        for attempt, strategy in READERS:
            other = Trainee(2, strategy, rank, world_size, dtype)
            if rank == 0:
                begin_attempt(run, attempt)
            torch.distributed.barrier()
            checkpointer = other.checkpointer(run, attempt)
            loaded = checkpointer.load_newest(other.state)
            assert loaded is not None
            found[f"{source} {attempt} {strategy}"] = (loaded.step, differences(expected, other.everything()))
            checkpointer.save(other.state, loaded.step + 1, {})
            other.train(1)  # what was loaded can train
    return found


@pytest.mark.slow
def test_any_ranks_and_strategy_read_what_any_others_wrote(tmp_path: Path) -> None:
    for strategy in DTYPES:
        make_run(tmp_path / strategy)
    run_ranks(2, save_two_runs, tmp_path, folder=tmp_path)
    for strategy, dtype in DTYPES.items():  # 2 → 1
        expected = torch.load(tmp_path / f"{strategy}.pt")
        alone = Trainee(2, "ddp", dtype=dtype)
        loaded = alone.checkpointer(RunPaths(tmp_path / strategy)).load_newest(alone.state)
        assert loaded is not None and loaded.extra == {"step": 2}
        assert differences(expected, alone.everything()) == []
        check_shards_and_export(RunPaths(tmp_path / strategy), tmp_path / "out", expected)
    found = run_ranks(3, load_and_save_again, tmp_path, folder=tmp_path)  # 2 → 3, ddp ↔ fsdp, 3 → 3
    for of_rank in found:
        assert of_rank == {
            f"{source} {attempt} {strategy}": (attempt, [])
            for source in DTYPES
            for attempt, strategy in READERS
        }


def check_shards_and_export(run: RunPaths, target: Path, expected: dict[str, torch.Tensor]) -> None:
    shards = [load_file(run.checkpoint(2).shard(rank)) for rank in range(2)]
    sizes = [sum(tensor.nbytes for tensor in shard.values()) for shard in shards]
    assert max(sizes) < 1.2 * min(sizes)
    assert not list(run.checkpoint(2).folder.glob("shard-*.json"))
    export(run, target)
    weights = {name[2:]: tensor for name, tensor in expected.items() if name.startswith("m.")}
    assert differences(load_file(target), weights) == []


def fail_in_turn(rank: int, world_size: int, folder: Path) -> list[str]:
    """Go through what can go wrong on one rank; return what this one saw."""
    run = RunPaths(folder / "run")
    trainee = Trainee(1, "ddp", rank, world_size)
    checkpointer = trainee.checkpointer(run)
    checkpointer.save(trainee.state, 1, {})
    before = trainee.everything()
    trainee.train(1)
    seen = [error_of(lambda: write_with_failure(checkpointer, trainee, rank))]
    torch.distributed.barrier()  # rank 0 removes what was half-written before it raises
    assert folder_names(run) == ["step-00000001"]
    checkpointer.save(trainee.state, 2, {})
    flip_shard(run, rank)
    loaded = checkpointer.load_newest(trainee.state)
    assert loaded is not None and loaded.step == 1
    assert differences(before, trainee.everything()) == []
    seen.append(" ".join(all_set_aside(run)))
    forge_shard(run, rank)
    seen.append(error_of(lambda: checkpointer.load_newest(trainee.state)))
    seen.append(error_of(lambda: save_other_tensors(checkpointer, trainee, rank)))
    run = RunPaths(folder / "all damaged")
    checkpointer = trainee.checkpointer(run)
    checkpointer.save(trainee.state, 2, {})
    flip_shard(run, rank)
    for _ in range(2):  # the second time it is set aside already
        seen.append(error_of(lambda: checkpointer.load_newest(trainee.state)))
    return seen


def write_with_failure(checkpointer: Checkpointer, trainee: Trainee, rank: int) -> None:
    write = writing.write_safetensors

    def full(*_: object) -> None:
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    if rank == 1:
        writing.write_safetensors = full  # type: ignore[assignment]
    try:
        checkpointer.save(trainee.state, 2, {})
    finally:
        writing.write_safetensors = write


def flip_shard(run: RunPaths, rank: int) -> None:
    if rank == 0:
        path = run.checkpoint(2).shard(1)
        path.write_bytes(path.read_bytes()[:-1] + b"\xff")
    torch.distributed.barrier()


def forge_shard(run: RunPaths, rank: int) -> None:
    if rank == 0:
        path = run.checkpoint(1).shard(1)
        path.write_bytes(b"cos\nsystem\n".ljust(path.stat().st_size))
        forge(run.checkpoint(1))
    torch.distributed.barrier()


def save_other_tensors(checkpointer: Checkpointer, trainee: Trainee, rank: int) -> None:
    model = trainee.model.conv if rank else trainee.model.first
    checkpointer.save(TrainingState(model, torch.optim.SGD(model.parameters())), 3, {})


@pytest.mark.slow
def test_what_fails_on_one_rank_fails_on_all_and_harms_nothing(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    make_run(tmp_path / "all damaged")
    first, second = run_ranks(2, fail_in_turn, tmp_path, folder=tmp_path)
    assert first[0].startswith(f"{StorageError.__name__}: rank 1: ") and "the quota is used up" in first[0]
    assert second[0] == first[0].replace("rank 1: ", "")
    assert first[1] == "step-00000002.bad"
    for seen in (first, second):
        assert seen[2].startswith(BadFileError.__name__) and "shard-00001.safetensors" in seen[2]
        assert "different tensors" in seen[3]
        for error in seen[4:]:
            assert error.startswith(StorageError.__name__) and "every checkpoint is damaged" in error
    assert folder_names(run) == ["step-00000001", "step-00000002.bad"]
    assert Manifest.read(run.checkpoint(1)).world_size == 2
