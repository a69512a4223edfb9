"""The stand-in for a GPU: it is a CUDA device to torch, and training on it is training."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import fake_cuda
from tests.end_to_end.runs import final_tensors, submit
from tests.gpu.test_gpu import SGD, SHORT, assert_losses_are_close, tensors_of
from tests.waiting import HANG_LIMIT_S

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(fake_cuda.why_not()), reason=fake_cuda.why_not() or "it can be made"),
]
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


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in fake_cuda.environment().items():
        monkeypatch.setenv(name, value)


def _printed(program: str, **variables: str) -> Any:
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | fake_cuda.environment() | variables,
        capture_output=True,
        text=True,
        check=False,
        timeout=HANG_LIMIT_S,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_the_device_is_one_of_cuda_to_torch() -> None:
    wait = "called a synchronizing CUDA operation"
    assert _printed(_FACTS) == {
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


def test_two_ranks_train_on_one_device_as_on_the_cpu(stand_in: None, tmp_path: Path) -> None:
    """The whole path of the real command: batches pinned, DDP's buckets, asynchronous saves, evaluation."""
    on_cpu = submit(tmp_path / "cpu", "device=cpu", *SHORT, SGD)
    paths = submit(tmp_path / "cuda", "device=cuda", *SHORT, SGD)
    assert "on 2 × cuda:0" in paths.attempt(1).log(0).read_text()
    assert_losses_are_close(paths, on_cpu, 1e-4)
    ours, theirs = final_tensors(paths), final_tensors(on_cpu)
    torch.testing.assert_close(tensors_of(ours), tensors_of(theirs), rtol=0, atol=1e-4)
