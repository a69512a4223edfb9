"""Checks of a Slurm configuration for settings that make runs fail or lose work: one function per check.

Called by ``launcher`` for ``doctor``. The checks read the ``Subject`` only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from hpc_train.config.cluster_sections import SlurmConfig
from hpc_train.launchers.base import CheckRequest
from hpc_train.launchers.findings import Finding, Level
from hpc_train.launchers.slurm import (
    cluster_facts,
    commands,
    options,
    profiles,
    request_checks,
    save_window,
)
from hpc_train.launchers.slurm.check_subject import ADMINISTRATORS, Subject, configuration, fine
from hpc_train.launchers.slurm.interruption_checks import (
    exit_codes,
    grace,
    kill_wait,
    node_timeout,
    preempt_mode,
    requeue,
)
from hpc_train.paths import ExperimentPaths, runs_root

#: A sweep of more runs than fit into one array. Assumed: most are smaller.
_ARRAY_SIZE = 100
#: Without accounting ``status`` has only this long to learn how a job ended. Assumed.
_JOB_AGE_S = 60
#: Minimum time limit of a job, as a multiple of the time from the signal to the limit.
_LEADS = 2
_EXPERIMENTS_LOOKED_AT = 50
#: Key of a request in the section → the check that reports it, and the source of its limits.
_SOURCES = {
    "account": ("slurm.account", "sacctmgr show user $USER withassoc"),
    "time_limit": ("slurm.time-limit", "scontrol show partition"),
    "qos": ("slurm.request", "sacctmgr show qos"),
    "reservation": ("slurm.request", "scontrol show reservation"),
}
_OTHER_SOURCE = ("slurm.request", "sinfo, scontrol show partition")


def check(request: CheckRequest) -> list[Finding]:
    """Return the findings on the cluster, and on the file's request.

    Raises NoSchedulerError if there is no Slurm here.
    """
    can_be_queued = request.experiment is None or request.experiment.slurm is not None
    try:
        subject = _subject(request)
    except (commands.NoAnswerError, commands.RefusedError) as error:
        effect = "nothing can be submitted meanwhile; runs in the queue are not affected"
        remedy = "repeat the command later, or ask the administrators"
        findings = [Finding(Level.ERROR, "slurm.answer", str(error), "scontrol, sinfo", effect, remedy)]
    else:
        findings = [finding for run_check in CHECKS for finding in run_check(subject)]
    if not can_be_queued:
        findings = [replace(f, level=Level.WARNING) if f.level is Level.ERROR else f for f in findings]
        effect = "the file can be started with --local only"
        missing = "the file has no section slurm"
        findings.append(Finding(Level.WARNING, "slurm.section", missing, "", effect, "write `slurm: {}`"))
    return findings


def _subject(request: CheckRequest) -> Subject:
    facts, experiment = cluster_facts.read(), request.experiment
    if experiment is None or experiment.slurm is None:
        return Subject(facts, longest_save_s=_longest_save_s(), place=request.place)
    experiment = profiles.find(experiment.slurm.profile).applied(experiment)
    folder = ExperimentPaths(runs_root() / experiment.name)
    return Subject(
        facts,
        experiment.slurm,
        max(options.saves_s(folder), default=None),
        options.lead_s(experiment, folder),
        request.place,
    )


def _longest_save_s() -> float | None:
    """Return how long the longest save of any run here took; None while there is none."""
    root = runs_root()
    folders = sorted(root.iterdir())[:_EXPERIMENTS_LOOKED_AT] if root.is_dir() else []
    experiments = [ExperimentPaths(path) for path in folders if path.name[:1] != "." and path.is_dir()]
    return max((save_s for path in experiments for save_s in options.saves_s(path)), default=None)


def requests(subject: Subject) -> Iterator[Finding]:
    """Requests of the file that Slurm would refuse or never start."""
    if subject.slurm is None:
        return
    may_change = subject.facts.rewrites_requests
    effect = "Slurm rejects the job, or accepts it and never starts it"
    for problem in request_checks.problems(subject.slurm, subject.facts):
        name, source = _SOURCES.get(problem.key.partition(".")[2], _OTHER_SOURCE)
        yield Finding(
            Level.WARNING if may_change else Level.ERROR,
            name,
            f"{subject.place(problem.key)}: {problem.message}",
            source,
            f"{effect}, unless a plug-in of this site changes the request" if may_change else effect,
            problem.remedy,
        )


def array_size(subject: Subject) -> Iterator[Finding]:
    """MaxArraySize."""
    size = subject.facts.number("MaxArraySize")
    if size is None:
        return
    if size >= _ARRAY_SIZE:
        yield fine("array-size", f"MaxArraySize = {size}")
        return
    yield configuration(
        "array-size",
        Level.WARNING,
        f"MaxArraySize = {size}: an array has at most {max(size - 1, 0)} as its highest index",
        "a larger sweep becomes several jobs, and sweep.max_parallel applies to each of them",
        "write smaller sweeps, or " + ADMINISTRATORS.format("a larger MaxArraySize"),
    )


def accounting(subject: Subject) -> Iterator[Finding]:
    """AccountingStorageType."""
    kind = subject.facts.text("AccountingStorageType")
    if subject.facts.has_accounting:
        yield fine("accounting", f"AccountingStorageType = {kind}")
        return
    yield configuration(
        "accounting",
        Level.WARNING,
        f"AccountingStorageType = {kind or '(null)'}: no accounting",
        "runs work, but once Slurm has dropped a job (MinJobAge) nothing tells how it ended unless its ranks "
        "wrote it",
        "nothing to do for training; `sacct` needs accounting_storage/slurmdbd",
    )


def job_age(subject: Subject) -> Iterator[Finding]:
    """MinJobAge without accounting."""
    age_s = subject.facts.number("MinJobAge")
    if age_s is None:
        return
    if age_s == 0 or age_s >= _JOB_AGE_S or subject.facts.has_accounting:
        yield fine("job-age", f"MinJobAge = {age_s} s")
        return
    yield configuration(
        "job-age",
        Level.WARNING,
        f"MinJobAge = {age_s} s: Slurm drops jobs {age_s} s after their end, and there is no accounting",
        "`status` of a job that was killed can't say why",
        ADMINISTRATORS.format("MinJobAge=300 or accounting"),
    )


def partition_state(subject: Subject) -> Iterator[Finding]:
    """State of each partition and of its nodes."""
    for partition in subject.facts.partitions:
        nodes = subject.facts.nodes_of(partition.name)
        usable, state = sum(node.is_usable for node in nodes), partition.values.get("State", "UP")
        source = f"scontrol show partition {partition.name}"
        if not partition.is_up:
            problem, remedy = f"State = {state}", "submit to another partition, or wait until it is up"
        elif not usable:
            problem = f"none of its {len(nodes)} nodes can be used"
            remedy = f"see the reasons: sinfo -R -p {partition.name}; submit to another partition meanwhile"
            source = "sinfo"
        else:
            yield fine("partition", f"partition {partition.name}: {usable} of {len(nodes)} nodes", source)
            continue
        yield Finding(
            subject.level_of(partition),
            "slurm.partition",
            f"partition {partition.name}: {problem}",
            source,
            "jobs that are submitted to it do not start",
            remedy,
        )


def time_limit(subject: Subject) -> Iterator[Finding]:
    """The time that a job gets, and the signal before its end."""
    requested = None if subject.slurm is None else subject.slurm.time_limit
    for partition in subject.facts.partitions:
        source = f"scontrol show partition {partition.name}"
        limit_s = partition.default_time_s if requested is None else requested * 60
        most_s, is_used = partition.max_time_s, partition in subject.used
        if is_used and requested is not None and most_s is not None and requested * 60 > most_s:
            continue  # ``requests`` reports it
        if limit_s is not None and requested is None and limit_s < _LEADS * subject.lead_s:
            yield Finding(
                subject.level_of(partition),
                "slurm.time-limit",
                f"partition {partition.name}: a job that requests no time gets {limit_s} s",
                source,
                f"Slurm signals it {subject.lead_s} s before its end, so it spends its time on saves",
                "write slurm.time_limit",
            )
        elif is_used:
            label = "none" if limit_s is None else f"{limit_s // 60} min"
            yield fine("time-limit", f"partition {partition.name}: time limit of a job: {label}", source)


def signal_lead(subject: Subject) -> Iterator[Finding]:
    """Whether saves fit between the signal and the end of a job's time."""
    longest_s = subject.longest_save_s
    over = subject.facts.config.get("OverTimeLimit", "0")
    if longest_s is None or over.startswith("UNLIMITED"):
        return
    given_s = subject.lead_s + 60 * (subject.facts.number("OverTimeLimit") or 0)
    label = f"jobs are signalled {given_s} s before they are killed at their time limit"
    if given_s >= save_window.SAVES * longest_s:
        yield fine("signal-lead", label, subject.place("slurm.signal_lead_s"))
        return
    yield Finding(
        Level.ERROR,
        "slurm.signal-lead",
        f"{label}: too little for three saves of {longest_s:.1f} s",
        subject.place("slurm.signal_lead_s"),
        "a job that is killed before its save is complete loses the steps since the newest checkpoint",
        f"write slurm.signal_lead_s: {save_window.SAVES * round(longest_s + 1)}, and a time limit of at "
        "least twice that",
    )


