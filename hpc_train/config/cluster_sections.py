"""The sections of the experiment file that say where it runs: ``slurm:`` and ``environment:``."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from hpc_train.config.fields import (
    GPU_TYPE_PATTERN,
    MAIL_PATTERN,
    MODULE_PATTERN,
    DurationMin,
    NodeRange,
    PlainName,
    PositiveInt,
    ScriptPath,
    Section,
    SignalLead,
    SlurmWord,
    pattern,
)


class SlurmConfig(Section):
    """What is asked of Slurm. Leaves the mathematics alone."""

    profile: Annotated[
        str,
        pattern(r"[a-z0-9][a-z0-9_-]{0,63}", "1 to 64 lower-case letters, digits, '_' or '-', like generic"),
    ] = "generic"
    """A site profile by name: what this cluster wants, in a file of its own."""
    partition: SlurmWord | None = None
    """Partition; absent: the site's default."""
    nodes: PositiveInt | NodeRange = 1
    """Nodes, or ``2-8`` for any number between (the run goes on with as many as each start gets)."""
    gpus_per_node: Annotated[int, Field(ge=0, le=64)] = 0
    """GPUs of each node; 0: none."""
    gpu_type: Annotated[str, pattern(GPU_TYPE_PATTERN, "one word like a100 or nvidia_h100")] | None = None
    """Kind of GPU as the site calls it; absent: any."""
    ranks_per_node: PositiveInt | None = None
    """Processes on each node; absent: one a GPU, or one."""
    cpus_per_gpu: PositiveInt | None = None
    """Cores a GPU (a rank, without GPUs), dealt out evenly to the ranks; absent: the site's default."""
    mem_gb: PositiveInt | None = None
    """Memory of each node in GB; absent: the site's default."""
    time_limit: DurationMin | None = None
    """``90min``, ``24h``, ``2-12:00:00``; absent: the partition's."""
    signal_lead_s: SignalLead | None = None
    """Seconds between the warning and the time limit, for the last save; absent: three times the longest
    save so far and a minute, 120 before there is one; never more than half the time limit."""
    account: SlurmWord | None = None
    """Account that is charged."""
    qos: SlurmWord | None = None
    """Quality of service."""
    constraint: SlurmWord | None = None
    """Node features."""
    exclude: SlurmWord | None = None
    """Nodes to leave out."""
    reservation: SlurmWord | None = None
    """Reservation."""
    dependency: SlurmWord | None = None
    """Dependency, as sbatch takes it."""
    mail: Annotated[str, pattern(MAIL_PATTERN, "an address like ada@example.org")] | None = None
    """Address that Slurm writes to at the end or failure; absent: no mail."""
    extra: dict[PlainName, str | int | bool] = {}
    """More options of sbatch by long name; those that hpc-train owns are refused."""


class EnvironmentConfig(Section):
    """What stands ready on the nodes before Python starts."""

    python: ScriptPath | None = None
    """The interpreter; absent: the one that submits, or in a container its ``python3``."""
    modules: list[Annotated[str, pattern(MODULE_PATTERN, "a module's name like cuda/12.8")]] = []
    """``module load`` these, in this order."""
    container: ScriptPath | None = None
    """An Apptainer image to run in; absent: none."""
    strict: bool = False
    """Refuse to go on with other versions of Python, torch or this package than a checkpoint was saved with;
    ``false``: warn."""
