"""Device, threads and determinism of a rank."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from hpc_train.errors import BadFileError, BadNodeError
from hpc_train.experiment.data_facts.by_name import has_one_shape
from hpc_train.run.resource_limits import usable_cpus
from hpc_train.training.distributed.device import choose_device, limit_memory, set_determinism, set_threads
from tests.distributed.scripts import run_script
from tests.experiments import tiny_experiment

no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")


@pytest.fixture(autouse=True)
def _torchs_settings_are_put_back(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    threads, fill = torch.get_num_threads(), torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    yield
    torch.set_num_threads(threads)
    torch.set_deterministic_debug_mode("default")
    torch.utils.deterministic.fill_uninitialized_memory = fill  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = torch.backends.cudnn.deterministic = False


def test_cpu_is_taken_where_it_is_asked_for() -> None:
    assert choose_device("cpu", 3, gpus_expected=True) == torch.device("cpu")


@no_gpu
def test_auto_falls_back_to_the_cpu_only_where_no_gpu_was_asked_for() -> None:
    assert choose_device("auto", 0, gpus_expected=False) == torch.device("cpu")
    with pytest.raises(BadNodeError, match=r"^torch finds 0 of the 1 GPUs that Slurm gave it"):
        choose_device("auto", 0, gpus_expected=True)


@pytest.mark.parametrize(("runs_per_gpu", "fraction"), [(1, None), (2, 0.5 - 1.5 / 80), (64, 0.0)])
def test_runs_that_share_a_gpu_are_limited_to_their_part(
    monkeypatch: pytest.MonkeyPatch, runs_per_gpu: int, fraction: float | None
) -> None:
    limits: list[float] = []
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2**30, 80 * 2**30))
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda part, _: limits.append(part))
    limit_memory(torch.device("cpu"), runs_per_gpu)
    assert not limits
    limit_memory(torch.device("cuda", 0), runs_per_gpu)
    assert limits == ([] if fraction is None else [pytest.approx(fraction)])


def show(monkeypatch: pytest.MonkeyPatch, num_gpus: int, visible: str | None) -> list[torch.device]:
    """Let torch find GPUs; return those that become current."""
    taken: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: num_gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible or "")
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    return taken


EIGHT = "0,1,2,3,4,5,6,7"


@pytest.mark.fault(50)
@pytest.mark.parametrize(
    ("num_gpus", "visible", "local_rank", "given"),
    [
        (7, EIGHT, 7, 8),
        (7, EIGHT, 0, 8),
        (0, EIGHT, 3, 8),
        (1, "0,1", 0, 2),
        (7, None, 7, 8),
        (0, None, 0, 1),
    ],
)
def test_a_node_that_lost_a_gpu_is_at_fault(
    monkeypatch: pytest.MonkeyPatch, num_gpus: int, visible: str | None, local_rank: int, given: int
) -> None:
    assert not show(monkeypatch, num_gpus, visible)
    with pytest.raises(BadNodeError, match=f"torch finds {num_gpus} of the {given} GPUs that Slurm gave it"):
        choose_device("cuda", local_rank, gpus_expected=True)


def test_more_ranks_than_gpus_are_a_user_error_without_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    show(monkeypatch, 7, None)
    with pytest.raises(BadFileError, match="local rank 7 has no GPU of its own, this node shows 7"):
        choose_device("cuda", 7, gpus_expected=False)


@pytest.mark.parametrize(
    ("visible", "has_cuda"), [("", True), ("-1", True), ("NoDevFiles", True), (EIGHT, False)]
)
def test_hidden_gpus_and_a_torch_without_cuda_blame_no_node(
    monkeypatch: pytest.MonkeyPatch, visible: str, has_cuda: bool
) -> None:
    show(monkeypatch, 0, visible)
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: has_cuda)
    with pytest.raises(BadFileError, match="needs a GPU"):
        choose_device("auto", 0, gpus_expected=True)


def test_cudas_own_words_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    show(monkeypatch, 0, EIGHT)
    error = "CUDA initialization: Error 802: system not yet initialized\n(Triggered internally"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(warnings.warn(error, stacklevel=1)))
    with pytest.raises(BadNodeError, match=r"gave it; CUDA initialization: .* not yet initialized$"):
        choose_device("auto", 0, gpus_expected=True)


@pytest.mark.fault(50)
def test_a_gpu_that_can_not_be_used_is_the_nodes_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(device: torch.device) -> None:
        raise RuntimeError("CUDA error: all CUDA-capable devices are busy or unavailable\nCompile with")

    show(monkeypatch, 2, "0,1")
    monkeypatch.setattr(torch.cuda, "set_device", refuse)
    words = "device: cuda:1 can't be used: CUDA error: .* busy or unavailable$"
    with pytest.raises(BadNodeError, match=words):
        choose_device("cuda", 1, gpus_expected=True)
    with pytest.raises(BadFileError, match=words):
        choose_device("cuda", 1, gpus_expected=False)


def test_a_rank_that_sees_one_gpu_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for visible in ("3", None):
        taken = show(monkeypatch, 1, visible)
        assert choose_device("auto", 2, gpus_expected=True) == torch.device("cuda", 0)
        assert taken == [torch.device("cuda", 0)]


@pytest.mark.fault(52)
def test_each_rank_takes_its_own_mig_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA shows a process the first of them alone, whatever is listed."""
    for local_rank, name in enumerate(["MIG-a", "MIG-b"]):
        show(monkeypatch, 1, "MIG-a,MIG-b")
        assert choose_device("auto", local_rank, gpus_expected=True) == torch.device("cuda", 0)
        assert os.environ["CUDA_VISIBLE_DEVICES"] == name
    show(monkeypatch, 1, "MIG-a,MIG-b")
    with pytest.raises(BadFileError, match="local rank 2 has no MIG device of its own"):
        choose_device("auto", 2, gpus_expected=True)


