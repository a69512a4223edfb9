"""Asynchronous writing: what a disk refuses, who owns the run at the rename, and signals meanwhile."""

from __future__ import annotations

import errno
import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hpc_train.errors import (
    ExitCode,
    HpcTrainError,
    NonFiniteError,
    StorageError,
    TransientStorageError,
    UserError,
)
from hpc_train.paths import RunPaths
from hpc_train.rank import signals
from hpc_train.run import storage_errors
from hpc_train.run.checkpoints import committed, verify
from hpc_train.run.storage_errors import storage_error
from hpc_train.training.checkpoint import shards, writing
from tests.checkpoint.checkpoint_runs import (
    Trainee,
    assert_loads,
    begin_attempt,
    claimed_room,
    differences,
    folder_names,
    make_run,
)
from tests.disks import SyncedFiles, small_disk
from tests.waiting import HANG_LIMIT_S

LIMIT_S = HANG_LIMIT_S


@pytest.fixture(autouse=True)
def _retries_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage_errors, "RETRY_AFTER_S", (0.0, 0.0))


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "disk", "4m") as place:
        yield place


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> SyncedFiles:
    return SyncedFiles(monkeypatch)


def save(trainee: Trainee, run: RunPaths, step: int) -> None:
    trainee.checkpointer(run).save(trainee.state, step, {})


def refuse_fsync(monkeypatch: pytest.MonkeyPatch, number: int, times: int) -> list[int]:
    """Have the disk refuse ``times`` files with error ``number``; return how often it was asked."""
    fsync, asked = os.fsync, []

    def refuse(descriptor: int) -> None:
        asked.append(descriptor)
        if len(asked) <= times:
            raise OSError(number, os.strerror(number))
        fsync(descriptor)

    monkeypatch.setattr(shards.os, "fsync", refuse)
    return asked


# Disks -------------------------------------------------------------------------------------------------


@pytest.mark.fault(7)
@pytest.mark.parametrize("is_foreseen", [True, False])
def test_a_full_disk_is_reported_and_harms_nothing(disk: Path, is_foreseen: bool) -> None:
    run = make_run(disk / "run")
    trainee, wide = Trainee(), Trainee(width=800)
    save(trainee, run, 1)
    checkpointer = wide.checkpointer(run)
    wide.train(1)
    with claimed_room(2**40 if not is_foreseen else 2**20):
        checkpointer.begin(wide.state, 2, {})
        checkpointer.wait_staged()
        wait_for_failure(checkpointer)
        with pytest.raises(StorageError, match=r"step-00000002\.tmp-1: the disk is full") as raised:
            checkpointer.finish()
    assert raised.value.exit_code == ExitCode.IO
    assert not checkpointer.has_failed and not checkpointer.is_busy and checkpointer.collect() is None
    assert folder_names(run) == ["step-00000001"]
    assert_loads(run, 1, trainee)
    save(trainee, run, 2)
    assert folder_names(run) == ["step-00000001", "step-00000002"]


def wait_for_failure(checkpointer: writing.Any) -> None:
    checkpointer._under_way.has_ended.wait()
    assert checkpointer.has_failed and not checkpointer.is_busy


