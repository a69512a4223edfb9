"""Memory and CPU time of a run's jobs by ``sacct``, for ``status``."""

from __future__ import annotations

import re

from hpc_train.errors import NoSchedulerError
from hpc_train.launchers.base import JobUsage
from hpc_train.launchers.slurm import commands
from hpc_train.paths import RunPaths
from hpc_train.run.attempts import job_ids
from hpc_train.run.run_status import run_facts

_FIELDS = ("jobid", "nnodes", "cputimeraw", "totalcpu", "maxrss", "ntasks", "reqmem", "end")
_SIZE = re.compile(r"([\d.]+)([KMGTP]?)")
_GIB = {"": 1 / 1024**3, "K": 1 / 1024**2, "M": 1 / 1024, "G": 1.0, "T": 1024.0, "P": 1024.0**2}
_TIME = re.compile(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)(?:\.(\d+))?")
_LIMIT_S = 20.0
#: As ``sacct`` prints the end of a job that runs or waits.
_NOT_ENDED = {"", "Unknown", "None"}


def job_usage(paths: RunPaths) -> JobUsage | None:
    """Return the usage of the run's jobs; None without jobs, accounting or an answer."""
    facts, here = run_facts(paths), commands.cluster_name()
    clusters = [*(facts.get("slurm_clusters") or []), *([None] * len(job_ids(facts)))]
    ids = [job for job, home in zip(job_ids(facts), clusters, strict=False) if home in {None, here}]
    if not ids:
        return None
    argv = ["sacct", "--duplicates", "--noheader", "--parsable2", f"--jobs={','.join(ids)}"]
    try:
        output = commands.run([*argv, f"--format={','.join(_FIELDS)}"], limit_s=_LIMIT_S)
    except (NoSchedulerError, commands.RefusedError):
        return None
    return parsed(output)


def parsed(output: str) -> JobUsage | None:
    """Read lines of ``_FIELDS``: each job, followed by its steps; None without jobs."""
    lines = [dict(zip(_FIELDS, line.split("|"), strict=False)) for line in output.splitlines()]
    rows = [line for line in lines if len(line) == len(_FIELDS)]
    jobs = [row for row in rows if "." not in row["jobid"]]
    if not jobs:
        return None
    # While a job runs, its allocated time grows and its used time is 0.
    ended = [row for row in jobs if row["end"] not in _NOT_ENDED]
    allocated_s = sum(int(row["cputimeraw"]) for row in ended if row["cputimeraw"].isdecimal())
    used_s = sum(seconds(row["totalcpu"]) for row in ended)
    peaks = [peak for row in rows if (peak := _node_peak(row)) is not None]
    requested = [size / _num_nodes(row) for row in jobs if (size := gib(row["reqmem"]))]
    return JobUsage(
        max(peaks, default=None),
        max(requested, default=None),
        # Without a gatherer of accounting Slurm knows of no CPU time.
        min(1.0, used_s / allocated_s) if allocated_s and used_s else None,
    )


def _node_peak(row: dict[str, str]) -> float | None:
    """Return the memory of a step on one node: MaxRSS is that of the largest task."""
    size = gib(row["maxrss"])
    if not size or not row["ntasks"].isdecimal() or not row["nnodes"].isdecimal():
        return size or None
    return size * max(1, -(-int(row["ntasks"]) // _num_nodes(row)))


def _num_nodes(row: dict[str, str]) -> int:
    return max(1, int(row["nnodes"])) if row["nnodes"].isdecimal() else 1


def gib(text: str) -> float | None:
    """Return ``1536M`` as 1.5; None for anything else."""
    match = _SIZE.fullmatch(text)
    try:
        return float(match[1]) * _GIB[match[2]] if match else None
    except ValueError:
        return None


def seconds(text: str) -> float:
    """Return ``1-02:03:04`` or ``03:04.567`` in seconds; 0 for anything else."""
    match = _TIME.fullmatch(text)
    if match is None:
        return 0.0
    days, hours, minutes, secs = (int(part or 0) for part in match.groups()[:4])
    return ((days * 24 + hours) * 60 + minutes) * 60 + secs + float(f"0.{match[5] or 0}")
