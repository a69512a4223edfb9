"""The benchmark of training on one GPU runs to its end; what it measures is not asserted."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from benchmarks.measuring import ROOT
from tests.waiting import HANG_LIMIT_S

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.alone,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize(("model", "precision"), [("resnet50", "bf16"), ("gpt", "fp8")])
def test_a_quick_trial_compares_all_arms(model: str, precision: str) -> None:
    words = ["--quick", "--models", model, "--precisions", precision]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu_throughput", *words],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=HANG_LIMIT_S,
    )
    assert done.returncode == 0, done.stderr
    assert '"bare loop"' in done.stdout and '"hpc-train"' in done.stdout and "samples/s" in done.stdout
