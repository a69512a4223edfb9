"""The loop's saves: what is seen to at a run's end."""

from __future__ import annotations

from pathlib import Path

from hpc_train.training.meters import Meters
from hpc_train.training.saving import Saves
from tests.checkpoint.checkpoint_runs import Trainee, folder_names, make_run


def test_the_end_of_a_run_removes_what_an_attempt_that_was_stopped_left(tmp_path: Path) -> None:
    """It was stopped while it removed: the attempt that ends the run has nothing left to save."""
    run, trainee = make_run(tmp_path / "run"), Trainee()
    trainee.train(1)
    checkpointer = trainee.checkpointer(run)
    for step in (1, 2):
        checkpointer.save(trainee.state, step, {})
    run.checkpoint(3).folder.with_name("step-00000003.removed-0123abcd").mkdir()
    again = trainee.checkpointer(run)
    again.load_newest(trainee.state)
    saves = Saves(again, trainee.state, Meters(1, 4, 4, 1, None), lambda step: {}, lambda save: None)
    saves.close()
    assert folder_names(run) == ["step-00000001", "step-00000002"]
