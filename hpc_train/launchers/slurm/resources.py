"""What a job's request gives to its ranks: their number, GPUs, cores, time and memory."""

from __future__ import annotations

from hpc_train.config.cluster_sections import SlurmConfig
from hpc_train.launchers.slurm import options
from hpc_train.plan.devices import Device
from hpc_train.plan.gpu_models import gpu_memory_gib
from hpc_train.topology.degrees import Ranks
from hpc_train.validate.slurm_rules import max_nodes, min_nodes, ranks_on_each_node

_GIB = 2**30


def ranks(slurm: SlurmConfig) -> Ranks:
    """Return the ranks of a run with this section."""
    per_node, nodes = ranks_on_each_node(slurm), max_nodes(slurm)
    limit_s = None if slurm.time_limit is None else slurm.time_limit * 60
    gpus = nodes * slurm.gpus_per_node
    gpu_hours = None if limit_s is None else gpus * limit_s / 3600
    return Ranks(
        most=nodes * per_node,
        per_node=per_node,
        fewest=min_nodes(slurm) * per_node,
        gpu_hours=gpu_hours if gpus else 0.0,
        gpus=gpus,
        cores=nodes * cpus_per_node(slurm),
        attempt_s=None if limit_s is None else limit_s - options.lead_of(slurm),
    )


def cpus_per_node(slurm: SlurmConfig) -> int:
    """Return the minimum number of cores that the job needs on each node."""
    per_node = ranks_on_each_node(slurm)
    return max(per_node, (slurm.gpus_per_node or per_node) * (slurm.cpus_per_gpu or 1))


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
