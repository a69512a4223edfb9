"""Stages of a file: a kill of the first one changes nothing of what the last one exports."""

from __future__ import annotations

import hashlib
import json
import signal
from pathlib import Path

import pytest

from hpc_train.paths import RunPaths
from tests.end_to_end.holding import Hold
from tests.end_to_end.runs import (
    EXPERIMENT,
    Done,
    found_runs,
    hpc_train,
    kill_everything,
    rows,
    start,
    status,
    write_experiment,
)

pytestmark = pytest.mark.slow

STAGES = """\
stages:
  - optimization: {steps: 14}
  - tune.yaml
  - evaluate: true
  - export: EXPORTED
"""
#: Short, since two chains of four stages are trained.
SHORT = EXPERIMENT.replace("warmup_steps: 20", "warmup_steps: 5")
TUNE = (
    SHORT.replace(
        '{name: "tests.end_to_end.parts:net"}', '{name: "tests.end_to_end.parts:net", init_from: stage}'
    )
    .replace("name: digits\nseed: 3", "name: tuned\nseed: 4")
    .replace("steps: 30", "steps: 12")
)


def staged_file(folder: Path, *, evaluates: bool = True) -> Path:
    """Write a file of four stages, or three: an evaluation, unlike training, starts a Python of its own."""
    stages = STAGES if evaluates else STAGES.replace("  - evaluate: true\n", "")
    write_experiment(folder, TUNE, "tune.yaml")
    return write_experiment(folder, SHORT + stages.replace("EXPORTED", str(folder / "w.safetensors")))


def stages_below(folder: Path) -> list[RunPaths]:
    """Return the runs in the order of the stages."""
    return sorted(found_runs(folder), key=lambda paths: json.loads(paths.run.read_text())["stage"]["number"])


def command(folder: Path, *arguments: str | Path) -> Done:
    return hpc_train(*arguments, HPC_TRAIN_RUNS=str(folder / "runs"))


def states(folder: Path) -> list[str]:
    return [status(paths)["state"] for paths in stages_below(folder)]


def test_a_killed_stage_leaves_the_exported_file_bitwise_identical(tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    done = command(whole, "submit", staged_file(whole), "--local")
    assert done.code == 0 and states(whole) == ["completed"] * 4, done.err
    tuned, evaluated = stages_below(whole)[1:3]
    assert json.loads(tuned.run.read_text())["init_from"].endswith("/checkpoints/step-00000014")
    (row,) = rows(evaluated, "val")
    assert row == {key: value for key, value in rows(tuned, "val")[-1].items() if key in row}

    file = staged_file(killed, evaluates=False)
    with Hold(killed, 10) as hold:
        held = ("submit", file, "--local", hold.override)
        process = start(*held, HPC_TRAIN_RUNS=str(killed / "runs"))
        hold.wait(process)
        assert len(stages_below(killed)) == 3, "all are created before the first one trains"
        first = stages_below(killed)[0]
        kill_everything(process, first)
        process.communicate()
    listed = json.loads(command(killed, "status", "--json").out)["runs"]
    reasons = {run["id"]: (run["state"], run["reason"]) for run in listed}
    name = first.folder.name
    waits = f"waits for {name}, which is failed; `hpc-train resume {name}` lets this one follow"
    assert reasons[stages_below(killed)[1].folder.name] == ("pending", waits)

    alone = command(killed, "resume", stages_below(killed)[1].folder.name)
    assert alone.code != 0 and "waits for" in alone.err, alone.err
    resumed = command(killed, "resume", name)
    assert resumed.code == 0 and states(killed) == ["completed"] * 3, resumed.err
    assert [len(paths.attempt_folders()) for paths in stages_below(killed)] == [2, 1, 1]
    digests = {hashlib.sha256((folder / "w.safetensors").read_bytes()).digest() for folder in (whole, killed)}
    assert len(digests) == 1

    again = command(killed, "submit", file, "--local")
    assert again.code == 0 and again.err.count("completed already") == 3, again.err


def test_ctrl_c_and_cancel_keep_later_stages_from_starting(tmp_path: Path) -> None:
    with Hold(tmp_path, 10) as hold:
        held = ("submit", staged_file(tmp_path), "--local", hold.override)
        process = start(*held, HPC_TRAIN_RUNS=str(tmp_path / "runs"))
        hold.wait(process)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate()
    first, *later = stages_below(tmp_path)
    assert states(tmp_path) == ["interrupted", "pending", "pending", "pending"], err
    assert "lets the 3 later stages follow" in err
    done = command(tmp_path, "cancel", first.folder.name)
    assert done.code == 0 and states(tmp_path)[1:] == ["cancelled"] * 3, done.err
    assert not any(paths.attempt_folders() for paths in later)
