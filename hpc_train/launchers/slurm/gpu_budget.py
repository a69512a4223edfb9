"""Usage of a run's share of ``slurm.max_gpu_hours``, which decides whether another attempt may follow."""

from __future__ import annotations

from hpc_train.paths import RunPaths
from hpc_train.recovery.budgets import GpuHours, gpu_hours_of
from hpc_train.recovery.history import records
from hpc_train.run.attempts import AttemptRecord
from hpc_train.run.files import read_json
from hpc_train.run.run_facts import run_facts

KEY = "slurm.max_gpu_hours"


def used_by(paths: RunPaths, final: AttemptRecord) -> GpuHours | None:
    """Return the GPU hours of the run's attempts up to ``final``, whose end is not on disk yet.

    None if the run has no budget, or no GPUs.
    """
    budget, gpus_per_node = _section(paths, final.attempt)
    if not budget or not gpus_per_node:
        return None
    earlier = [record for record in records(paths) if record.attempt < final.attempt]
    return GpuHours(gpu_hours_of([*earlier, final], gpus_per_node), budget, KEY)


def _section(paths: RunPaths, attempt: int) -> tuple[float | None, int]:
    """Return the run's budget, which is its share of the file's, and the GPUs of a node."""
    if not run_facts(paths).get("changes"):
        section = (read_json(paths.resolved) or {}).get("slurm")
        if isinstance(section, dict):
            budget, gpus = section.get("max_gpu_hours"), section.get("gpus_per_node")
            if isinstance(budget, int | float) and isinstance(gpus, int) and budget > 0:
                return float(budget), gpus
        return None, 0
    from hpc_train.run.create import effective_experiment  # the schema: 0.2 s, which few runs need

    slurm = effective_experiment(paths, attempt).slurm
    return (None, 0) if slurm is None else (slurm.max_gpu_hours, slurm.gpus_per_node)
