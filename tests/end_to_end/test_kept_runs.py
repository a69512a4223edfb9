"""Run folders of version 0.2: shown, verified, found, exported and resumed by the current version."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.cli.commands import hpc_train as in_this_process
from tests.end_to_end.runs import final_tensors, hpc_train, rows, status
from tests.kept import Kept, unpack


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Kept:
    found = unpack(tmp_path / "kept")
    monkeypatch.setenv("HPC_TRAIN_RUNS", str(found.runs))
    monkeypatch.chdir(found.folder)  # its model is imported from here
    monkeypatch.setenv("PYTHONPATH", str(found.folder))
    return found


def test_the_archive_names_no_place_of_the_machine_it_was_made_on(kept: Kept) -> None:
    for path in (kept.completed.run, kept.interrupted.run):
        facts = json.loads(path.read_text())
        assert (facts["creator"]["host"], facts["source"]["file"]) == ("kept", "/tmp/kept/experiment.yaml")
        assert facts["versions"]["hpc-train"] == "0.2.0"


def test_both_runs_are_listed(kept: Kept) -> None:
    done = in_this_process("status", "--json")
    assert done.code == 0, done.err
    found = {row["name"]: (row["state"], row["step"]) for row in json.loads(done.out)["runs"]}
    assert found["completed"] == ("completed", kept.total_steps)
    assert found["interrupted"][1] == kept.interrupted_at


def test_the_log_is_shown(kept: Kept) -> None:
    done = hpc_train("logs", kept.interrupted.folder)
    assert done.code == 0, done.err
    assert "4 micro-batches of 16, 4 per rank, 1 rank, fp32; from step 0 to 60" in done.out


def test_checkpoints_of_both_runs_verify(kept: Kept) -> None:
    for paths in (kept.completed, kept.interrupted):
        done = in_this_process("verify", paths.folder)
        assert done.code == 0, done.out + done.err


def test_submit_of_the_same_file_finds_the_completed_run(kept: Kept) -> None:
    done = in_this_process("submit", kept.experiment, "--local", "--devices", "1")
    assert done.code == 0, done.err
    assert f"{kept.run_id}: completed already" in done.err
    assert [path.name for path in (kept.runs / "completed").iterdir()] == [kept.run_id]


@pytest.mark.slow
def test_weights_are_exported(kept: Kept, tmp_path: Path) -> None:
    target = tmp_path / "kept.safetensors"
    done = hpc_train("export", kept.completed.folder, "-o", target)
    assert done.code == 0, done.err
    assert target.stat().st_size > 4 * 2642  # parameters in fp32


@pytest.mark.slow
@pytest.mark.parametrize("code", ["kept", "new"])
def test_an_interrupted_run_is_resumed_to_its_end(code: str, kept: Kept) -> None:
    """With 0.2's own code from the snapshot, under the current launcher; and with the current code."""
    own = ("--code", "new") if code == "new" else ()
    done = hpc_train("resume", kept.interrupted.folder, *own, cwd=kept.folder)
    assert done.code == 0, done.err
    assert (status(kept.interrupted)["state"], status(kept.interrupted)["attempt"]) == ("completed", 2)
    resumed, reference = final_tensors(kept.interrupted), final_tensors(kept.completed)
    assert resumed.keys() == reference.keys()
    assert resumed["step"] == kept.total_steps
    for name, value in resumed.items():
        if isinstance(value, torch.Tensor) and not name.endswith("num_batches_tracked"):
            # Another CPU rounds differently.
            assert torch.allclose(value, reference[name], rtol=0.01, atol=0.01), f"{name} differs"
    assert [row["step"] for row in rows(kept.interrupted, "val")] == [20, 40, 60]
