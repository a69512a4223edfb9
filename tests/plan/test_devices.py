"""What a step may take of a device's memory."""

from __future__ import annotations

import pytest

from hpc_train.experiment.plan.devices import Device, device_here

GIB = 2**30


def limit_gib(memory_gib: float, communicators: int = 0) -> float:
    limit = Device("GPU", True, int(memory_gib * GIB), communicators=communicators).limit_bytes
    assert limit is not None
    return limit / GIB


#: nvidia-smi's size and torch's total capacity. Of the H200 measured, of the others read in public reports of
#: OutOfMemoryError.
@pytest.mark.parametrize(
    ("memory", "total"), [(140.4, 139.8), (80.0, 79.15), (44.99, 44.53), (24.0, 23.53), (15.0, 14.56)]
)
def test_a_prediction_too_low_by_a_tenth_fits_beside_what_cuda_takes(memory: float, total: float) -> None:
    limit = limit_gib(memory)
    assert limit / 0.9 + 1.4 < total
    assert limit > 0.8 * memory - 1.5, "nor is it wasted"


def test_a_tenth_of_a_small_gpu_is_too_little() -> None:
    """NCCL and CUDA take as much of a T4 as of an H200."""
    assert limit_gib(15) < 0.9 * 16 - 2
    assert limit_gib(140.4) == pytest.approx(0.9 * 140.4, abs=3)


def test_what_ran_on_the_h200_fits() -> None:
    """ConvNeXt-B with micro-batches of 1,024: predicted 123 GB, took 126 GB."""
    assert limit_gib(140.4) * GIB > 123e9


def test_each_communicator_takes_its_buffers() -> None:
    assert limit_gib(80, 0) - limit_gib(80, 3) == pytest.approx(3 * 0.45)


def test_ranks_on_a_cpu_have_neither() -> None:
    cpu = Device("CPU", is_gpu=False, memory_bytes=10 * GIB, communicators=2)
    assert cpu.limit_bytes == 9 * GIB
    assert Device("GPU", is_gpu=True, memory_bytes=None).limit_bytes is None
    assert Device("GPU", is_gpu=True, memory_bytes=GIB).limit_bytes == 0


def test_a_gpu_that_no_driver_describes_has_unknown_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    device = device_here("cuda", 2)
    assert (device.name, device.is_gpu, device.memory_bytes) == ("GPU", True, None)
