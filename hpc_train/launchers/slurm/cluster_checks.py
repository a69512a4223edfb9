"""What of a Slurm's configuration would make runs fail, or lose work: one function per check.

Called by ``launcher`` for ``doctor``. Nothing is asked here: all is in the ``Subject``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

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
from hpc_train.launchers.slurm.cluster_facts import ClusterFacts, Partition
from hpc_train.paths import ExperimentPaths, runs_root

_CONFIG = "scontrol show config"
_ADMINISTRATORS = "ask the administrators for {} (slurm.conf)"
#: Assumed, while no run of this user has saved: a model of a few GB on a shared disk.
ASSUMED_SAVE_S = 10.0
#: For ranks that lost a peer to write why. Assumed.
_KILL_WAIT_S = 5
#: A sweep of more runs than fit into one array. Assumed: most are smaller.
_ARRAY_SIZE = 100
#: Without accounting ``status`` has only this long to learn how a job ended. Assumed.
_JOB_AGE_S = 60
#: A dead node's job waits that long before it is requeued. Slurm's own: 300.
_NODE_TIMEOUT_S = 3600
#: The least that a job can do with its time: as long as it is before the signal.
_LEADS = 2
_EXPERIMENTS_LOOKED_AT = 50
#: Key of a request in the section → the check that reports it, and where it was read.
_SOURCES = {
    "account": ("slurm.account", "sacctmgr show user $USER withassoc"),
    "time_limit": ("slurm.time-limit", "scontrol show partition"),
    "qos": ("slurm.request", "sacctmgr show qos"),
    "reservation": ("slurm.request", "scontrol show reservation"),
}
_OTHER_SOURCE = ("slurm.request", "sinfo, scontrol show partition")
_CODE = re.compile(r"\d+(?:-\d+)?")
#: What batch scripts exit with: failed, requeued, wrong file.
_EXIT_CODES = (1, 2, 3, 65, 74, 75)


@dataclass(frozen=True)
class Subject:
    """What is checked: a cluster, and with ``slurm`` a file's request."""

    facts: ClusterFacts
    slurm: SlurmConfig | None = None
    #: The longest save so far; None while there is none.
    longest_save_s: float | None = None
    #: Seconds between the signal and the time limit.
    lead_s: int = options.FIRST_LEAD_S
    place: Callable[[str], str] = str

    @property
    def save_s(self) -> float:
        return ASSUMED_SAVE_S if self.longest_save_s is None else self.longest_save_s

    @property
    def save_words(self) -> str:
        known = self.longest_save_s is not None
        return f"the longest save so far took {self.save_s:.1f} s" if known else "a save may take 10 s"

    @property
    def used(self) -> list[Partition]:
        """The partitions to which the file submits, or the default one."""
        return request_checks.used(self.slurm or SlurmConfig(), self.facts)

    def level_of(self, partition: Partition) -> Level:
        """Return the level of what makes jobs of the partition fail."""
        return Level.ERROR if partition in self.used else Level.WARNING


def check(request: CheckRequest) -> list[Finding]:
    """Return the findings on the cluster, and on the file's request.

    Raises NoSchedulerError where there is no Slurm here.
    """
    try:
        subject = _subject(request)
    except (commands.NoAnswerError, commands.RefusedError) as error:
        why = "nothing can be submitted meanwhile; runs in the queue are not affected"
        remedy = "repeat the command later, or ask the administrators"
        return [Finding(Level.ERROR, "slurm.answer", str(error), "scontrol, sinfo", why, remedy)]
    found = [finding for each in CHECKS for finding in each(subject)]
    if request.experiment is not None and request.experiment.slurm is None:
        why = "the file can be started with --local only"
        missing = "the file has no section slurm"
        found.append(Finding(Level.WARNING, "slurm.section", missing, "", why, "write `slurm: {}`"))
    return found


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
    experiments = [ExperimentPaths(each) for each in folders if each.name[:1] != "." and each.is_dir()]
    return max((save_s for each in experiments for save_s in options.saves_s(each)), default=None)


def requests(subject: Subject) -> Iterator[Finding]:
    """What the file requests, and Slurm would refuse or never start."""
    if subject.slurm is None:
        return
    may_change = subject.facts.rewrites_requests
    why = "Slurm rejects the job, or accepts it and never starts it"
    for problem in request_checks.problems(subject.slurm, subject.facts):
        name, source = _SOURCES.get(problem.key.partition(".")[2], _OTHER_SOURCE)
        yield Finding(
            Level.WARNING if may_change else Level.ERROR,
            name,
            f"{subject.place(problem.key)}: {problem.message}",
            source,
            f"{why}, unless a plug-in of this site changes the request" if may_change else why,
            problem.remedy,
        )