@no_gpu
def test_missing_cuda_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BadFileError, match=r"finds no GPU; check whether nvidia-smi does|without CUDA"):
        choose_device("cuda", 0, gpus_expected=False)
    if torch.version.cuda is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
        with pytest.raises(BadFileError, match="hides all"):
            choose_device("cuda", 0, gpus_expected=False)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_a_rank_takes_the_gpu_of_its_number() -> None:
    assert choose_device("auto", 0, gpus_expected=False) == torch.device("cuda", 0)
    assert torch.cuda.current_device() == 0


def test_cores_are_shared_by_the_ranks_of_a_node() -> None:
    assert set_threads(1) == len(usable_cpus()) == torch.get_num_threads()
    assert set_threads(10_000) == 1


def test_a_thread_count_in_the_environment_is_honoured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert set_threads(2) == 3
    monkeypatch.setenv("OMP_NUM_THREADS", "many")
    assert set_threads(10_000) == 1


def test_affinity_is_read_and_not_widened() -> None:
    before = os.sched_getaffinity(0)
    one = {min(before)}
    os.sched_setaffinity(0, one)
    try:
        assert set_threads(1) == 1
        assert os.sched_getaffinity(0) == one
    finally:
        os.sched_setaffinity(0, before)


def test_the_cpu_is_exact_unless_the_file_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CUBLAS_WORKSPACE_CONFIG", "TORCHINDUCTOR_DETERMINISTIC"):
        monkeypatch.setenv(name, "")  # put back at the end, whatever becomes of it
        monkeypatch.delenv(name)
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert not set_determinism(None, cuda, has_one_shape=True)
    assert torch.backends.cudnn.benchmark
    assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ
    assert set_determinism(None, cpu, has_one_shape=True)
    assert torch.are_deterministic_algorithms_enabled()
    assert not torch.backends.cudnn.benchmark
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert not set_determinism(False, cpu, has_one_shape=True)
    assert not torch.are_deterministic_algorithms_enabled()
    assert set_determinism(True, cuda, has_one_shape=True)


@pytest.mark.parametrize(
    ("is_searched", "keys"),
    [
        (True, {}),
        (True, {"data": {"name": "imagefolder", "root": "/d"}}),
        (True, {"data": {"name": "my.data:make", "image_size": 224}}),
        (True, {"task": "my.tasks:Task"}),
        (True, {"task": "segmentation", "data": {"name": "segmentation_folder", "root": "/d"}}),
        (False, {"deterministic": True}),
        (False, {"task": "detection", "data": {"name": "coco", "root": "/d", "image_size": 320}}),
        (False, {"task": "my.tasks:Task", "data": {"name": "coco", "root": "/d", "image_size": 320}}),
        (False, {"task": "my.tasks:Task", "data": {"name": "my.data:make", "image_size": 224}}),
        (False, {"data": {"name": "my.data:make"}}),
        (False, {"data": {"name": "imagefolder", "root": "/d"}, "optimization": {"micro_batch_size": 1}}),
    ],
)
def test_cudnn_times_its_kernels_only_where_all_batches_have_one_shape(
    is_searched: bool, keys: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU, as a rank and the trial of a micro-batch size set it."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    sections = {key: value for key, value in keys.items() if key != "optimization"}
    experiment = tiny_experiment({"global_batch_size": 8, **keys.get("optimization", {})}, **sections)
    set_determinism(experiment.deterministic, torch.device("cuda"), has_one_shape=has_one_shape(experiment))
    assert torch.backends.cudnn.benchmark == is_searched


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_ranks")  # a forked one has imported it
def test_exactness_reaches_the_compiler_without_importing_it() -> None:
    script = """
import sys, torch
from hpc_train.training.distributed.device import set_determinism
set_determinism(None, torch.device("cpu"), has_one_shape=True)
assert "torch._inductor" not in sys.modules
import torch._inductor.config
print(torch._inductor.config.deterministic)
"""
    [done] = run_script(script, 1)
    assert done.stdout.split() == ["True"], done.stderr
