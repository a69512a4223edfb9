"""Sweeps of programs on a real Slurm; what faults do to programs is in test_program_examples.py."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hpc_train.paths import RunPaths
from tests.end_to_end.runs import found_runs, hpc_train
from tests.slurm.cluster import Cluster
from tests.slurm.experiments import ENVIRONMENT, account, job_of, wait_for_state
from tests.workloads.programs import TEXT, result, weight_after, write_program

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SLURM = "slurm: {partition: low, nodes: 2, ranks_per_node: 1, time_limit: 30min}\n"


def submit(folder: Path, *words: str) -> list[RunPaths]:
    file = write_program(folder, TEXT + SLURM)
    environment = ENVIRONMENT | {"HPC_TRAIN_RUNS": str(folder / "runs")}
    done = hpc_train("submit", file, *words, cwd=file.parent, **environment)
    assert done.code == 0, done.err
    return found_runs(folder)


def test_a_sweep_of_programs_is_one_array(cluster: Cluster, tmp_path: Path) -> None:
    rates = [0.1, 0.2, 0.3]
    runs = submit(tmp_path, f"sweep={{grid: {{program.args.lr: {rates}}}}}", "slurm.nodes=1")
    (array,) = {job_of(paths).partition("_")[0] for paths in runs}
    assert sorted(job_of(paths) for paths in runs) == [f"{array}_{number}" for number in range(3)]
    for paths in runs:
        assert wait_for_state(paths, "completed", "failed") == "completed", account(paths)
        lr = json.loads(paths.resolved.read_text())["program"]["args"]["lr"]
        assert result(paths)["weight"] == weight_after(20, lr)
