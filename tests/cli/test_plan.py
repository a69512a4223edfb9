from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from hpc_train.cli import preflight
from hpc_train.cli.preflight import missing_data
from hpc_train.experiment.config.training_sections import DataConfig
from hpc_train.experiment.plan.input_files import pack_files
from hpc_train.experiment.plan.planning import Plan
from hpc_train.experiment.validate.loading import Loaded, load
from hpc_train.launchers.base import JobForecast, KeyProblem, StartRequest
from hpc_train.launchers.slurm.launcher import SlurmLauncher
from hpc_train.paths import ExperimentPaths, RunPaths, runs_root
from tests.cli.commands import hpc_train, stderr_of
from tests.cli.files import write_images
from tests.cli.launchers import COMPLETING, QUEUEING, SIZED_QUEUE
from tests.plan.files import loaded, plan_on_slurm


def test_a_plan_is_a_table_on_stdout(file: Path) -> None:
    done = hpc_train("plan", file, "sweep.grid={seed: [1, 2]}")
    assert done.code == 0
    heads, first, second = done.out.splitlines()
    assert heads.startswith("run") and heads.endswith("with")
    assert "degrees" not in heads and "bubble" not in heads, "its ranks share no layers"
    assert first.endswith("seed=1") and second.endswith("seed=2")


def test_a_plan_says_what_cannot_be_started_yet(file: Path) -> None:
    done = hpc_train("plan", file, "--local", "--devices", "8", "--json")
    assert done.code == 0
    assert json.loads(done.out)["runs"]
    assert "needs at most 4 ranks" in done.err


def test_a_plan_for_slurm_shows_its_script(file: Path) -> None:
    done = hpc_train("plan", file, "slurm={nodes: 2, partition: low}", "--script")
    assert done.code == 0
    assert "#SBATCH --partition=low" in done.out
    assert "#SBATCH" not in hpc_train("plan", file, "slurm={nodes: 2, partition: low}").out
    (script,) = json.loads(hpc_train("plan", file, "slurm={nodes: 2}", "--json").out)["scripts"]
    assert script.startswith("#!/bin/bash")


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("digits", "take it out; digits needs none"),
        ("imagefolder", "write the folder that contains train/<class>/ and val/<class>/"),
        (
            "torchvision/CIFAR10",
            "write the folder of torchvision's files, for example data/cifar10, or fetch them with `hpc",
        ),
    ],
)
def test_data_that_prepare_can_not_download_are_not_to_be_fetched(file: Path, name: str, remedy: str) -> None:
    (line,) = missing_data(load(file, [f"data={{name: {name}, root: /nonexist}}"]))
    assert f"/nonexist does not exist on this machine; {remedy}" in line


def test_a_plan_without_a_job_has_no_script(file: Path) -> None:
    (legend,) = hpc_train("plan", file).err.splitlines()
    assert legend.startswith("micro-batches: forward passes per optimizer step")
    done = hpc_train("plan", file, "--script")
    assert (done.code, "#SBATCH" in done.out) == (0, False)
    assert "slurm: is missing" in done.err and "write `slurm: {}`" in done.err


def test_a_plan_whose_script_cannot_be_made_says_why(file: Path) -> None:
    done = hpc_train("plan", file, "slurm={profile: nowhere}")
    assert done.code == 0
    assert done.out.startswith("run ")
    assert "slurm.profile" in done.err


def test_a_plan_shows_the_pack_that_ranks_read(file: Path, tmp_path: Path) -> None:
    write_images(tmp_path / "images")
    root, cache = tmp_path / "images", tmp_path / "packs"
    data = f"data={{name: imagefolder, root: {root}, cache: {cache}, stage: true, image_size: 8}}"
    missing = hpc_train("plan", file, data)
    said = f"data.cache: {cache} has no pack of the images that {root} contains now; run `hpc-train prepare`"
    assert missing.code == 0 and said in missing.err
    assert said in stderr_of(65, "submit", file, data, "--local", "--devices", "1")
    files = pack_files(DataConfig(name="imagefolder", root=str(root), cache=str(cache)))
    assert files is not None
    cache.mkdir()
    files[1].write_bytes(b"four")
    found = hpc_train("plan", file, data)
    staged = "each node copies it to its temporary folder first"
    assert f"data.cache: ranks read {files[1]} (4 bytes); {staged}" in found.err


