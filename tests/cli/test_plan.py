from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from hpc_train.cli import preflight
from hpc_train.cli.plan_cost import cost_of, over_budget_lines
from hpc_train.cli.preflight import missing_data
from hpc_train.experiment.config.training_sections import DataConfig
from hpc_train.experiment.plan.input_files import pack_files
from hpc_train.experiment.plan.planning import Plan, make_plan
from hpc_train.experiment.topology.degrees import Ranks
from hpc_train.experiment.validate.loading import Loaded, load
from hpc_train.launchers.base import JobForecast, KeyProblem, StartRequest
from hpc_train.launchers.slurm.launcher import SlurmLauncher
from hpc_train.paths import ExperimentPaths, RunPaths, runs_root
from tests.cli.commands import hpc_train, stderr_of, succeeded
from tests.cli.files import write_images
from tests.cli.launchers import COMPLETING, QUEUEING, SIZED_QUEUE
from tests.plan.files import loaded, plan_on_slurm
from tests.report.made_runs import made_sweep


def test_a_plan_is_a_table_on_stdout(file: Path) -> None:
    done = succeeded("plan", file, "sweep.grid={seed: [1, 2]}")
    heads, first, second = done.out.splitlines()
    assert heads.startswith("run") and heads.endswith("with")
    assert "degrees" not in heads and "bubble" not in heads, "its ranks share no layers"
    assert first.endswith("seed=1") and second.endswith("seed=2")


def test_a_plan_for_slurm_shows_its_script(file: Path) -> None:
    done = succeeded("plan", file, "slurm={nodes: 2, partition: low}", "--script")
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


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--local", "--devices", "8"], "needs at most 4 ranks"),
        (["--script"], "slurm: is missing"),
        (["slurm={profile: nowhere}"], "slurm.profile"),
        (["data={name: imagefolder, root: /nonexist}"], "data.root: /nonexist does not exist on this"),
    ],
)
def test_a_plan_of_what_cannot_be_started_yet_begins_with_the_problem(
    file: Path, options: list[str], problem: str
) -> None:
    done = succeeded("plan", file, *options)
    assert done.out.startswith("run ") and "#SBATCH" not in done.out
    first, *_, last = done.err.splitlines()
    assert problem in first and last.startswith("micro-batches: forward passes per optimizer step")


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


def test_only_runs_that_would_be_submitted_count(tmp_path: Path) -> None:
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


# What ``plan`` says of time and cost, and the budget of GPU-hours.


_ON_4_GPUS = ("slurm={gpus_per_node: 4, time_limit: 2h}", "device=auto", "optimization.epochs=30")
_THROUGHPUT = ("--throughput", "0.016")


def cost(*arguments: str | Path) -> dict[str, Any]:
    done = succeeded("plan", *arguments, "--json")
    found: dict[str, Any] = json.loads(done.out)["cost"]
    return found


def test_without_measured_runs_nothing_is_predicted(file: Path) -> None:
    done = hpc_train("plan", file)
    assert "predicted" not in done.out + done.err
    (run,) = cost(file)["runs"]
    assert (run["duration_s"], run["gpu_hours"], run["measured_runs"]) == (None, None, [])


def test_a_given_throughput_is_that_of_each_rank(file: Path) -> None:
    # 90 steps of 8 samples per rank, 500 s each: 12.5 h, in attempts of 2 h less the time to save.
    done = hpc_train("plan", file, *_ON_4_GPUS, *_THROUGHPUT)
    heads, cells = done.out.splitlines()
    assert "predicted time  predicted GPU-hours" in heads and "12h30m" in cells
    assert "predicted by the given samples per second of a rank" in done.err
    assert "time: 7 attempts, by the time limit of a job" in done.err
    found = cost(file, *_ON_4_GPUS, *_THROUGHPUT)
    (run,) = found["runs"]
    assert (run["step_s"], run["attempts"]) == (500.0, 7)
    assert found["gpu_hours"] == run["gpu_hours"] == pytest.approx(4 * 12.5)
    two = hpc_train("plan", file, *_ON_4_GPUS, *_THROUGHPUT, "sweep.grid={seed: [1, 2]}")
    assert "all 2 runs together: 100 GPU-hours" in two.err


