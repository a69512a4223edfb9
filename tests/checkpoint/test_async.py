"""Asynchronous saves: what changes after them is not in them, on one rank and on several."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from hpc_train.errors import StorageError, TransientStorageError
from hpc_train.paths import RunPaths
from hpc_train.training.checkpoint.checkpointer import Checkpointer
from hpc_train.training.checkpoint.state import TrainingState
from tests.checkpoint.checkpoint_runs import (
    Trainee,
    assert_loads,
    begin_and_finish,
    claimed_room,
    differences,
    error_of,
    folder_names,
    make_run,
)
from tests.disks import small_disk
from tests.ranks import run_ranks
from tests.waiting import HANG_LIMIT_S

LIMIT_S = HANG_LIMIT_S


def a_step_beside(trainee: Trainee, checkpointer: Checkpointer, step: int, extra: dict[str, Any]) -> None:
    """Begin to save, change buffers at once, and weights and optimizer after the wait."""
    checkpointer.begin(trainee.state, step, extra)
    trainee.forward_and_backward(step)
    checkpointer.wait_staged()
    trainee.step()


@pytest.mark.parametrize("is_reserved", [True, False])
def test_what_changes_while_it_is_saved_is_not_in_it(run: RunPaths, is_reserved: bool) -> None:
    trainee = Trainee()
    trainee.train(1)
    checkpointer = trainee.checkpointer(run)
    if is_reserved:
        checkpointer.reserve(trainee.state)
    for step in (1, 2, 3):
        before = trainee.everything()
        a_step_beside(trainee, checkpointer, step, {"step": step})
        checkpointer.finish()
        assert differences(before, trainee.everything())
        assert assert_loads(run, step, before) == {"step": step}


def test_it_is_the_file_that_a_save_in_between_writes(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / name) for name in ("beside", "between")]
    trainee = Trainee()
    trainee.train(2)
    trainee.checkpointer(runs[1]).save(trainee.state, 1, {"a": 1})
    checkpointer = trainee.checkpointer(runs[0])
    a_step_beside(trainee, checkpointer, 1, {"a": 1})
    checkpointer.finish()
    beside, between = (
        {path.name: path.read_bytes() for path in run.checkpoint(1).folder.iterdir()} for run in runs
    )
    assert beside == between


def test_buffers_are_allocated_once_and_again_when_optimizer_state_appears(run: RunPaths) -> None:
    trainee = Trainee()
    checkpointer = trainee.checkpointer(run)
    checkpointer.reserve(trainee.state)
    empty = checkpointer._staging
    trainee.train(1)
    checkpointer.begin(trainee.state, 1, {})
    full = checkpointer._staging
    assert full is not empty
    checkpointer.begin(trainee.state, 2, {})
    checkpointer.finish()
    assert checkpointer._staging is full
    assert_loads(run, 2, trainee)


def test_a_save_is_collected_once_and_tells_what_it_took(run: RunPaths) -> None:
    trainee = Trainee()
    checkpointer = trainee.checkpointer(run)
    assert checkpointer.finish() is None and checkpointer.collect() is None
    checkpointer.wait_staged()
    go_on = threading.Event()
    checkpointer.begin(trainee.state, 1, {}, before_commit=lambda: bool(go_on.wait(LIMIT_S)) and None)
    assert checkpointer.is_busy and checkpointer.collect() is None and not checkpointer.has_failed
    go_on.set()
    checkpointer.begin(trainee.state, 2, {})  # which finishes the first
    saved = checkpointer.finish()
    assert saved is not None and saved.step == 2
    first = checkpointer.collect()
    assert first is not None and first.step == 1
    assert first.duration_s > 0 and first.stall_s > 0
    assert checkpointer.collect() is None and not checkpointer.is_busy
    checkpointer.begin(trainee.state, 3, {})
    assert checkpointer._under_way is not None
    checkpointer._under_way.has_ended.wait()
    third = checkpointer.collect()
    assert third is not None and third.step == 3
    assert checkpointer.collect() is None and checkpointer.finish() is None


def test_an_error_is_raised_by_the_next_save_and_only_once(run: RunPaths) -> None:
    def fail() -> None:
        raise StorageError("no")

    trainee = Trainee()
    checkpointer = trainee.checkpointer(run)
    checkpointer.begin(trainee.state, 1, {}, before_commit=fail)
    with pytest.raises(StorageError, match="no"):
        checkpointer.begin(trainee.state, 2, {})
    assert checkpointer.finish() is None and not checkpointer.has_failed
    assert folder_names(run) == []
    checkpointer.save(trainee.state, 3, {})
    assert folder_names(run) == ["step-00000003"]


# Several ranks -----------------------------------------------------------------------------------------


def overlap(rank: int, world_size: int, folder: Path) -> dict[str, list[str]]:
    """Save asynchronously under both strategies; return what is not as it was at ``begin``."""
    found = {}
    for strategy in ("ddp", "fsdp"):
        run = RunPaths(folder / strategy)
        trainee, other = (Trainee(seed, strategy, rank, world_size) for seed in (1, 2))
        checkpointer = trainee.checkpointer(run)
        for step in (1, 2, 3):  # the first without the optimizer's state
            if step == 2:
                checkpointer.reserve(trainee.state)
            before = trainee.everything()
            a_step_beside(trainee, checkpointer, step, {})
            saved = checkpointer.finish()
            assert saved is not None and saved.step == step
            loaded = other.checkpointer(run).load_newest(other.state)
            assert loaded is not None and loaded.step == step
            found[f"{strategy} {step}"] = differences(before, other.everything())
    found["errors"] = differ_and_fail(rank, world_size, folder)
    return found


def differ_and_fail(rank: int, world_size: int, folder: Path) -> list[str]:
    """Go through what one rank alone meets; return what is raised here."""
    trainee = Trainee(1, "ddp", rank, world_size)
    checkpointer = trainee.checkpointer(RunPaths(folder / "ddp"))
    trainee.train(1)
    checkpointer.save(trainee.state, 4, {})
    # One rank's optimizer is another now; the other's save goes by the layout of the last.
    optimizer = torch.optim.SGD(trainee.model.parameters()) if rank else trainee.optimizer
    other = TrainingState(trainee.wrapped, optimizer)
    seen = [error_of(lambda: begin_and_finish(checkpointer, other, 5))]

    def stale() -> None:
        if rank == 1:
            raise OSError(116, "Stale file handle")

    seen.append(error_of(lambda: begin_and_finish(checkpointer, trainee.state, 6, stale)))
    checkpointer.save(trainee.state, 7, {})
    return seen


@pytest.mark.slow
def test_asynchronous_saves_are_right_on_two_ranks_and_fail_on_both(tmp_path: Path) -> None:
    for strategy in ("ddp", "fsdp"):
        make_run(tmp_path / strategy)
    for found in run_ranks(2, overlap, tmp_path, folder=tmp_path):
        different, stale = found.pop("errors")
        assert different.startswith("HpcTrainError: ") and "different tensors" in different
        assert stale.startswith(f"{TransientStorageError.__name__}: ") and "stale file handle" in stale
        assert found == {f"{strategy} {step}": [] for strategy in ("ddp", "fsdp") for step in (1, 2, 3)}
    assert folder_names(RunPaths(tmp_path / "ddp")) == [f"step-0000000{step}" for step in (3, 4, 7)]


def fill_the_disk(rank: int, world_size: int, folder: Path) -> tuple[bool, str]:
    """Save twice where there is room for one; return whether this rank knew by itself, and its error."""
    trainee = Trainee(1, "ddp", rank, world_size, width=700)  # 6 MB of state
    trainee.train(1)
    checkpointer = trainee.checkpointer(RunPaths(folder))
    checkpointer.save(trainee.state, 1, {})
    with claimed_room():
        checkpointer.begin(trainee.state, 2, {})
        checkpointer.wait_staged()
        assert checkpointer._under_way is not None
        checkpointer._under_way.has_ended.wait()
        knew = checkpointer.has_failed
        return knew, error_of(lambda: checkpointer.finish() and None)


@pytest.mark.slow
@pytest.mark.fault(7)
def test_a_disk_that_fills_while_it_is_written_fails_the_save_on_all_ranks(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "10m") as disk:
        run = make_run(disk / "run")
        for knew, error in run_ranks(2, fill_the_disk, run.folder, folder=tmp_path):
            assert knew
            assert error.startswith(f"{StorageError.__name__}: ") and "the disk is full" in error
        assert folder_names(run) == ["step-00000001"]
        assert_loads(run, 1, width=700)


def lose_a_peer(rank: int, folder: Path, store: Path) -> None:
    """Rank 1 is killed while it writes; rank 0 leaves what its save raised."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    trainee = Trainee(1, "ddp", rank, 2)
    trainee.train(1)
    checkpointer = trainee.checkpointer(RunPaths(folder))
    checkpointer.save(trainee.state, 1, {})

    def die() -> None:
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    checkpointer.begin(trainee.state, 2, {}, die)
    assert checkpointer._under_way is not None
    checkpointer._under_way.has_ended.wait()
    assert checkpointer.has_failed
    try:
        checkpointer.finish()
    except RuntimeError as error:
        store.with_name("error").write_text(str(error))
    os._exit(0)  # gloo may abort where a peer is gone


@pytest.mark.slow
@pytest.mark.fault(16)
def test_a_peer_that_is_killed_while_it_writes_fails_the_save(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    context = mp.get_context("spawn")
    ranks = [
        context.Process(target=lose_a_peer, args=(rank, run.folder, tmp_path / "store")) for rank in range(2)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(LIMIT_S)
    assert [process.exitcode for process in ranks] == [0, -signal.SIGKILL]
    assert (tmp_path / "error").read_text()
    assert [name for name in folder_names(run) if "tmp" not in name] == ["step-00000001"]