_MICRO_BATCHES = ("optimization.global_batch_size=32", "optimization.micro_batch_size=4")
_ON_4 = "slurm={ranks_per_node: 4}"


def _cells(table: str) -> dict[str, str]:
    """Return the cells of the first run by their heads."""
    heads, cells = (map(str.strip, filter(None, line.split("  "))) for line in table.splitlines()[:2])
    return dict(zip(heads, cells, strict=True))


def test_a_plan_shows_degrees_and_the_bubble_of_a_pipeline(file: Path) -> None:
    done = hpc_train("plan", file, *_MICRO_BATCHES, _ON_4, "parallel={strategy: pipeline, shard: 2}")
    shown = _cells(done.out)
    assert shown["degrees"] == "pipeline 2 × shard 2"
    assert (shown["accumulation"], shown["stages"], shown["bubble"]) == ("4", "2, 1f1b", "20 %")
    assert "ranks wait" not in done.err
    pipeline = (*_MICRO_BATCHES, _ON_4, "parallel.strategy=pipeline")
    (run,) = json.loads(hpc_train("plan", file, "--json", *pipeline).out)["runs"]
    assert run["degrees"] == {"pipeline": 4, "replicate": 1, "shard": 1, "tensor": 1}
    assert run["bubble"] == 3 / 11


def test_a_plan_says_what_makes_ranks_wait_less(file: Path) -> None:
    more = "optimization.micro_batch_size=8"
    done = hpc_train("plan", file, *_MICRO_BATCHES, more, _ON_4, "parallel.strategy=pipeline")
    assert "ranks wait 43 % of a step, which has 4 micro-batches" in done.err
    assert "smaller micro_batch_size or a larger global_batch_size" in done.err
    done = hpc_train("plan", file, *_MICRO_BATCHES, _ON_4, "parallel.strategy=split")
    assert "under split ranks wait 75 % of a step; pipeline keeps" in done.err


def test_a_plan_for_this_machine_has_its_ranks(file: Path) -> None:
    on_slurm = ("optimization.global_batch_size=32", "optimization.micro_batch_size=8", "slurm={nodes: 4}")
    plan = json.loads(hpc_train("plan", file, *on_slurm, "--local", "--devices", "2", "--json").out)
    (run,) = plan["runs"]
    assert (run["ranks"], run["accumulation"], plan["scripts"]) == (2, 2, [])
    assert json.loads(hpc_train("plan", file, *on_slurm, "--devices", "2", "--json").out) == plan


def test_a_refused_plan_begins_with_the_problem(file: Path) -> None:
    done = hpc_train("plan", file, "data={name: imagefolder, root: /nonexist}")
    first, second, *_ = done.err.splitlines()
    assert "data.root: /nonexist does not exist on this machine" in first
    assert second.startswith("micro-batches: ")


def test_the_launcher_says_how_many_ranks_a_plan_has(file: Path) -> None:
    # Its number counts, not that of the section for Slurm.
    sizes = ("optimization.global_batch_size=64", "slurm={nodes: 8}")
    queue = json.loads(hpc_train("plan", file, *sizes, "--launcher", SIZED_QUEUE, "--json").out)
    (run,) = queue["runs"]
    assert (run["ranks"], run["accumulation"], run["gpu_hours"]) == (6, 2, 1.5)
    assert queue["scripts"] == ["#!/bin/bash\n# 1 runs\n"]
    too_few = hpc_train("plan", file, "--launcher", SIZED_QUEUE)
    assert too_few.code == 0 and "needs at most 4 ranks, one per micro-batch, got 6" in too_few.err
    for devices in (1, 2):
        on_devices = ("--launcher", COMPLETING, "--devices", str(devices))
        (run,) = json.loads(hpc_train("plan", file, *sizes, *on_devices, "--json").out)["runs"]
        assert (run["ranks"], run["gpu_hours"]) == (devices, 0.0)


