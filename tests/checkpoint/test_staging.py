"""Buffers that stay, and what is in them while the tensors that they were copied from keep changing."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from torch import Tensor

from hpc_train.training.checkpoint import staging as staging_module
from hpc_train.training.checkpoint.staging import Contents, Staging, is_finite
from tests.checkpoint.checkpoint_runs import Trainee, octets
from tests.waiting import HANG_LIMIT_S


def tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randn(3, 4, 5, 5, generator=generator)
    return {
        "weight": numbers.clone(),
        "channels_last": numbers.contiguous(memory_format=torch.channels_last),
        "every_other": numbers[:, ::2].transpose(0, 3),
        "bf16": numbers.bfloat16(),
        "fp16": numbers.half(),
        "fp64": numbers.double()[:1, 0, 0, 0],
        "float8": numbers.to(torch.float8_e4m3fn),
        "counter": torch.tensor(7),
        "mask": torch.tensor([True, False, True]),
        "empty": torch.zeros(0, 4),
        "grad": torch.nn.Parameter(torch.ones(3)),
    }


def test_copies_are_bitwise_equal_for_any_dtype_and_layout() -> None:
    sources = tensors()
    staging = Staging(sources)
    staging.begin(sources, ())
    copies = staging.copy()
    assert copies.keys() == sources.keys()
    for name, copy in copies.items():
        assert (copy.shape, copy.dtype) == (sources[name].shape, sources[name].dtype), name
        assert copy.is_contiguous() and octets(copy) == octets(sources[name].detach()), name


def test_what_is_named_is_copied_at_once_and_the_rest_later() -> None:
    buffer, weight = torch.ones(3), torch.ones(3)
    staging = Staging({"buffer": buffer, "weight": weight})
    staging.begin({"buffer": buffer, "weight": weight}, {"buffer"})
    buffer.fill_(2)
    weight.fill_(2)
    copies = staging.copy()
    assert copies["buffer"].tolist() == [1, 1, 1]
    assert copies["weight"].tolist() == [2, 2, 2]


def test_the_buffers_stay_where_they_are() -> None:
    sources = tensors()
    staging = Staging(sources)
    places = {name: tensor.data_ptr() for name, tensor in staging.tensors.items()}
    for _ in range(2):
        staging.begin(sources, ())
        assert {name: tensor.data_ptr() for name, tensor in staging.copy().items()} == places


def test_a_wait_ends_when_all_is_copied_and_when_the_copying_failed() -> None:
    sources = {"weight": torch.ones(3)}
    staging = Staging(sources)
    staging.wait()  # nothing has begun
    staging.begin(sources, ())
    waiter = threading.Thread(target=staging.wait)
    waiter.start()
    assert waiter.is_alive()
    staging.copy()
    waiter.join(HANG_LIMIT_S)
    assert not waiter.is_alive()
    staging.begin({"weight": torch.ones(4)}, ())
    with pytest.raises(ValueError, match="broadcast"):
        staging.copy()
    staging.wait()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_nan_and_infinity_are_found_anywhere(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging_module, "_CHECKED", 16)
    info = torch.finfo(dtype)
    numbers = torch.tensor([info.max, info.min, info.tiny, -0.0, 1.0] * 10, dtype=dtype).reshape(10, 5)
    assert (
        is_finite(numbers) and is_finite(numbers.t()) and is_finite(numbers[:0]) and is_finite(numbers[0, 0])
    )
    for value in (float("nan"), float("inf"), float("-inf")):
        for place in (0, 15, 16, 49):
            wrong = numbers.clone()
            wrong.view(-1)[place] = value
            assert not is_finite(wrong) and not is_finite(wrong.t()), (value, place)


def test_what_has_no_infinity_is_finite() -> None:
    assert is_finite(torch.tensor([2**31 - 1])) and is_finite(torch.tensor([True]))


def test_contents_tell_buffers_from_what_the_optimizer_changes() -> None:
    trainee = Trainee()
    trainee.train(1)
    contents = Contents.of(trainee.state, trainee.strategy, {"a": [1]})
    assert contents.buffers == {
        f"model.{name}" for name, _ in trainee.model.named_buffers() if name != "constant"
    }
    assert {"model.first.weight", "optimizer.first.weight.exp_avg"} <= contents.pieces.keys()


def test_what_is_not_a_tensor_is_copied_too() -> None:
    extra = {"position": {"skipped": [1]}}
    trainee = Trainee()
    contents = Contents.of(trainee.state, trainee.strategy, extra)
    extra["position"]["skipped"].append(2)
    assert contents.rest["extra"] == {"position": {"skipped": [1]}}


def test_the_writing_thread_waits_on_the_ranks_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread begins with device 0."""
    did: list[object] = []
    monkeypatch.setattr(torch.cuda, "set_device", did.append)
    staging = Staging({"weight": torch.ones(3)})
    staging._device = torch.device("cuda", 1)
    staging._event = cast(torch.cuda.Event, SimpleNamespace(synchronize=lambda: did.append("waited")))
    staging.copy()
    assert did == [torch.device("cuda", 1), "waited"]


@pytest.mark.parametrize("is_cuda", [True, False])
def test_no_fork_has_the_pages_that_a_gpu_copies_into(is_cuda: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.ones(1 << 20)
    facts = {name: getattr(weight, name) for name in ("nbytes", "dtype", "shape")}
    source = SimpleNamespace(is_cuda=is_cuda, device=torch.device("cuda", 1), **facts)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
    monkeypatch.setattr(staging_module, "_pin", lambda block, device: False)
    staging = Staging({"weight": cast(Tensor, source)})
    assert ("dc" in flags_of_pages(staging.tensors["weight"])) == is_cuda


def flags_of_pages(tensor: Tensor) -> list[str]:
    """Return the kernel's flags of the tensor's pages; dc: not copied on fork."""
    is_in_range = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, *values = line.split()
        if not name.endswith(":"):
            begin, end = (int(address, 16) for address in name.split("-"))
            is_in_range = begin <= tensor.data_ptr() < end
        elif is_in_range and name == "VmFlags:":
            return values
    raise AssertionError("the tensor is in the memory of this process")


@pytest.mark.parametrize("refusal", [0, 2])
def test_pages_are_unpinned_only_if_they_were_pinned(monkeypatch: pytest.MonkeyPatch, refusal: int) -> None:
    """cudaHostRegister returns 0 for success."""
    runtime = SimpleNamespace(cudaHostRegister=lambda *_: refusal)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    assert staging_module._pin(torch.zeros(3), torch.device("cpu")) == (refusal == 0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_is_copied_into_pinned_memory_while_it_computes() -> None:
    sources = {name: tensor.detach().cuda() for name, tensor in tensors().items()}
    sources["counter"] = torch.tensor(1.0)  # as optimizers keep it
    before = {name: tensor.cpu() for name, tensor in sources.items()}
    staging = Staging(sources)
    assert all(tensor.is_pinned() for tensor in staging.tensors.values() if tensor.numel())
    for _ in range(3):
        torch.cuda._sleep(100_000_000)  # the copies wait for what was begun before
        staging.begin(sources, {"mask"})
        sources["counter"].fill_(9)
        sources["mask"].fill_(False)
        staging.wait()
        for tensor in sources.values():
            tensor.zero_()
        copies = staging.copy()
        for name, copy in copies.items():
            assert octets(copy) == octets(before[name]), name
        for name, tensor in sources.items():
            tensor.copy_(before[name])
