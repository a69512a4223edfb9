"""A completed run that ``resume`` makes longer is bitwise identical to one of the full length."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpc_train.paths import RunPaths
from tests.end_to_end.holding import Hold
from tests.end_to_end.runs import (
    assert_equal_to_the_bit,
    found_runs,
    hpc_train,
    kill_everything,
    start,
    submit,
)
from tests.quiet import QuietRuns

pytestmark = pytest.mark.slow

#: The warm-up ends after the shorter length.
LENGTHS = (7, 14)
SETTINGS = (
    "optimization.schedule={name: step, warmup_steps: 5, args: {every_steps: 9}}",
    "optimization.ema={decay: 0.9}",
    "evaluation.every_steps=7",
)


def _longer_run(old: RunPaths) -> RunPaths:
    (new,) = set(found_runs(old.folder.parents[2])) - {old}
    return new


@pytest.mark.parametrize(("devices", "strategy"), [(1, "ddp"), (2, "fsdp")])
def test_an_extended_run_that_was_killed_is_bitwise_identical_to_one_of_the_full_length(
    devices: int, strategy: str, quiet_runs: QuietRuns, tmp_path: Path
) -> None:
    settings = (*SETTINGS, f"parallel.strategy={strategy}")
    short, long = (f"optimization.steps={steps}" for steps in LENGTHS)
    whole = quiet_runs.of(*settings, long, ranks=devices)
    old = submit(tmp_path, *settings, short, devices=devices)
    runs = {"HPC_TRAIN_RUNS": str(tmp_path / "runs")}
    with Hold(tmp_path, 10) as hold:
        process = start("resume", old.folder, long, hold.override, **runs)
        hold.wait(process)
        kill_everything(process, _longer_run(old))
        process.communicate()
    done = hpc_train("resume", old.folder, long, **runs)
    assert done.code == 0, done.err
    assert "extended already by" in done.err
    assert_equal_to_the_bit(whole, _longer_run(old))