def configuration(check: str, level: Level, what: str, why: str, remedy: str) -> Finding:
    """Return a finding on a setting of slurm.conf."""
    return Finding(level, f"slurm.{check}", what, _CONFIG, why, remedy)


def fine(check: str, what: str, source: str = _CONFIG) -> Finding:
    """Return that a check found nothing wrong."""
    return Finding(Level.OK, f"slurm.{check}", what, source)


def requeue(subject: Subject) -> Iterator[Finding]:
    """JobRequeue."""
    if subject.facts.number("JobRequeue") != 0:
        yield fine("requeue", "JobRequeue = 1")
        return
    yield configuration(
        "requeue",
        Level.WARNING,
        "JobRequeue = 0: jobs are not requeued unless they request it",
        "hpc-train's jobs request it (--requeue), but a site that turns it off may reject that too; then "
        "nothing resumes automatically after a preemption, a time limit or a node's death",
        "run `hpc-train doctor --submit`, which reads whether its job may be requeued; if it may not, "
        + _ADMINISTRATORS.format("JobRequeue=1"),
    )


def preempt_mode(subject: Subject) -> Iterator[Finding]:
    """PreemptMode of each partition whose jobs can be preempted."""
    kind = subject.facts.text("PreemptType")
    if kind == "preempt/qos":
        yield configuration(
            "preempt-mode",
            Level.WARNING,
            f"PreemptType = {kind}: who preempts whom depends on the QOS, which is not checked",
            "a save that takes longer than the GraceTime of the job's QOS is lost, and with PreemptMode "
            "cancel the job",
            "compare `sacctmgr show qos format=name,preempt,preemptmode,gracetime` with your saves",
        )
    for partition, mode in _preemptable(subject.facts):
        source = f"scontrol show partition {partition.name}"
        label = f"partition {partition.name}: PreemptMode = {mode}"
        if mode.startswith("CANCEL"):
            fits = _grace_s(partition, subject.facts) >= save_window.needed_s(subject.save_s)
            yield Finding(
                Level.WARNING if fits else subject.level_of(partition),
                "slurm.preempt-mode",
                f"{label}: preempted jobs are cancelled, not requeued",
                source,
                "a job that has not saved and left within GraceTime ends for good; hpc-train requeues only "
                "those that have",
                _ADMINISTRATORS.format(f"PreemptMode=REQUEUE in partition {partition.name}")
                + ", or submit to a partition that is not preempted",
            )
        elif mode.startswith(("SUSPEND", "GANG")):
            yield Finding(
                Level.WARNING,
                "slurm.preempt-mode",
                f"{label}: preempted jobs are stopped where they are",
                source,
                "ranks get no signal, save nothing and keep their GPUs' memory; the job that preempts them "
                "may find none",
                _ADMINISTRATORS.format(f"PreemptMode=REQUEUE in partition {partition.name}"),
            )
        else:
            yield fine("preempt-mode", label, source)


def grace(subject: Subject) -> Iterator[Finding]:
    """GraceTime of each partition whose jobs can be preempted."""
    needed_s = save_window.needed_s(subject.save_s)
    for partition, _ in _preemptable(subject.facts):
        source = f"scontrol show partition {partition.name}"
        grace_s = _grace_s(partition, subject.facts)
        given = partition.values.get("GraceTime", "0")
        label = f"partition {partition.name}: GraceTime = {given} s"
        label += f", so KillWait's {grace_s} s count" if given == "0" else ""
        if grace_s >= needed_s:
            yield fine("grace", label, source)
            continue
        yield Finding(
            subject.level_of(partition) if subject.longest_save_s is not None else Level.WARNING,
            "slurm.grace",
            f"{label}: shorter than a save",
            source,
            f"{subject.save_words}, and a step and maybe another save must end before: {needed_s:.0f} s. A "
            "job that is killed before continues from the newest checkpoint and loses the steps since",
            _ADMINISTRATORS.format(f"GraceTime={needed_s:.0f} in partition {partition.name}")
            + ", or write a smaller checkpoint.every_min",
        )


def kill_wait(subject: Subject) -> Iterator[Finding]:
    """KillWait."""
    found = subject.facts.number("KillWait")
    measured = subject.longest_save_s
    needed = _KILL_WAIT_S if measured is None else max(_KILL_WAIT_S, round(measured) + 1)
    if found is None:
        return
    if found >= needed:
        yield fine("kill-wait", f"KillWait = {found} s")
        return
    yield configuration(
        "kill-wait",
        Level.WARNING,
        f"KillWait = {found} s: shorter than {needed} s",
        "that is all that ranks get to save at `scontrol requeue` and to write why they end after another "
        "rank's crash",
        _ADMINISTRATORS.format(f"KillWait={max(needed, 30)}") + ", or write a smaller checkpoint.every_min",
    )