def test_earlier_runs_predict_the_next(tmp_path: Path) -> None:
    """0.945 s for one micro-batch of 4 samples per rank: four take four times as long."""
    (made,) = made_sweep(runs_root(), 1, steps=100)
    file = tmp_path / "next.yaml"
    file.write_text(made.resolved.read_text())  # JSON is YAML
    size = ("optimization.global_batch_size=128", "optimization.steps=1000", "name=other")
    (run,) = cost(file, *size, "--local", "--devices", "8")["runs"]
    assert run["measured_runs"] == [made.folder.name]
    assert run["step_s"] == pytest.approx(4 * 0.945, rel=0.1)
    done = hpc_train("plan", file, *size, "--local", "--devices", "8")
    assert f"time: predicted by run {made.folder.name} (8 ranks, 4 samples per rank and step)" in done.err


def test_a_file_over_its_budget_of_gpu_hours_is_refused(file: Path) -> None:
    over = (file, *_ON_4_GPUS, "slurm.max_gpu_hours=49")
    done = hpc_train("plan", *over, *_THROUGHPUT)
    assert done.code == 65 and "slurm.max_gpu_hours: 49 is less than the 50 GPU-hours that" in done.err
    assert hpc_train("plan", file, *_ON_4_GPUS, "slurm.max_gpu_hours=51", *_THROUGHPUT).code == 0

    # Nothing predicts it: one attempt uses at most 8 GPU-hours, those of two runs 16.
    assert hpc_train("plan", file, *_ON_4_GPUS, "slurm.max_gpu_hours=8").code == 0
    sweep = (file, *_ON_4_GPUS, "slurm.max_gpu_hours=15", "sweep.grid={seed: [1, 2]}")
    for command in (("plan",), ("submit", "--dry-run")):
        done = hpc_train(*command, *sweep)
        assert done.code == 65, command
        assert "15 is less than the 16 GPU-hours that one attempt of each run may use" in done.err
    assert not runs_root().exists()


def test_each_run_of_a_sweep_has_its_share_of_the_budget(file: Path) -> None:
    sweep = ("sweep.grid={seed: [1, 2, 3, 4]}", "slurm={max_gpu_hours: 10}")
    runs = make_plan(load(file, sweep)).runs
    shares = [run.experiment.slurm.max_gpu_hours for run in runs if run.experiment.slurm is not None]
    assert shares == [2.5] * 4


def test_the_budget_of_a_search_is_that_of_all_its_trials(file: Path) -> None:
    """Each trial takes 50 GPU-hours; a submit starts two of the ten."""
    ranges = "parameters: {optimization.optimizer.lr: {uniform: [0.01, 0.1]}}"
    search = f"sweep.search={{trials: 10, max_concurrent: 2, metric: loss, mode: min, {ranges}}}"
    for budget, is_refused in ((499, True), (501, False)):
        loaded = load(file, (*_ON_4_GPUS, search, f"slurm.max_gpu_hours={budget}"))
        trials = [{"optimization.optimizer.lr": lr} for lr in (0.02, 0.03)]
        plan = make_plan(loaded, lambda experiment: Ranks(4, 4, 4, gpus=4), trials=trials)
        lines = over_budget_lines(loaded, plan, "slurm", cost_of(plan, "slurm", 0.016))
        assert bool(lines) == is_refused
        assert not lines or "499 is less than the 500 GPU-hours" in lines[0]


def test_a_plan_with_a_run_over_its_share_is_refused(file: Path) -> None:
    loaded = load(file, (*_ON_4_GPUS, "sweep.grid={optimization.epochs: [2, 30]}", "slurm.max_gpu_hours=60"))
    plan = make_plan(loaded, lambda experiment: Ranks(4, 4, 4, gpus=4))
    (line,) = over_budget_lines(loaded, plan, "slurm", cost_of(plan, "slurm", 0.016))
    assert "is predicted to need 50 GPU-hours, and its share is 30" in line
