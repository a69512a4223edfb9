"""The program that ``doctor`` runs on each node measures all-reduces of pairs, on the CPU or a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hpc_train.training.health import pair_bandwidth
from tests import fake_cuda
from tests.waiting import HANG_LIMIT_S

pytestmark = pytest.mark.slow


def test_two_tasks_measure_their_connection(tmp_path: Path) -> None:
    variables = {"SLURM_NTASKS": "2", "SLURM_LAUNCH_NODE_IPADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"}
    if torch.cuda.is_available():
        variables[fake_cuda.BACKEND] = "gloo"  # both have one GPU
    command = [sys.executable, str(Path(pair_bandwidth.__file__)), str(tmp_path)]
    tasks = [
        subprocess.Popen(
            command, env=os.environ | variables | {"SLURM_PROCID": str(rank), "SLURMD_NODENAME": f"n{rank}"}
        )
        for rank in range(2)
    ]
    try:
        assert [task.wait(HANG_LIMIT_S) for task in tasks] == [0, 0]
    finally:
        for task in tasks:
            task.kill()
    first, second = (json.loads((tmp_path / f"pair-{rank}.json").read_text()) for rank in range(2))
    assert (first["node"], second["node"], first["backend"]) == ("n0", "n1", "gloo")
    assert first["pairs"]["n1"] > 0 and second["pairs"] == {}