def array_size(subject: Subject) -> Iterator[Finding]:
    """MaxArraySize."""
    found = subject.facts.number("MaxArraySize")
    if found is None:
        return
    if found >= _ARRAY_SIZE:
        yield fine("array-size", f"MaxArraySize = {found}")
        return
    yield configuration(
        "array-size",
        Level.WARNING,
        f"MaxArraySize = {found}: an array has at most {max(found - 1, 0)} as its highest index",
        "a larger sweep becomes several jobs, and sweep.max_parallel applies to each of them",
        "write smaller sweeps, or " + _ADMINISTRATORS.format("a larger MaxArraySize"),
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
    """MinJobAge where there is no accounting."""
    found = subject.facts.number("MinJobAge")
    if found is None:
        return
    if found == 0 or found >= _JOB_AGE_S or subject.facts.has_accounting:
        yield fine("job-age", f"MinJobAge = {found} s")
        return
    yield configuration(
        "job-age",
        Level.WARNING,
        f"MinJobAge = {found} s: Slurm drops jobs {found} s after their end, and there is no accounting",
        "`status` of a job that was killed can't say why",
        _ADMINISTRATORS.format("MinJobAge=300 or accounting"),
    )


def node_timeout(subject: Subject) -> Iterator[Finding]:
    """SlurmdTimeout."""
    found = subject.facts.number("SlurmdTimeout")
    if found is None:
        return
    if 0 < found <= _NODE_TIMEOUT_S:
        yield fine("node-timeout", f"SlurmdTimeout = {found} s")
        return
    never = found == 0
    yield configuration(
        "node-timeout",
        Level.ERROR if never else Level.WARNING,
        f"SlurmdTimeout = {found} s: a dead node is {'never' if never else 'late'} set down",
        f"Slurm {'never requeues' if never else f'waits {found} s to requeue'} the jobs of a node that dies",
        _ADMINISTRATORS.format("SlurmdTimeout=300"),
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
    found, source = subject.facts.associations, "sacctmgr show user $USER withassoc"
    if found is None or not subject.facts.enforces("associations"):
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
        accounts = list(dict.fromkeys(each.account for each in found))
        yield fine("account", f"accounts: {', '.join(accounts[:8])}", source)


def exit_codes(subject: Subject) -> Iterator[Finding]:
    """RequeueExit and RequeueExitHold."""
    for name in ("RequeueExit", "RequeueExitHold"):
        text = subject.facts.text(name)
        if codes := [code for code in _EXIT_CODES if _contains(text, code)]:
            holds = " and held until somebody releases them" if name.endswith("Hold") else ""
            yield configuration(
                "exit-codes",
                Level.ERROR,
                f"{name} = {text}: jobs that end with {', '.join(map(str, codes))} are requeued{holds}",
                "hpc-train's batch script ends with these codes when a run has failed for good, or has been "
                "requeued already",
                _ADMINISTRATORS.format(f"a {name} without them"),
            )


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
        _ADMINISTRATORS.format("proctrack/cgroup"),
    )


#: In the order in which they are reported.
CHECKS: tuple[Callable[[Subject], Iterator[Finding]], ...] = (
    partition_state, requests, account, time_limit, signal_lead, requeue, preempt_mode, grace, kill_wait,
    node_timeout, exit_codes, array_size, accounting, job_age, process_tracking,
)  # fmt: skip


def _preemptable(facts: ClusterFacts) -> Iterator[tuple[Partition, str]]:
    """Yield each partition whose jobs another one preempts, and its PreemptMode."""
    for partition in facts.partitions:
        mode = partition.values.get("PreemptMode") or facts.config.get("PreemptMode", "OFF")
        if save_window.grace_s_of(partition.values, facts.config) is None:
            continue
        higher = [other for other in facts.partitions if _tier(other) > _tier(partition)]
        nodes = _names(facts, partition)
        if any(nodes & _names(facts, other) for other in higher):
            yield partition, mode


def _names(facts: ClusterFacts, partition: Partition) -> set[str]:
    return {node.name for node in facts.nodes_of(partition.name)}


def _tier(partition: Partition) -> int:
    text = partition.values.get("PriorityTier", "1")
    return int(text) if text.isdecimal() else 1


def _grace_s(partition: Partition, facts: ClusterFacts) -> int:
    return save_window.grace_s_of(partition.values, facts.config) or 0


def _contains(text: str, code: int) -> bool:
    """Tell whether a list of exit codes, such as ``1,70-80``, has this one."""
    for word in text.split(","):
        if _CODE.fullmatch(word):
            low, _, high = word.partition("-")
            if int(low) <= code <= int(high or low):
                return True
    return False