def test_ranks_that_the_launcher_does_not_know_are_unknown(file: Path) -> None:
    done = hpc_train("plan", file, "slurm={nodes: 2}", "--launcher", QUEUEING)
    shown = _cells(done.out)
    assert (shown["ranks"], shown["accumulation"], shown["GPU-hours"]) == ("unknown", "unknown", "0")
    assert len(done.err.splitlines()) == 1  # the legend


def test_a_queue_takes_no_devices_of_this_machine(file: Path) -> None:
    for command in ("plan", "submit"):
        done = hpc_train(command, file, "--launcher", SIZED_QUEUE, "--devices", "2")
        assert done.code == 2 and done.err.startswith("--devices: is for this machine, launcher tests.cli")


@pytest.mark.slow
def test_a_plan_for_a_thousand_ranks_predicts_a_step(file: Path) -> None:
    overrides = (
        "device=cuda",
        "model={name: timm/test_vit}",
        "parallel={strategy: fsdp}",
        "optimization.global_batch_size=8192",
        "data={name: synthetic, args: {num_samples: 20000, image_size: 32, num_classes: 10}}",
        "slurm={nodes: 128, gpus_per_node: 8, gpu_type: a100, time_limit: 1h}",
        "sweep.grid={seed: [1, 2]}",
    )
    done = hpc_train("plan", file, *overrides, "--memory", "--json")
    first, second = json.loads(done.out)["runs"]
    assert first["ranks"] == 1024 and first["memory_problem"] is None
    assert first["peak_memory_gb"] == pytest.approx(sum(first["memory"].values()), rel=1e-2)
    assert (first["fits"], first["device_memory_gb"]) == (True, 42.95)
    assert first["largest_micro_batch_size"] == 8
    assert first["communication"]["between_nodes_gb"] > 0 and first["flops_per_step"] > 0
    assert {**second, "id": None, "values": None} == {**first, "id": None, "values": None}


def test_a_plan_without_a_prediction_says_so(file: Path) -> None:
    plan = json.loads(hpc_train("plan", file, "--json", "--no-memory").out)
    (run,) = plan["runs"]
    assert (plan["version"], plan["name"], run["total_steps"]) == (1, "tiny", 9)
    assert (run["peak_memory_gb"], run["memory"], run["fits"]) == (None, None, None)
    assert run["memory_problem"] == "not predicted"


class _TwoJobs(SlurmLauncher):
    """A queue that takes two jobs of a user."""

    def forecast(self, folder: ExperimentPaths, runs: Sequence[StartRequest]) -> list[JobForecast]:
        too_many = KeyProblem("sweep", f"{len(runs)} runs", "write less")
        return [JobForecast([run.paths for run in runs], problems=[too_many] if len(runs) > 2 else [])]


def _refused(file: Loaded, plan: Plan) -> list[str]:
    return preflight.never_starting(_TwoJobs(), file, plan.name, preflight.to_submit(plan))


def test_only_runs_that_would_be_submitted_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HPC_TRAIN_RUNS", str(tmp_path / "runs"))
    file = loaded(tmp_path, "sweep.grid={seed: [1, 2, 3, 4]}", more="slurm: {}\n")
    plan = plan_on_slurm(file)
    assert len(_refused(file, plan)) == 1
    for run in plan.runs[:2]:
        paths = RunPaths(runs_root() / plan.name / run.id)
        paths.folder.mkdir(parents=True)
        paths.run.write_text("{}")
    assert _refused(file, plan) == []
    (line,) = preflight.never_starting(_TwoJobs(), file, plan.name, plan.runs)
    assert "sweep: 4 runs" in line
