from __future__ import annotations

import json
from pathlib import Path

from tests.cli.commands import hpc_train


def test_a_plan_is_a_table_on_stdout(file: Path) -> None:
    done = hpc_train("plan", file, "sweep.grid={seed: [1, 2]}")
    assert done.code == 0
    heads, first, second = done.out.splitlines()
    assert heads.startswith("run") and heads.endswith("with")
    assert first.endswith("seed=1") and second.endswith("seed=2")


def test_a_plan_as_json_carries_its_version(file: Path) -> None:
    done = hpc_train("plan", file, "--json")
    plan = json.loads(done.out)
    assert (plan["version"], plan["name"], plan["runs"][0]["total_steps"]) == (1, "tiny", 9)


def test_a_plan_says_what_cannot_be_started_yet(file: Path) -> None:
    done = hpc_train("plan", file, "optimization.mixup=0.2", "--json")
    assert done.code == 0
    assert json.loads(done.out)["runs"]
    assert "optimization.mixup" in done.err


def test_a_plan_for_slurm_shows_its_script(file: Path) -> None:
    done = hpc_train("plan", file, "slurm={nodes: 2, partition: low}")
    assert done.code == 0
    assert "#SBATCH --partition=low" in done.out
    (script,) = json.loads(hpc_train("plan", file, "slurm={nodes: 2}", "--json").out)["scripts"]
    assert script.startswith("#!/bin/bash")


def test_a_plan_whose_script_cannot_be_made_says_why(file: Path) -> None:
    done = hpc_train("plan", file, "slurm={profile: nowhere}")
    assert done.code == 0
    assert done.out.startswith("run ")
    assert "slurm.profile" in done.err
