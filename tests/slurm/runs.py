"""Jobs of the test cluster: what Slurm says of them, and jobs that take nodes away from others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.slurm.cluster import Cluster
from tests.waiting import HANG_LIMIT_S

_LIMIT_S = HANG_LIMIT_S


@dataclass(frozen=True)
class Job:
    """A job, or one task of an array, as squeue shows it."""

    id: str
    state: str
    reason: str
    #: As Slurm writes them: ``n[1-2]``.
    nodes: str


def squeue(cluster: Cluster) -> dict[str, Job]:
    """Return the jobs that Slurm has in its queue by id, each task of an array by itself (``12_3``)."""
    shown = cluster.run("squeue", "--noheader", "--array", "--states=all", "--format=%i|%T|%r|%N")
    jobs = [Job(*line.strip().split("|")) for line in shown.splitlines()]
    return {job.id: job for job in jobs}


def state(cluster: Cluster, job: str) -> str:
    """Return a job's state as ``scontrol`` remembers it, after its end too; empty if it knows no such job."""
    shown = cluster.run("scontrol", "--oneliner", "show", "job", job, check=False)
    return shown.partition(" JobState=")[2].partition(" ")[0]


def field(cluster: Cluster, job: str, name: str) -> str:
    """Return a field of ``scontrol show job``."""
    shown = cluster.run("scontrol", "--oneliner", "show", "job", job)
    return shown.partition(f" {name}=")[2].split()[0]


def wait_for_state(cluster: Cluster, job: str, *states: str, limit_s: float = _LIMIT_S) -> str:
    """Wait until the job is in one of the states; return that."""
    found: list[str] = []

    def is_there() -> bool:
        found[:] = [state(cluster, job)]
        return found[0] in states

    cluster.wait(is_there, f"job {job} in {' or '.join(states)}", limit_s)
    return found[0]


def sbatch(
    cluster: Cluster, *options: str, wrap: str, user: str | None = None, folder: Path | None = None
) -> str:
    """Submit shell commands; return the job's id. Its output goes to ``folder``, if any, as ``<job>.out``."""
    output = f"--output={folder / '%A.out' if folder else '/dev/null'}"
    return cluster.run(
        "sbatch", "--parsable", "--chdir=/", output, *options, f"--wrap={wrap}", user=user
    ).strip()


def preempt(cluster: Cluster, nodes: Sequence[str]) -> str:
    """Submit a job of the higher partition that wants exactly these nodes alone; return its id.

    It pends until what runs there has gone: Slurm sends SIGTERM to it and, after the grace, requeues it.
    """
    where = (f"--nodes={len(nodes)}", f"--nodelist={','.join(nodes)}")
    return sbatch(cluster, "--partition=high", "--exclusive", *where, wrap="sleep 3600")


@contextmanager
def high_job(cluster: Cluster, nodes: Sequence[str]) -> Iterator[str]:
    """A while in which a job of the higher partition wants these nodes; yields its id at once."""
    job = preempt(cluster, nodes)
    try:
        yield job
    finally:
        cluster.run("scancel", job)


@contextmanager
def grace(cluster: Cluster, seconds: int) -> Iterator[None]:
    """A while in which preempted jobs have this long to leave."""
    change = ("scontrol", "update", "PartitionName=low")
    cluster.run(*change, f"GraceTime={seconds}")
    try:
        yield
    finally:
        cluster.run(*change, f"GraceTime={cluster.settings.grace_s}")
