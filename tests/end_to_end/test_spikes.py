"""``optimization.on_spike``: a batch with an outlying loss is recorded; its update or data are skipped."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpc_train.paths import RunPaths
from hpc_train.run.rollbacks import read_rollbacks
from hpc_train.run.spikes import Spike, read_spikes
from tests.end_to_end.holding import Hold
from tests.end_to_end.parts import POISON
from tests.end_to_end.runs import (
    EXPERIMENT,
    assert_equal_to_the_bit,
    hpc_train,
    only_run,
    rows,
    start,
    write_experiment,
)
from tests.end_to_end.test_non_finite import extra
from tests.end_to_end.test_replay import replayed
from tests.quiet import QuietRuns

pytestmark = [pytest.mark.slow, pytest.mark.fault(69)]

#: Soon after the warm-up of the rule, 64 steps, one has the digit. At this rate losses have no trend yet that
#: would hide it.
STEP = 68
TEXT = (
    EXPERIMENT.replace(
        '"tests.end_to_end.parts:net"', '"tests.end_to_end.parts:poisoned", args: {factor: -100.0}'
    )
    .replace(", augment: {hflip: 0.5, crop_padding: 2}", "")
    .replace("steps: 30", "steps: 72")
    .replace("seed: 3", "seed: 48")
    .replace("lr: 0.003", "lr: 0.0002")
)


def spikes(paths: RunPaths) -> list[Spike]:
    return list(read_spikes(paths))


def test_a_spike_is_reported_with_its_samples_and_changes_nothing(quiet_runs: QuietRuns) -> None:
    run, plain = quiet_runs.of("optimization.on_spike=report", text=TEXT), quiet_runs.of(text=TEXT)
    assert_equal_to_the_bit(run, plain)
    found = [spike for spike in spikes(run) if POISON in spike.samples]
    assert [spike.reaction for spike in found][-1:] == ["report"] and found[-1].step == STEP
    assert len(found[-1].samples) == found[-1].num_samples == 48
    (row,) = (row for row in rows(run, "train") if row["step"] == found[-1].step)
    assert row["loss"] == pytest.approx(found[-1].loss) and row["loss"] > (found[-1].loss_limit or 0.0)
    assert f"spike: step {found[-1].step}: loss " in run.attempt(1).log(0).read_text()
    shown = hpc_train("status", run.folder).out
    assert f"step {found[-1].step}: loss " in shown and "hpc-train replay" in shown


@pytest.mark.parametrize("policy", [pytest.param("report", marks=pytest.mark.soak), "skip", "rollback"])
def test_a_stopped_run_resumes_bitwise_past_spikes(
    policy: str, quiet_runs: QuietRuns, tmp_path: Path
) -> None:
    """The window of earlier losses is the same, wherever the run was saved and interrupted."""
    key, devices = f"optimization.on_spike={policy}", ("--local", "--devices", "2")
    quiet = quiet_runs.of(key, text=TEXT)
    with Hold(tmp_path, 60) as hold:
        runs = {"HPC_TRAIN_RUNS": str(tmp_path / "runs")}
        process = start("submit", write_experiment(tmp_path, TEXT), key, hold.override, *devices, **runs)
        hold.wait(process)
        paths = only_run(tmp_path)
        process.terminate()
        _, err = process.communicate()
        assert process.returncode == 130, err
    assert hpc_train("resume", paths.folder).code == 0
    assert_equal_to_the_bit(quiet, paths)
    assert spikes(quiet) == spikes(paths) != []
    assert {spike.reaction for spike in spikes(paths)} == {policy}
    assert extra(quiet)["position"] == extra(paths)["position"]
    position = extra(paths)["position"]
    assert isinstance(position, dict) and bool(position["skipped"]) == (policy == "rollback")
    if policy != "report":
        assert any(POISON in spike.samples for spike in spikes(paths))
    assert read_rollbacks(quiet) == read_rollbacks(paths)
    if policy == "rollback":  # the step that was trained instead has other samples
        *_, spike = (spike for spike in spikes(quiet) if POISON in spike.samples)
        (step,) = replayed(quiet, "--step", str(spike.step))["replays"][0]["steps"]
        batches = step["micro_batches"]
        assert [index for batch in batches for index in batch["samples"]] == spike.samples
        assert (step["loss"], step["recorded"]) == (spike.loss, None)
        retrained = replayed(quiet, "--step", str(spike.step), "--to", str(spike.step + 1))["replays"][0]
        assert [step["differs"] for step in retrained["steps"]] == [[], []]
