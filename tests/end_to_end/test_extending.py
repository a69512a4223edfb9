"""A completed run that ``resume`` makes longer is bitwise identical to one of the full length."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpc_train.paths import RunPaths
from hpc_train.run.run_status import read_status
from hpc_train.run.spikes import read_spikes
from tests.end_to_end.holding import Hold
from tests.end_to_end.parts import POISON
from tests.end_to_end.runs import (
    EXPERIMENT,
    assert_equal_to_the_bit,
    found_runs,
    hpc_train,
    kill_everything,
    start,
    submit,
)
from tests.end_to_end.test_spikes import STEP, TEXT
from tests.quiet import QuietRuns

pytestmark = pytest.mark.slow

#: The warm-up ends after the shorter length, 7.
SETTINGS = (
    "optimization.schedule={name: step, warmup_steps: 5, args: {every_steps: 9}}",
    "optimization.ema={decay: 0.9}",
    "evaluation.every_steps=7",
)
#: The rule reads the losses of both runs: its own warm-up ends in the shorter one.
SPIKES = (
    "optimization.on_spike=skip",
    "optimization.schedule={name: constant, warmup_steps: 20}",
    f"evaluation.every_steps={STEP - 2}",
)


def _longer_run(old: RunPaths) -> RunPaths:
    (new,) = set(found_runs(old.folder.parents[2])) - {old}
    return new


@pytest.mark.parametrize(
    ("text", "settings", "lengths", "ranks"),
    [
        pytest.param(TEXT, SPIKES, (STEP - 2, STEP + 4), 1, id="1-ddp-spikes"),
        pytest.param(EXPERIMENT, (*SETTINGS, "parallel.strategy=fsdp"), (7, 14), 2, id="2-fsdp"),
    ],
)
def test_an_extended_run_that_was_killed_is_bitwise_identical_to_one_of_the_full_length(
    text: str,
    settings: tuple[str, ...],
    lengths: tuple[int, int],
    ranks: int,
    quiet_runs: QuietRuns,
    tmp_path: Path,
) -> None:
    short, long = (f"optimization.steps={steps}" for steps in lengths)
    whole = quiet_runs.of(*settings, long, text=text, ranks=ranks)
    old = submit(tmp_path, *settings, short, text=text, devices=ranks)
    runs = {"HPC_TRAIN_RUNS": str(tmp_path / "runs")}
    with Hold(tmp_path, lengths[0] + 3) as hold:
        process = start("resume", old.folder, long, hold.override, **runs)
        hold.wait(process)
        kill_everything(process, _longer_run(old))
        process.communicate()
    # Also if no step has written the status: the one that was written before the first step has it.
    assert read_status(_longer_run(old)).best == read_status(old).best is not None
    done = hpc_train("resume", old.folder, long, **runs)
    assert done.code == 0, done.err
    assert "extended already by" in done.err
    new = _longer_run(old)
    assert_equal_to_the_bit(whole, new)
    spikes = list(read_spikes(new))
    assert spikes == list(read_spikes(whole))
    assert (text == TEXT) == any(POISON in spike.samples for spike in spikes)
