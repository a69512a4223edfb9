"""The jobs of ``doctor --submit``: a batch script in which a node reports on itself, without srun.

With several nodes one more job measures the all-reduces of their pairs (``health.pair_bandwidth``). A node
writes its findings to a file in the folder of runs; if it can't, they are its exit code.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from hpc_train.errors import NoSchedulerError, UsageError
from hpc_train.experiment.config.fields import SLURM_WORD_PATTERN
from hpc_train.experiment.config.schema import Job, SlurmConfig
from hpc_train.experiment.workload import workload_of
from hpc_train.launchers.base import Finding, Level
from hpc_train.launchers.machine_checks import (
    REPORT,
    Machine,
    check_folder,
    clock_lead_s,
    judged,
    parsed,
    unusable_runs,
)
from hpc_train.launchers.outcome import last_line
from hpc_train.launchers.slurm import commands, container, job_refusals, profiles, queue, sbatch, script
from hpc_train.launchers.slurm.profiles import Profile
from hpc_train.package_path import PACKAGE_PARENT
from hpc_train.paths import runs_root

_SOURCE = "sbatch"
_TIME_MIN = 5
_PAUSE_MAX_S = 5.0
_MAX_NODES = 64
#: Assumed: a pair of nodes is slow below this fraction of the median, if there are several pairs.
_SLOW_PAIR = 0.5
_PAIR_SCRIPT = Path(PACKAGE_PARENT, "hpc_train", "training", "health", "pair_bandwidth.py")
_KEYS = ("partition", "account", "qos", "constraint", "reservation")
#: Not for a job of one node and a few seconds, or set here.
_OMITTED = {"hold", "nodes", "ntasks", "ntasks-per-node", "time", "dependency", "begin", "exclusive"}


@dataclass
class CheckJob:
    """One job and the node, or list of nodes, that it is for; empty: any."""

    node: str
    report: Path
    num_nodes: int = 1
    job: str = ""
    state: str = ""
    reason: str = ""
    exit_code: str = ""
    host: str = ""
    requeue: str = ""

    @property
    def has_ended(self) -> bool:
        """Whether the job had ended, or Slurm had dropped it, at the last ``update``."""
        return self.state in queue.ENDED | {queue.FORGOTTEN}

    def update(self) -> None:
        """Update the job's state from Slurm."""
        try:
            output = commands.run(["scontrol", "--oneliner", "show", "job", self.job], retry=True)
        except commands.RefusedError:  # dropped
            self.state = queue.FORGOTTEN
            return
        values = commands.fields(commands.job_line(output))
        self.state, self.reason = values.get("JobState", ""), values.get("Reason", "")
        self.exit_code, self.requeue = values.get("ExitCode", ""), values.get("Requeue", "")
        if (host := values.get("BatchHost", "(null)")) != "(null)":
            self.host = host


def check_nodes(experiment: Job | None, nodes: Sequence[str], limit_s: float) -> list[Finding]:
    """Run a job on each node, or on any one, and return the findings.

    With several nodes, or a number in place of names, another job measures their pairs.

    Raises NoSchedulerError, UsageError if ``nodes`` are not names, OSError if this machine can't write to the
    folder of runs.
    """
    slurm = (experiment.slurm if experiment is not None else None) or SlurmConfig()
    profile = profiles.find(slurm.profile)
    count = int(nodes[0]) if len(nodes) == 1 and nodes[0].isdecimal() else None
    names = _hostnames(nodes) if nodes and count is None else [""]
    num_nodes = count or len(names)
    if num_nodes > _MAX_NODES:
        raise UsageError(f"--nodes: {num_nodes} nodes; write at most {_MAX_NODES}")
    runs = runs_root()
    with check_folder(runs) as folder:
        (folder / "marker").touch()
        jobs = [CheckJob(name, folder / f"report-{number}.json") for number, name in enumerate(names)]
        if num_nodes > 1:
            shutil.copy(_PAIR_SCRIPT, folder)
            jobs.append(CheckJob(",".join(filter(None, names)), folder / "pairs", num_nodes))
        try:
            for job in jobs:
                job.job = _submit(job, experiment, slurm, profile, folder)
            _wait(jobs, limit_s)
        except commands.RefusedError as error:
            return [_refused(error, experiment)]
        finally:
            with suppress(NoSchedulerError, commands.RefusedError):  # also after Ctrl-C
                if ids := [job.job for job in jobs if job.job and not job.has_ended]:
                    commands.cancel_jobs(ids)
        lead_s = clock_lead_s(folder)
        return [finding for job in jobs for finding in _judged(job, experiment, runs, lead_s, limit_s)]


