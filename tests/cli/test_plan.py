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
    done = hpc_train("plan", file, "slurm={nodes: 2, partition: low}", "--script")
    assert done.code == 0
    assert "#SBATCH --partition=low" in done.out
    assert "#SBATCH" not in hpc_train("plan", file, "slurm={nodes: 2, partition: low}").out
    (script,) = json.loads(hpc_train("plan", file, "slurm={nodes: 2}", "--json").out)["scripts"]
    assert script.startswith("#!/bin/bash")


def test_a_plan_without_a_job_has_no_script(file: Path) -> None:
    assert hpc_train("plan", file).err == ""
    done = hpc_train("plan", file, "--script")
    assert (done.code, "#SBATCH" in done.out) == (0, False)
    assert "slurm: is missing" in done.err and "write `slurm: {}`" in done.err


def test_a_plan_whose_script_cannot_be_made_says_why(file: Path) -> None:
    done = hpc_train("plan", file, "slurm={profile: nowhere}")
    assert done.code == 0
    assert done.out.startswith("run ")
    assert "slurm.profile" in done.err


_MICRO_BATCHES = ("optimization.global_batch_size=32", "optimization.micro_batch_size=4")
_ON_4 = "slurm={ranks_per_node: 4}"


def test_a_plan_shows_degrees_and_the_bubble_of_a_pipeline(file: Path) -> None:
    done = hpc_train("plan", file, *_MICRO_BATCHES, _ON_4, "parallel={strategy: pipeline, shard: 2}")
    heads, cells = (line.split("  ") for line in done.out.splitlines()[:2])
    shown = dict(zip(filter(None, heads), filter(None, cells), strict=True))
    shown = {head.strip(): cell.strip() for head, cell in shown.items()}
    assert shown["degrees"] == "pipeline 2 × shard 2"
    assert (shown["accumulation"], shown["stages"], shown["bubble"]) == ("4", "2, 1f1b", "20 %")
    assert "ranks wait" not in done.err
    plan = json.loads(
        hpc_train("plan", file, "--json", *_MICRO_BATCHES, _ON_4, "parallel.strategy=pipeline").out
    )
    assert plan["runs"][0]["degrees"] == {"pipeline": 4, "replicate": 1, "shard": 1, "tensor": 1}
    assert plan["runs"][0]["bubble"] == 3 / 11


def test_a_plan_says_what_makes_ranks_wait_less(file: Path) -> None:
    more = "optimization.micro_batch_size=8"
    done = hpc_train("plan", file, *_MICRO_BATCHES, more, _ON_4, "parallel.strategy=pipeline")
    assert "ranks wait 43 % of a step, which has 4 micro-batches" in done.err
    assert "smaller micro_batch_size or a larger global_batch_size" in done.err
    done = hpc_train("plan", file, *_MICRO_BATCHES, _ON_4, "parallel.strategy=split")
    assert "under split ranks wait 75 % of a step; pipeline keeps" in done.err


def test_a_plan_of_ranks_that_share_no_layers_has_no_column_for_it(file: Path) -> None:
    heads = hpc_train("plan", file).out.splitlines()[0]
    assert "degrees" not in heads and "bubble" not in heads


def test_a_plan_for_this_machine_has_its_ranks(file: Path) -> None:
    on_slurm = ("optimization.global_batch_size=32", "optimization.micro_batch_size=8", "slurm={nodes: 4}")
    plan = json.loads(hpc_train("plan", file, *on_slurm, "--local", "--devices", "2", "--json").out)
    (run,) = plan["runs"]
    assert (run["ranks"], run["accumulation"], plan["scripts"]) == (2, 2, [])
    refused = hpc_train("plan", file, "--devices", "2")
    assert (refused.code, refused.err) == (2, "--devices: is for this machine; add --local\n")
