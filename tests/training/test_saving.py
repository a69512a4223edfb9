"""The loop's saves: what is seen to at a run's end."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

from hpc_train.training.loop import Saves
from hpc_train.training.meters import Meters
from hpc_train.training.step_times import StepTimes
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


class StagingCheckpointer:
    """Notes the order of what a save does to it."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.times = StepTimes(4)

    def begin(self, *_: Any, **__: Any) -> None:
        self.calls.append("begin")

    def wait_staged(self) -> None:
        self.calls.append("wait until the weights are copied")

    def finish(self) -> None:
        self.calls.append("finish")

    def exchange_digests(self) -> None:
        self.calls.append("exchange digests")

    def drain(self, *, wait: bool) -> None:
        self.calls.append(f"drain {wait}")


def test_weights_change_only_after_they_are_copied_and_the_rows_of_their_step_are_written() -> None:
    calls = StagingCheckpointer()
    fake = cast(Any, calls)
    saves = Saves(fake, fake, fake, lambda step: {}, lambda save: None)
    saves.begin(1)
    calls.calls.clear()
    saves.wait_staged()
    assert calls.calls == ["wait until the weights are copied", "drain True"]
    assert saves._rows_are_written.is_set(), "the writer waits for the rows"