def _hostnames(nodes: Sequence[str]) -> list[str]:
    hosts = [word for node in nodes for word in [node.strip()] if word]
    for word in hosts:
        if not re.fullmatch(SLURM_WORD_PATTERN, word):
            raise UsageError(f"--nodes: {word!r} is not a list of nodes; write one like n1,n[3-5]")
    try:
        names = commands.run(["scontrol", "show", "hostnames", ",".join(hosts)]).split()
    except commands.RefusedError as error:
        raise UsageError(f"--nodes: {error.words}; write a list like n1,n[3-5]") from None
    return names


def _submit(job: CheckJob, experiment: Job | None, slurm: SlurmConfig, profile: Profile, folder: Path) -> str:
    python, pyxis = [sys.executable], list[str]()
    if experiment is not None:
        folders = (runs_root(), Path.cwd())
        python = script.python_command(experiment, profile, folders)
        pyxis = container.srun_args(experiment, profile, folders)
    if pyxis and job.num_nodes == 1:  # only srun creates the container
        python = ["srun", "--ntasks=1", *pyxis, *python]
    values = {
        "python": python,
        "folder": folder,
        "marker": folder / "marker",
        "report": job.report,
        "source": REPORT.read_text(encoding="utf-8"),
        "modules": experiment.environment.modules if experiment is not None else [],
        "variables": profile.variables(),
        "site": script.site(slurm, profile),
        "num_nodes": job.num_nodes,
        "pair_script": folder / _PAIR_SCRIPT.name,
        "srun_args": [*profile.srun_args, *pyxis],
    }
    text = "\n".join(script.rendered("check.sh.j2", values)) + "\n"
    parameters = {key: getattr(slurm, key) for key in _KEYS} | {"additional_parameters": dict(slurm.extra)}
    with tempfile.TemporaryDirectory() as temporary:
        path = Path(temporary, "check.sh")
        path.write_text(text, encoding="utf-8")
        options = ["--parsable", *_options(job, slurm, profile)]
        return sbatch.submitted_number([*options, str(path)], script.job_environment(parameters, os.environ))


def _options(job: CheckJob, slurm: SlurmConfig, profile: Profile) -> list[str]:
    options = {key: getattr(slurm, key) or getattr(profile.defaults, key) for key in _KEYS}
    more = {key.replace("_", "-"): value for key, value in (*profile.sbatch.items(), *slurm.extra.items())}
    options |= {"propagate": "NONE"} | {
        key: value for key, value in more.items() if key not in _OMITTED and value is not False
    }
    if slurm.gpus_per_node:
        request = ":".join(filter(None, (slurm.gpu_type or profile.defaults.gpu_type, "1")))
        options |= {"gres": f"gpu:{request}"} if profile.gpus == "gres" else {"gpus-per-node": request}
    fixed = {
        "job-name": "hpc-train-doctor",
        "nodes": job.num_nodes,
        "ntasks": job.num_nodes,
        "time": _TIME_MIN,
        "output": "/dev/null",
        "chdir": "/",
        "requeue": True,
        "nodelist": job.node or None,
    }
    return [
        f"--{key}" if value is True else f"--{key}={value}"
        for key, value in (options | fixed).items()
        if value is not None
    ]


def _wait(jobs: Sequence[CheckJob], limit_s: float) -> None:
    deadline, pause_s = time.monotonic() + limit_s, 0.5
    while True:
        for job in jobs:
            if not job.has_ended:
                job.update()
        if all(job.has_ended for job in jobs) or time.monotonic() >= deadline:
            return
        time.sleep(pause_s)
        pause_s = min(1.5 * pause_s, _PAUSE_MAX_S)


def _refused(error: commands.RefusedError, experiment: Job | None) -> Finding:
    remedy = "give an experiment file with the account, partition and options that this site requires"
    if experiment is not None:
        advice = job_refusals.advice(error.words, experiment)
        remedy = f"{advice.key}: {advice.remedy}"
    problem = f"sbatch rejects a small job: {error.words}"
    effect = "it rejects the jobs of runs for the same reason"
    return Finding(Level.ERROR, "slurm.submit", problem, _SOURCE, effect, remedy)


