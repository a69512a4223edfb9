"""SIGKILL at every point of a write leaves the newest committed checkpoint, and the next attempt continues.

A thread writes while another trains, so a kill finds both at work.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from itertools import count
from pathlib import Path

import pytest
import torch

from hpc_train.paths import RunPaths
from hpc_train.run.checkpoints import all_set_aside, committed, verify
from tests.checkpoint.checkpoint_runs import Trainee, begin_attempt, differences, folder_names, make_run
from tests.ranks import run_ranks

#: What Python tells an audit hook before it touches the disk.
TOUCHES = {
    "open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.scandir", "os.listdir", "shutil.rmtree",
}  # fmt: skip


def kill_at(number: int) -> None:
    """End this process by SIGKILL just before its ``number``-th touch of the disk."""
    touches = count()
    fsync = os.fsync

    def touch() -> None:
        if next(touches) == number:
            os.kill(os.getpid(), signal.SIGKILL)

    def counted_fsync(descriptor: int) -> None:
        touch()
        fsync(descriptor)
        touch()

    os.fsync = counted_fsync
    sys.addaudithook(lambda event, _: touch() if event in TOUCHES else None)


def save_and_die(run: RunPaths, trainee: Trainee, number: int) -> bool:
    """Save step 4 in a fork that dies at touch ``number``; return whether it lived to the end."""
    child = os.fork()
    if child == 0:
        try:
            kill_at(number)
            checkpointer = trainee.checkpointer(run, keep=2)
            checkpointer.begin(trainee.state, 4, {})
            checkpointer.wait_staged()
            change_everything(trainee)
            checkpointer.finish()
        except BaseException:
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert status in (0, signal.SIGKILL), status
    return status == 0


def change_everything(trainee: Trainee) -> None:
    with torch.no_grad():
        for tensor in (*trainee.model.parameters(), *trainee.model.buffers()):
            tensor.fill_(3)
        for state in trainee.optimizer.state.values():
            for tensor in state.values():
                tensor.fill_(3)


def go_on(run: RunPaths, saved: dict[int, Trainee]) -> int:
    """Load as the next attempt, compare, save again; return the step that was found."""
    newest = committed(run)[0]
    assert verify(newest) == []
    begin_attempt(run, 2)
    other = Trainee(seed=2)
    checkpointer = other.checkpointer(run, attempt=2, keep=2)
    loaded = checkpointer.load_newest(other.state)
    assert loaded is not None and loaded.step == newest.step and not all_set_aside(run)
    assert differences(other.everything(), saved[loaded.step].everything()) == []
    checkpointer.save(other.state, 5, {})
    assert len(committed(run)) == 2
    assert len(folder_names(run)) == 2, folder_names(run)
    return loaded.step


def kill_everywhere(rank: int, world_size: int, folder: Path) -> list[int]:
    """Return the step found after a kill at each touch in turn, the last one being a save that lived."""
    template, saved = make_run(folder / "template"), {}
    for step in (1, 2, 3, 4):
        saved[step] = Trainee()
        saved[step].train(step)
        if step < 4:
            saved[step].checkpointer(template, keep=3).save(saved[step].state, step, {})
    found = []
    for number in count():
        run = RunPaths(folder / f"run-{number}")
        shutil.copytree(template.folder, run.folder)
        lived = save_and_die(run, saved[4], number)
        found.append(go_on(run, saved))
        shutil.rmtree(run.folder)
        if lived:
            return found
    raise AssertionError


@pytest.mark.slow
@pytest.mark.fault(6, 13)
def test_a_kill_at_any_point_of_a_write_leaves_a_checkpoint_to_go_on_from(tmp_path: Path) -> None:
    [found] = run_ranks(1, kill_everywhere, tmp_path, folder=tmp_path)
    assert found == sorted(found)
    assert found.count(3) > 10 and found.count(4) > 3  # before the commit, and while pruning after it
    assert set(found) == {3, 4}