def account(subject: Subject) -> Iterator[Finding]:
    """Whether this user may submit, and to the file's account and QOS."""
    associations, source = subject.facts.associations, "sacctmgr show user $USER withassoc"
    if associations is None or not subject.facts.enforces("associations"):
        return
    problems = list(request_checks.accounts(subject.slurm or SlurmConfig(), subject.facts))
    if subject.slurm is None and problems:
        yield Finding(
            Level.ERROR,
            "slurm.account",
            problems[0].message,
            source,
            "sbatch rejects every job",
            problems[0].remedy,
        )
    elif not problems:
        accounts = list(dict.fromkeys(association.account for association in associations))
        yield fine("account", f"accounts: {', '.join(accounts[:8])}", source)


def process_tracking(subject: Subject) -> Iterator[Finding]:
    """ProctrackType."""
    kind = subject.facts.text("ProctrackType")
    if kind.endswith("cgroup"):
        yield fine("process-tracking", f"ProctrackType = {kind}")
        return
    yield configuration(
        "process-tracking",
        Level.WARNING,
        f"ProctrackType = {kind or '(null)'}: without cgroups",
        "processes that leave their job's tree survive its end and may keep a GPU's memory; the check of "
        "nodes then excludes the node",
        ADMINISTRATORS.format("proctrack/cgroup"),
    )


#: In the order in which they are reported.
CHECKS: tuple[Callable[[Subject], Iterator[Finding]], ...] = (
    partition_state, requests, account, time_limit, signal_lead, requeue, preempt_mode, grace, kill_wait,
    node_timeout, exit_codes, array_size, accounting, job_age, process_tracking,
)  # fmt: skip