def _judged(
    job: CheckJob, experiment: Job | None, runs: Path, clock_lead_s: float, limit_s: float
) -> list[Finding]:
    where = f"node {job.host or job.node or '?'}" if job.num_nodes == 1 else f"{job.num_nodes} nodes"
    if not job.has_ended:
        return [_not_ended(job, where, limit_s)]
    if job.num_nodes > 1:
        return [_bandwidth(job)]
    findings = [_may_requeue(job)] if job.requeue else []
    try:
        facts = parsed(job.report.read_text(encoding="utf-8", errors="replace"))
    except (OSError, ValueError):
        return [*findings, _without_report(job, where, runs)]
    gpus = experiment.slurm.gpus_per_node if experiment is not None and experiment.slurm is not None else 0
    wants_gpu = experiment is not None and gpus > 0 and experiment.device != "cpu"
    prefetched = None
    if experiment is not None:
        prefetched = workload_of(experiment).prefetched_bytes(experiment, max(1, gpus))
    machine = Machine(where, facts, runs, wants_gpu, clock_lead_s, True, prefetched)
    return [*findings, *judged(machine)]


def _bandwidth(job: CheckJob) -> Finding:
    source = f"job {job.job}"
    results = [json.loads(path.read_text(encoding="ascii")) for path in job.report.parent.glob("pair-*.json")]
    pairs = {f"{result['node']}-{peer}": rate for result in results for peer, rate in result["pairs"].items()}
    if len(results) < job.num_nodes or not pairs:
        detail = last_line(job.report.with_name(f"{job.report.name}.err")) or f"{job.state} {job.exit_code}"
        effect = "ranks on these nodes can't exchange gradients"
        remedy = "check the nodes' interfaces (NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME, NCCL_DEBUG=INFO)"
        return Finding(Level.ERROR, "slurm.bandwidth", f"no all-reduce: {detail}", source, effect, remedy)
    median = statistics.median(pairs.values())
    slow = {pair: rate for pair, rate in sorted(pairs.items()) if rate < _SLOW_PAIR * median}
    rates = ", ".join(f"{pair} {rate:.2g}" for pair, rate in (slow or dict(sorted(pairs.items()))).items())
    backend = results[0]["backend"]
    summary = f"all-reduce between nodes, {backend}, one rank each, GB/s: {rates}; median {median:.2g}"
    if not slow:
        return Finding(Level.OK, "slurm.bandwidth", summary, source)
    effect = "every step waits for the slowest pair"
    remedy = "exclude a node that is in several of them (slurm.exclude), and tell the administrators"
    return Finding(Level.WARNING, "slurm.bandwidth", summary, source, effect, remedy)


def _not_ended(job: CheckJob, where: str, limit_s: float) -> Finding:
    reason = f" ({job.reason})" if job.state == "PENDING" else ""
    problem = f"job {job.job} is still {job.state.lower()} after {limit_s:.0f} s{reason}; cancelled"
    effect = "the node was not checked"
    remedy = "repeat it with a larger --wait-min, or name nodes that are idle (--nodes)"
    return Finding(Level.WARNING, "slurm.submit", f"{where}: {problem}", _SOURCE, effect, remedy)


def _may_requeue(job: CheckJob) -> Finding:
    source = f"scontrol show job {job.job}"
    if job.requeue != "0":
        return Finding(Level.OK, "slurm.submit", "a job that requests it may be requeued", source)
    problem = "a job that requests --requeue may not be requeued: the site overrides it"
    effect = "nothing resumes automatically; each preemption and time limit needs `hpc-train resume`"
    remedy = "ask the administrators to permit --requeue"
    return Finding(Level.ERROR, "slurm.submit", problem, source, effect, remedy)


def _without_report(job: CheckJob, where: str, runs: Path) -> Finding:
    """Return why a job ended without a report, by its exit code (check.sh.j2)."""
    code = job.exit_code.partition(":")[0]
    if code in {"43", "44"}:
        reason = "it is not there" if code == "43" else "no file can be made in it"
        return unusable_runs(where, runs, reason)
    error_line = last_line(job.report.with_name(f"{job.report.name}.err")).removeprefix("hpc-train: ")
    causes = {
        "41": (
            "machine.modules",
            error_line or "the set-up of the profile or `module load` fails",
            "correct environment.modules, or `setup` of the profile",
        ),
        "42": ("machine.python", "there is no such Python as the login node's", "write environment.python"),
        "45": ("machine.python", "Python fails", "write environment.python"),
    }
    unknown = f"the job ended as {job.state} {job.exit_code}", "see slurmd's log, or ask the administrators"
    check, problem, remedy = causes.get(code, ("slurm.submit", *unknown))
    source, effect = f"job {job.job}", "ranks can't start there"
    return Finding(Level.ERROR, check, f"{where}: {problem}", source, effect, remedy)
