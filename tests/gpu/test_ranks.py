"""Several ranks, on one GPU over gloo, on two over NCCL; memory, utilization, profile and errors in a run."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from hpc_train.paths import RunPaths
from hpc_train.run.metric_rows import iter_rows
from tests import fake_cuda
from tests.datasets.coco import write_coco
from tests.datasets.sources.masks import write_folder
from tests.end_to_end import test_detection, test_segmentation
from tests.end_to_end.runs import EXPERIMENT, final_tensors, hpc_train, only_run, submit, write_experiment
from tests.gpu.test_gpu import (
    CUDA,
    EMA,
    SGD,
    SHORT,
    VIT,
    VIT_SHORT,
    assert_losses_are_close,
    needs_real_gpu,
    on_gpu,
    submit_on_gpu,
    tensors_of,
)

two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU or none here")
STRATEGIES = ("ddp", "zero1", "zero2", "fsdp", "hsdp", "tensor", "pipeline")


@pytest.fixture(scope="module")
def vit_on_two_cpus(tmp_path_factory: pytest.TempPathFactory) -> RunPaths:
    folder = tmp_path_factory.mktemp("vit_on_two_cpus")
    return submit(folder, "device=cpu", *VIT_SHORT, EMA, text=VIT)


def _train_as_on_the_cpu(strategy: str, on_cpu: RunPaths, folder: Path) -> None:
    overrides = (*VIT_SHORT, EMA, f"parallel.strategy={strategy}", "deterministic=true")
    paths = submit(folder, CUDA, *overrides, text=VIT)
    assert "on 2 × cuda:" in paths.attempt(1).log(0).read_text()
    assert_losses_are_close(paths, on_cpu, 1e-3)
    ours, theirs = final_tensors(paths), final_tensors(on_cpu)
    assert ours.keys() == theirs.keys()
    torch.testing.assert_close(tensors_of(ours), tensors_of(theirs), rtol=0, atol=1e-3)


@on_gpu
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_two_ranks_share_a_gpu_over_gloo(
    strategy: str, vit_on_two_cpus: RunPaths, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(fake_cuda.BACKEND, "gloo")
    _train_as_on_the_cpu(strategy, vit_on_two_cpus, tmp_path)


@on_gpu
@two_gpus
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_two_ranks_train_over_nccl(strategy: str, vit_on_two_cpus: RunPaths, tmp_path: Path) -> None:
    needs_real_gpu("NCCL")
    _train_as_on_the_cpu(strategy, vit_on_two_cpus, tmp_path)


@on_gpu
def test_rows_have_memory_and_utilization_and_a_profile_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_CUDA_NAME", "NVIDIA L4")
    overrides = (*SHORT[:3], SGD, "model.name=tests.gpu.parts:counted", "data.workers=0", "precision=bf16")
    paths = submit_on_gpu(tmp_path, *overrides, "profile={after_steps: 2, steps: 2}")
    rows = [row for row in iter_rows(paths.metrics) if row["split"] == "train"]
    assert all(row["peak_memory_gib"] > 0 for row in rows)
    assert all(row["tflops_per_s"] > 0 and 0 < row["mfu"] < 1 for row in rows[1:]) and len(rows) == 8
    assert "limited by" in paths.attempt(1).profile_table.read_text()
    assert paths.attempt(1).profile_trace.exists()


def _failed(folder: Path, *overrides: str) -> str:
    """Submit a run that fails; return what the command and rank 0 printed."""
    experiment = write_experiment(folder, EXPERIMENT)
    words = (CUDA, *SHORT[:3], *overrides, "--local", "--devices", "1")
    done = hpc_train("submit", experiment, *words, HPC_TRAIN_RUNS=str(folder / "runs"))
    assert done.code != 0, done.err
    return done.err + only_run(folder).attempt(1).log(0).read_text()


@on_gpu
@pytest.mark.alone
def test_a_step_whose_memory_runs_out_names_the_remedy(tmp_path: Path) -> None:
    free, _ = torch.cuda.mem_get_info()
    model = f'model={{name: "tests.gpu.parts:hungry", args: {{sample_bytes: {free // 8}}}}}'
    told = _failed(tmp_path, model)
    assert "optimization.micro_batch_size" in told and "cuda:0" in told


@on_gpu
def test_a_device_error_is_told_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if fake_cuda.is_here():
        monkeypatch.setenv("FAKE_CUDA_FAILS", str(tmp_path / "fails"))
    told = _failed(tmp_path, 'model={name: "tests.gpu.parts:out_of_range"}')
    assert "device-side assert" in told or "uncorrectable ECC error" in told


@on_gpu
@pytest.mark.parametrize("compiled", ["false", "true"])
def test_a_device_that_hangs_ends_the_attempt(compiled: str, tmp_path: Path) -> None:
    """Also under compile, whose launches hold the GIL while the device's queue is full."""
    if compiled == "true":
        needs_real_gpu("Triton compiles")
    model = 'model={name: "tests.gpu.parts:never_done"}'
    limits = ("recovery.hang_after_min=0.2", "recovery.max_crashes=0")
    output = _failed(tmp_path, model, f"compile={compiled}", *limits)
    assert "HangError: rank 0" in output and "made no progress for" in output, output
    assert only_run(tmp_path).attempt(1).stacks(0).stat().st_size > 0


@on_gpu
def test_an_operator_without_a_deterministic_kernel_is_named(tmp_path: Path) -> None:
    needs_real_gpu("the CPU's kernels are deterministic")
    told = _failed(tmp_path, 'model={name: "tests.gpu.parts:not_deterministic"}', "deterministic=true")
    assert "does not have a deterministic implementation" in told


@on_gpu
def test_segmentation_trains_as_on_the_cpu(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    write_folder(tmp_path / "data", train=14, val=5)
    text = test_segmentation.EXPERIMENT.replace("ROOT", str(tmp_path / "data"))
    on_cpu = submit(tmp_path / "cpu", "device=cpu", devices=1, text=text)
    assert_losses_are_close(submit_on_gpu(tmp_path / "gpu", text=text), on_cpu, 1e-3)


@on_gpu
def test_detection_trains_and_evaluates(tmp_path: Path) -> None:
    """Regions are sampled by the device's random numbers, so that losses differ from the CPU's."""
    pytest.importorskip("pycocotools")
    needs_real_gpu("kernels of torchvision")
    root = write_coco(tmp_path / "coco", train=12)
    text = test_detection.EXPERIMENT.replace("ROOT", str(root))
    paths = submit_on_gpu(tmp_path / "gpu", text=text)
    rows = list(iter_rows(paths.metrics))
    assert all(math.isfinite(row["loss"]) for row in rows if row["split"] == "train")
    assert all(0 <= row["map"] <= row["map50"] <= 1 for row in rows if row["split"] == "val")
