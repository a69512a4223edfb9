"""The device of a rank by the file's request, for the memory that ``plan`` predicts."""

from __future__ import annotations

from hpc_train.config.cluster_sections import SlurmConfig
from hpc_train.plan.devices import Device, gpu_memory_gib
from hpc_train.topology.degrees import Ranks

_GIB = 2**30


def device_of_job(slurm: SlurmConfig, device: str, size: Ranks) -> Device:
    """Return the job's GPU, or the rank's part of a node's memory. ``device``: the file's key."""
    if slurm.gpus_per_node == 0 or device == "cpu":
        share = None if slurm.mem_gb is None else slurm.mem_gb * _GIB // (size.per_node or 1)
        return Device("CPU", is_gpu=False, memory_bytes=share, remedy="write slurm.mem_gb")
    names = (slurm.gpu_type, _gpus_of(slurm.extra.get("gres")), slurm.constraint)
    for name in (text for text in names if isinstance(text, str)):
        if (gib := gpu_memory_gib(name)) is not None:
            return Device(name, is_gpu=True, memory_bytes=int(gib * _GIB))
    shown = slurm.gpu_type or "a GPU of any type"
    return Device(shown, is_gpu=True, memory_bytes=None, remedy="write slurm.gpu_type, like a100_80gb")


def _gpus_of(gres: object) -> str:
    """Return the items of ``--gres`` that are GPUs; others, such as disks, have sizes as well."""
    items = [item.strip() for item in str(gres or "").split(",")]
    return ",".join(item for item in items if item.removeprefix("gres/").startswith("gpu"))