@pytest.mark.fault(8)
def test_a_quota_is_named_and_not_tried_again(run: RunPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    save(Trainee(), run, 1)
    asked = refuse_fsync(monkeypatch, errno.EDQUOT, 99)
    with pytest.raises(StorageError, match="the quota is used up"):
        save(Trainee(), run, 2)
    assert len(asked) == 1
    assert folder_names(run) == ["step-00000001"]


@pytest.mark.fault(9)
@pytest.mark.parametrize("number", sorted(storage_errors.TRANSIENT))
def test_an_error_that_passes_is_tried_again(
    run: RunPaths, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, number: int
) -> None:
    trainee = Trainee()
    refuse_fsync(monkeypatch, number, 2)
    save(trainee, run, 1)
    assert len(caplog.messages) == 2 and "tried again" in caplog.messages[0]
    assert verify(run.checkpoint(1)) == []
    assert_loads(run, 1, trainee)


@pytest.mark.fault(9)
@pytest.mark.parametrize("number", sorted(storage_errors.TRANSIENT))
def test_an_error_that_stays_is_for_another_attempt(
    run: RunPaths, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    save(Trainee(), run, 1)
    asked = refuse_fsync(monkeypatch, number, 99)
    with pytest.raises(TransientStorageError, match=r"step-00000002\.tmp-1: ") as raised:
        save(Trainee(), run, 2)
    assert len(asked) == 3
    assert raised.value.exit_code == ExitCode.FAILED and not isinstance(raised.value, UserError)
    assert folder_names(run) == ["step-00000001"]


@pytest.mark.parametrize(
    ("number", "said", "kind"),
    [
        (errno.ENOSPC, "the disk is full", StorageError),
        (errno.EDQUOT, "the quota is used up", StorageError),
        (errno.EROFS, "read-only", StorageError),
        (errno.EACCES, "Permission denied", StorageError),
        (errno.EIO, "I/O error", TransientStorageError),
        (errno.ESTALE, "stale file handle", TransientStorageError),
    ],
)
def test_the_disks_refusal_is_named(number: int, said: str, kind: type[HpcTrainError]) -> None:
    error = storage_error(OSError(number, os.strerror(number)), Path("/runs/x"))
    assert "/runs/x" in str(error) and said in str(error)
    assert type(error) is kind


def test_an_old_checkpoint_that_can_not_be_removed_does_not_fail_the_save_and_is_reported_once(
    run: RunPaths, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    trainee = Trainee()
    checkpointer = trainee.checkpointer(run)
    monkeypatch.setattr(writing.checkpoints, "prune", refuse)
    for step in (1, 2):
        checkpointer.save(trainee.state, step, {})
    [warning] = caplog.messages
    assert "could not be removed" in warning
    assert folder_names(run) == ["step-00000001", "step-00000002"]


def test_a_shard_that_grows_past_a_flush_is_right(run: RunPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(shards, "_FLUSH_BYTES", 1000)
    monkeypatch.setattr(shards.os, "posix_fadvise", lambda *arguments: asked.append(arguments))
    trainee = Trainee(width=64)
    save(trainee, run, 1)
    assert asked
    assert_loads(run, 1, trainee, width=64)


def test_a_tensor_of_any_layout_is_written_as_it_is(tmp_path: Path) -> None:
    numbers = torch.arange(60.0).reshape(3, 4, 5)
    tensors = {"one": numbers[:1, 1, 1], "turned": numbers.transpose(0, 2), "scalar": numbers[2, 3, 4]}
    shards.write_safetensors(tmp_path / "x", {name: shards.Entry.of(t) for name, t in tensors.items()}, {})
    assert differences(load_file(tmp_path / "x"), tensors) == []


# Who owns the run --------------------------------------------------------------------------------------


@pytest.mark.fault(15)
def test_an_attempt_that_loses_the_run_while_it_writes_commits_nothing(run: RunPaths) -> None:
    trainee = Trainee()
    save(trainee, run, 1)
    checkpointer = trainee.checkpointer(run)
    checkpointer.begin(trainee.state, 2, {}, before_commit=lambda: begin_attempt(run, 2))
    with pytest.raises(UserError, match="attempt 2 continues this run; attempt 1 saves nothing more"):
        checkpointer.finish()
    assert [checkpoint.step for checkpoint in committed(run)] == [1]
    assert folder_names(run) == ["step-00000001"]


@pytest.mark.fault(15)
def test_an_attempt_whose_half_written_files_are_cleared_away_by_a_later_one_says_why(run: RunPaths) -> None:
    trainee, later = Trainee(), Trainee()
    checkpointer = trainee.checkpointer(run)

    def lose() -> None:
        begin_attempt(run, 2)
        later.checkpointer(run, attempt=2).save(later.state, 7, {})

    checkpointer.begin(trainee.state, 2, {}, before_commit=lose)
    with pytest.raises(UserError, match="attempt 2 continues this run"):
        checkpointer.finish()
    assert folder_names(run) == ["step-00000007"]


@pytest.mark.fault(15)
def test_an_attempt_that_loses_the_run_after_its_rename_removes_nothing(
    run: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainee = Trainee()
    for step in (1, 2):
        save(trainee, run, step)
    sync_folder = writing.sync_folder

    def lose(folder: Path) -> None:
        sync_folder(folder)
        begin_attempt(run, 2)

    monkeypatch.setattr(writing, "sync_folder", lose)
    trainee.checkpointer(run, keep=2).save(trainee.state, 3, {})
    assert folder_names(run) == ["step-00000001", "step-00000002", "step-00000003"]


# The thread --------------------------------------------------------------------------------------------


@pytest.mark.fault(4)
def test_signals_that_come_during_a_save_are_noted_by_the_main_thread_and_the_save_ends_well(
    run: RunPaths,
) -> None:
    masks: list[set[int]] = []
    told, begun = threading.Event(), threading.Event()

    def while_it_writes() -> None:
        masks.append(signal.pthread_sigmask(signal.SIG_BLOCK, ()))
        begun.set()
        assert told.wait(LIMIT_S)

    handlers = {number: signal.getsignal(number) for number in signals.STOP_SIGNALS}
    noted: list[int] = []
    trainee = Trainee()
    checkpointer = trainee.checkpointer(run)
    try:
        for number in signals.STOP_SIGNALS:
            signal.signal(number, lambda number, _: noted.append(number))
        checkpointer.begin(trainee.state, 1, {}, before_commit=while_it_writes)
        assert begun.wait(LIMIT_S)
        for number in signals.STOP_SIGNALS:
            os.kill(os.getpid(), number)
        told.set()
        saved = checkpointer.finish()
    finally:
        told.set()
        for number, handler in handlers.items():
            signal.signal(number, handler)
    assert saved is not None and saved.step == 1
    assert sorted(noted) == sorted(signals.STOP_SIGNALS)
    assert masks[0] >= set(signals.STOP_SIGNALS)
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, ()) & set(signals.STOP_SIGNALS)
    assert folder_names(run) == ["step-00000001"]


def test_the_writing_thread_leaves_torchs_threads_as_they_are(run: RunPaths) -> None:
    before = torch.get_num_threads()
    save(Trainee(), run, 1)
    assert torch.get_num_threads() == before


@pytest.mark.skipif(sys.platform != "linux", reason="threads have no priorities of their own")
def test_training_has_priority_over_a_save(run: RunPaths) -> None:
    trainee, found = Trainee(), list[int]()
    checkpointer = trainee.checkpointer(run)
    checkpointer.begin(trainee.state, 1, {}, lambda: found.append(nice_value()))
    checkpointer.finish()
    assert found == [min(19, nice_value() + 10)]


def nice_value() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


@pytest.mark.fault(20)
@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_a_weight_that_is_not_finite_is_not_saved(value: float, run: RunPaths) -> None:
    trainee = Trainee()
    checkpointer = trainee.checkpointer(run)
    checkpointer.save(trainee.state, 1, {})
    with torch.no_grad():
        trainee.model.conv.weight[0, 0, 0, 0] = value
    with pytest.raises(NonFiniteError, match=r"after step 2 \(model\.conv\.weight\), which is not saved"):
        checkpointer.save(trainee.state, 2, {})
    assert folder_names(run) == ["step-00000001"]


def test_each_file_of_a_checkpoint_is_synced_before_the_checkpoint_is_committed(
    run: RunPaths, synced: SyncedFiles
) -> None:
    """Else a node that loses power leaves a committed checkpoint with empty files."""
    save(Trainee(), run, 1)
    folder = run.checkpoint(1).folder
    at_commit = synced.at_rename_to(folder)
    assert {path.name for path in folder.iterdir() if path.stat().st_ino not in at_commit} == set()
