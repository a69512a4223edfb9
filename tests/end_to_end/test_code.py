"""A run trains with the code that it was submitted with, until it is told otherwise."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.end_to_end.runs import EXPERIMENT, Done, hpc_train, only_run, status, write_experiment
from tests.run.code.trees import work_tree

pytestmark = pytest.mark.slow

MODEL = """\
from torch import nn
from helper import LIMIT

class Net(nn.Sequential):
    def __init__(self, num_classes):
        super().__init__(nn.Flatten(), nn.Linear(32 * 32, num_classes))
        self.calls = 0

    def forward(self, images):
        self.calls += 1
        if self.calls > LIMIT:
            raise ValueError(f"over the limit of {LIMIT}")
        return super().forward(images)
"""


def run(folder: Path, *arguments: str | Path) -> Done:
    return hpc_train(*arguments, cwd=folder / "work", HPC_TRAIN_RUNS=str(folder / "runs"))


@pytest.mark.fault(39)
def test_an_edit_after_submit_changes_nothing_until_code_new(tmp_path: Path) -> None:
    work = work_tree(tmp_path / "work", "model.py", "helper.py")
    (work / "model.py").write_text(MODEL)
    (work / "helper.py").write_text("LIMIT = 20\n")
    text = EXPERIMENT.replace("tests.end_to_end.parts:net", "model:Net")
    experiment = write_experiment(tmp_path, text)
    assert run(tmp_path, "submit", experiment, "--local", "--devices", "2").code == 1
    paths = only_run(tmp_path)
    assert "over the limit of 20" in status(paths)["reason"]
    (work / "helper.py").write_text("LIMIT = 20000\n")
    kept = run(tmp_path, "resume", paths.folder)
    assert "over the limit of 20" in status(paths)["reason"]
    told = re.search("code: .* differs? from the snapshot that this run uses: helper.py[;,].*", kept.err)
    assert told and "resume with --code new" in told[0], kept.err
    taken = run(tmp_path, "resume", paths.folder, "--code", "new")
    assert taken.code == 0, taken.err
    assert status(paths)["state"] == "completed"
