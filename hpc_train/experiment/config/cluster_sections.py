"""The sections of the experiment file that say where a run is executed: ``slurm:`` and ``environment:``."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from hpc_train.experiment.config.fields import (
    GPU_TYPE_PATTERN,
    MAIL_PATTERN,
    MODULE_PATTERN,
    DurationMin,
    NodeRange,
    NotNegativeInt,
    PlainName,
    PositiveInt,
    ScriptPath,
    Section,
    SignalLead,
    pattern,
    slurm_word,
)


class SlurmConfig(Section):
    """The resources to request from Slurm. They do not change the training result."""

    profile: Annotated[
        str,
        pattern(r"[a-z0-9][a-z0-9_-]{0,63}", "1 to 64 lower-case letters, digits, '_' or '-', like generic"),
    ] = "generic"
    """Name of the site profile to use, a file with the settings of this cluster. Default: ``generic``."""
    partition: Annotated[str, slurm_word("gpu-long")] | None = None
    """Partition to submit to. Default: the site's default partition."""
    nodes: PositiveInt | NodeRange = 1
    """Number of nodes, or a range such as ``2-8``: each attempt then uses as many nodes as Slurm allocates.
    """
    spare_nodes: NotNegativeInt = 0
    """Nodes to request in addition to ``nodes``. Ranks use them once another node of the job fails its
    check, dies or is excluded: the next attempt begins in the same allocation. 0: none."""
    gpus_per_node: Annotated[int, Field(ge=0, le=64)] = 0
    """GPUs to request per node. 0: no GPUs."""
    gpu_type: Annotated[str, pattern(GPU_TYPE_PATTERN, "one word like a100 or nvidia_h100")] | None = None
    """GPU type as the site names it. Default: any type."""
    ranks_per_node: PositiveInt | None = None
    """Number of ranks (processes) per node. Default: one per GPU, or one per node without GPUs."""
    cpus_per_gpu: PositiveInt | None = None
    """CPU cores to request per GPU (per rank without GPUs), divided evenly among the ranks. Default: the
    site's default."""
    mem_gb: PositiveInt | None = None
    """Memory to request per node, in GB. Default: the site's default."""
    time_limit: DurationMin | None = None
    """Time limit of the job, such as ``90min``, ``24h`` or ``2-12:00:00``. Default: the partition's limit."""
    runs_per_job: PositiveInt = 1
    """Number of runs of a sweep that train in one job at the same time, each in a slot of its own. The other
    keys are the request of one run: the job requests as many times the ranks, cores, memory and GPUs, on one
    node. 1: a job for each run."""
    max_gpu_hours: Annotated[float, Field(gt=0)] | None = None
    """Budget of GPU-hours for all runs of the file, divided evenly among them. ``plan`` and ``submit`` refuse
    a file that is predicted to need more, or a run of it more than its share; where nothing predicts it, one
    whose runs may use more in one attempt each. A run that has used its share is not requeued. Default: no
    budget."""
    signal_lead_s: SignalLead | None = None
    """Seconds before the time limit at which Slurm signals the ranks to save and stop. Default: 120; once a
    save has been measured, three times the longest save plus one minute. Never more than half the time limit.
    """
    account: Annotated[str, slurm_word("vision-lab")] | None = None
    """Account to charge. Default: the user's default account."""
    qos: Annotated[str, slurm_word("high")] | None = None
    """Quality of service. Default: the site's default."""
    constraint: Annotated[str, slurm_word("a100|h100")] | None = None
    """Node features that are required (``--constraint``). Default: none."""
    exclude: Annotated[str, slurm_word("n3,n[7-9]")] | None = None
    """Nodes to exclude from the allocation. Default: none."""
    reservation: Annotated[str, slurm_word("course-1")] | None = None
    """Reservation to use. Default: none."""
    dependency: Annotated[str, slurm_word("afterok:41")] | None = None
    """Job dependency, in sbatch's syntax. Default: none."""
    mail: Annotated[str, pattern(MAIL_PATTERN, "an address like ada@example.org")] | None = None
    """Address that Slurm notifies when the job ends or fails. Default: no mail."""
    extra: dict[PlainName, str | int | bool] = {}
    """Further sbatch options by their long names. Options that hpc-train sets itself are rejected."""


class EnvironmentConfig(Section):
    """The software environment on the nodes, set up before Python starts."""

    python: ScriptPath | None = None
    """Python interpreter on the nodes. Default: the one that runs ``submit``; in a container, its
    ``python3``."""
    modules: list[Annotated[str, pattern(MODULE_PATTERN, "a module's name like cuda/12.8")]] = []
    """Modules to load with ``module load``, in this order. Default: none."""
    container: ScriptPath | None = None
    """Apptainer image to run in. Default: no container."""
    strict: bool = False
    """Refuse to resume with other versions of Python, torch or this package than the checkpoint was saved
    with. ``false``: warn only."""
