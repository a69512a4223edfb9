"""A rank on the CPU keeps the memory that its steps free."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

import pytest

from tests.end_to_end.runs import EXPERIMENT, hpc_train, only_run, write_experiment
from tests.run.code.trees import work_tree

pytestmark = pytest.mark.slow

MODEL = """\
import resource

import torch
from torch import nn

class Net(nn.Sequential):
    def __init__(self, num_classes):
        super().__init__(nn.Flatten(), nn.Linear(32 * 32, num_classes))

    def forward(self, images):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        torch.ones(25_000_000)
        print("pages mapped:", resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
        return super().forward(images)
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="needs glibc")
def test_later_steps_map_no_pages(tmp_path: Path) -> None:
    work = work_tree(tmp_path / "work", "model.py")
    (work / "model.py").write_text(MODEL)
    experiment = write_experiment(tmp_path, EXPERIMENT.replace("tests.end_to_end.parts:net", "model:Net"))
    short = ("optimization.steps=2", "optimization.schedule={name: constant}")
    done = hpc_train("submit", experiment, *short, "--local", cwd=work, HPC_TRAIN_RUNS=str(tmp_path / "runs"))
    assert done.code == 0, done.err
    log = only_run(tmp_path).attempt(1).log(0).read_text()
    first, *_, last = (int(count) for count in re.findall(r"pages mapped: (\d+)", log))
    assert (first > 20_000, last < 200) == (True, True)
