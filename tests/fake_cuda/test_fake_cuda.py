"""The stand-in for a GPU: it is a CUDA device to torch, and training on it is training."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest
import torch

from tests import fake_cuda, warm
from tests.end_to_end.runs import final_tensors, hpc_train, only_run, submit, write_experiment
from tests.gpu.test_gpu import SAVES_ON_ITS_OWN_GPU, SGD, SHORT, assert_losses_are_close, tensors_of
from tests.waiting import HANG_LIMIT_S

Test = TypeVar("Test", bound=Callable[..., None])


def with_stand_in(test: Test) -> Test:
    """Mark a test of processes with the stand-in; where there can be none it is skipped and says why."""
    problem = fake_cuda.why_not()
    missing = pytest.mark.skipif(bool(problem), reason=problem or "it can be made here")
    marked: Test = pytest.mark.slow(missing(test))
    return marked


_FACTS = """
import json, torch
facts = {"devices": torch.cuda.device_count(), "bf16": torch.cuda.is_bf16_supported()}
there = torch.arange(6.0, device="cuda").view(2, 3)
facts["product"] = (there @ there.T).tolist()
facts["is_cuda"] = (there + 1).is_cuda
torch.manual_seed(1)
first = torch.rand(3, device="cuda")
torch.manual_seed(1)
facts["same numbers"] = torch.equal(first, torch.rand(3, device="cuda"))
torch.cuda._sleep(300_000_000)
event = torch.cuda.Event()
event.record()
facts["done early"] = event.query()
torch.cuda.synchronize()
facts["done"] = event.query()
torch.cuda.set_sync_debug_mode("error")
for name, wait in (("to the host", there.cpu), ("a number", there[0, 0].item), ("on the device", there.sum)):
    try:
        wait()
        facts[name] = "no wait"
    except RuntimeError as error:
        facts[name] = str(error)
try:
    torch.empty(8 << 30, device="cuda")
except torch.OutOfMemoryError:
    facts["too much"] = "OutOfMemoryError"
print(json.dumps(facts))
"""


_CHOOSES_FP8 = """
import torch
from hpc_train.training.distributed.device import choose_precision
from hpc_train.errors import UserError
try:
    choose_precision("fp8", torch.device("cuda", 0))
except UserError as error:
    print(" ".join(str(error).split()))
"""


_BINDS = """
import os
import torch
from hpc_train.training.distributed.affinity import bind
from hpc_train.rank.env import RankFacts
mask = os.sched_getaffinity(0)
sharing = bind(RankFacts(1, 2, 1, 2, 0, 1), torch.device("cuda", 1), {"SLURM_CPUS_ON_NODE": str(len(mask))})
print(sharing, os.sched_getaffinity(0) < mask)
"""


@pytest.fixture(autouse=True, scope="module")
def _forked() -> Iterator[None]:
    with fake_cuda.forking():
        yield


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in fake_cuda.environment().items():
        monkeypatch.setenv(name, value)


def _printed(program: str, devices: int = 1, **variables: str) -> str:
    """Return the last line that a program prints with the fake devices."""
    environment = os.environ | fake_cuda.environment(devices) | variables
    pipe = subprocess.PIPE
    with warm.start_script(program, env=environment, stdout=pipe, stderr=pipe, text=True) as process:
        printed, errors = process.communicate(timeout=HANG_LIMIT_S)
    assert process.returncode == 0, errors
    return printed.splitlines()[-1]


@with_stand_in
def test_the_device_is_one_of_cuda_to_torch() -> None:
    wait = "called a synchronizing CUDA operation"
    assert json.loads(_printed(_FACTS)) == {
        "devices": 1,
        "bf16": True,
        "product": [[5.0, 14.0], [14.0, 50.0]],
        "is_cuda": True,
        "same numbers": True,
        "done early": False,
        "done": True,
        "to the host": wait,
        "a number": wait,
        "on the device": "no wait",
        "too much": "OutOfMemoryError",
    }


@with_stand_in
def test_two_ranks_train_on_one_device_as_on_the_cpu(stand_in: None, tmp_path: Path) -> None:
    """The whole path of the real command: batches pinned, DDP's buckets, asynchronous saves, evaluation."""
    on_cpu = submit(tmp_path / "cpu", "device=cpu", *SHORT, SGD)
    paths = submit(tmp_path / "cuda", "device=cuda", *SHORT, SGD)
    assert "on 2 × cuda:0" in paths.attempt(1).log(0).read_text()
    assert_losses_are_close(paths, on_cpu, 1e-4)
    ours, theirs = final_tensors(paths), final_tensors(on_cpu)
    torch.testing.assert_close(tensors_of(ours), tensors_of(theirs), rtol=0, atol=1e-4)


@with_stand_in
def test_a_save_uses_the_gpu_of_its_rank_alone() -> None:
    """In threads, which start with device 0."""
    assert _printed(SAVES_ON_ITS_OWN_GPU, devices=2) == "[False, True]"


@with_stand_in
def test_fp8_is_refused_on_a_gpu_without_its_products() -> None:
    told = _printed(_CHOOSES_FP8, FAKE_CUDA_MAJOR="8")
    assert told.startswith("precision: fp8") and "H100 (stand-in) has 8.0" in told


@with_stand_in
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two CPUs")
def test_a_rank_is_bound_to_its_part_of_the_cores_by_its_gpu() -> None:
    assert _printed(_BINDS, devices=2) == "1 True"


@with_stand_in
def test_memory_that_others_use_is_told(
    stand_in: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_CUDA_OTHERS_MIB", "3000")
    words = ("device=cuda", *SHORT, SGD, "--local", "--devices", "1")
    done = hpc_train("submit", write_experiment(tmp_path), *words, HPC_TRAIN_RUNS=str(tmp_path / "runs"))
    log = only_run(tmp_path).attempt(1).log(0).read_text()
    assert "GiB of cuda:0 are used by other processes" in done.err + log
