from __future__ import annotations

from typing import Any

import pytest

from hpc_train.experiment.config.schema import SlurmConfig
from hpc_train.experiment.topology.degrees import Ranks
from hpc_train.launchers.slurm.options import device_of_job, ranks

SIZE = Ranks(8, 4)


def slurm(**keys: Any) -> SlurmConfig:
    return SlurmConfig.model_validate({"gpus_per_node": 4, **keys})


@pytest.mark.parametrize(
    "keys", [{"gpu_type": "h100"}, {"constraint": "h100"}, {"extra": {"gres": "gpu:h100:4"}}]
)
def test_the_queue_names_the_gpu(keys: dict[str, Any]) -> None:
    found = device_of_job(slurm(**keys), "auto", SIZE)
    assert (found.is_gpu, found.memory_bytes) == (True, 80 * 2**30)


def test_runs_that_share_a_gpu_have_a_part_of_its_memory() -> None:
    shared = slurm(gpu_type="h100", gpus_per_node=1, runs_per_job=4, runs_per_gpu=4, time_limit="1h")
    found = device_of_job(shared, "auto", SIZE)
    assert (found.name, found.memory_bytes) == ("1/4 of h100", 20 * 2**30)
    size = ranks(shared)
    assert (size.gpus, size.gpu_hours) == (0.25, 0.25)


def test_only_the_gpus_of_gres_have_the_memory_of_a_gpu() -> None:
    gres = "lscratch:gpu_100gb,gpu:a100:4"
    assert device_of_job(slurm(extra={"gres": gres}), "auto", SIZE).memory_bytes == 40 * 2**30
    assert device_of_job(slurm(extra={"gres": "lscratch:gpu_100gb"}), "auto", SIZE).memory_bytes is None


def test_a_gpu_of_any_type_is_unknown() -> None:
    found = device_of_job(slurm(), "auto", SIZE)
    assert (found.is_gpu, found.memory_bytes) == (True, None)
    assert "slurm.gpu_type" in found.remedy


def test_ranks_on_cpus_share_the_nodes_memory() -> None:
    found = device_of_job(slurm(gpus_per_node=0, mem_gb=64), "auto", SIZE)
    assert (found.is_gpu, found.memory_bytes) == (False, 16 * 2**30)
