"""Checks of a Slurm cluster for settings that make runs fail or lose work: one function per check.

Called by ``launcher`` for ``doctor``. The checks read the ``Subject`` only.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from hpc_train.launchers.base import CheckRequest, Finding, KeyProblem, Level, StartRequest
from hpc_train.launchers.slurm import cluster_facts, commands, job_arrays, options, profiles
from hpc_train.launchers.slurm.cluster_facts import ClusterFacts, Partition
from hpc_train.paths import ExperimentPaths, RunPaths, runs_root

_CONFIG = "scontrol show config"
_ADMINISTRATORS = "ask the administrators for {} (slurm.conf)"
#: Assumed, while no run of this user has saved: a model of a few GB on a shared disk.
_ASSUMED_SAVE_S = 10.0
#: For ranks that lost a peer to write why. Assumed.
_KILL_WAIT_S = 5
#: A dead node's job waits that long before it is requeued. Slurm's own: 300.
_NODE_TIMEOUT_S = 3600
_CODE = re.compile(r"\d+(?:-\d+)?")
#: Exit codes of batch scripts: failed, requeued, wrong file.
_EXIT_CODES = (1, 2, 3, 65, 74, 75)
_EXPERIMENTS_LOOKED_AT = 50


@dataclass(frozen=True)
class Subject:
    """The subject of the checks: a cluster, and a file's request."""

    facts: ClusterFacts
    #: The partitions of the file's request, separated by commas; empty: the default one.
    partition: str = ""
    #: The longest save so far; None while there is none.
    longest_save_s: float | None = None
    #: Seconds between the signal and the time limit.
    lead_s: int = options.FIRST_LEAD_S
    place: Callable[[str], str] = str
    #: Why Slurm would refuse the file's job, or never start it; None without a file.
    problems: Sequence[KeyProblem] | None = None

    @property
    def save_s(self) -> float:
        """Seconds that a save may take: the longest so far, else ``_ASSUMED_SAVE_S``."""
        return _ASSUMED_SAVE_S if self.longest_save_s is None else self.longest_save_s

    def level_of(self, partition: Partition) -> Level:
        """Return the level of a problem that makes jobs of the partition fail: an error if it is used."""
        names = self.partition.split(",") if self.partition else []
        is_used = partition.name in names if names else partition is self.facts.default
        return Level.ERROR if is_used else Level.WARNING


def check(request: CheckRequest) -> list[Finding]:
    """Return the findings on the cluster and the file's request. Raises NoSchedulerError without Slurm."""
    try:
        subject = _subject(request)
    except (commands.NoAnswerError, commands.RefusedError) as error:
        effect = "nothing can be submitted meanwhile; runs in the queue are not affected"
        remedy = "repeat the command later, or ask the administrators"
        findings = [Finding(Level.ERROR, "slurm.answer", str(error), "scontrol, sinfo", effect, remedy)]
    else:
        findings = [finding for run_check in CHECKS for finding in run_check(subject)]
    if request.experiment is not None and request.experiment.slurm is None:
        findings = [replace(f, level=Level.WARNING) if f.level is Level.ERROR else f for f in findings]
        effect = "the file can be started with --local only"
        missing = "the file has no section slurm"
        findings.append(Finding(Level.WARNING, "slurm.section", missing, "", effect, "write `slurm: {}`"))
    return findings


def _subject(request: CheckRequest) -> Subject:
    facts, experiment = cluster_facts.read(), request.experiment
    if experiment is None or experiment.slurm is None:
        return Subject(facts, longest_save_s=_longest_save_s(), place=request.place)
    folder = ExperimentPaths(runs_root() / experiment.name)
    run = StartRequest(RunPaths(folder.folder / "doctor"), experiment)
    problems = [problem for job in job_arrays.forecast(folder, [run]) for problem in job.problems]
    experiment = profiles.find(experiment.slurm.profile).applied(experiment)
    assert experiment.slurm is not None
    partition = experiment.slurm.partition or os.environ.get("SBATCH_PARTITION", "")
    longest, lead_s = max(options.saves_s(folder), default=None), options.lead_s(experiment, folder)
    return Subject(facts, partition, longest, lead_s, request.place, problems)


def _longest_save_s() -> float | None:
    """Return how long the longest save of any run here took; None while there is none."""
    root = runs_root()
    folders = sorted(root.iterdir())[:_EXPERIMENTS_LOOKED_AT] if root.is_dir() else []
    experiments = [ExperimentPaths(path) for path in folders if path.name[:1] != "." and path.is_dir()]
    return max((save_s for path in experiments for save_s in options.saves_s(path)), default=None)


def requests(subject: Subject) -> Iterator[Finding]:
    """Requests of the file that Slurm would refuse or never start."""
    source = "sbatch --test-only"
    for problem in subject.problems or ():
        label = f"{subject.place(problem.key)}: {problem.message}"
        effect = "Slurm rejects the job, or accepts it and never starts it"
        yield Finding(Level.ERROR, "slurm.request", label, source, effect, problem.remedy)
    if subject.problems == []:
        yield _fine("request", "Slurm accepts the file's request", source)


def account(subject: Subject) -> Iterator[Finding]:
    """Whether this user may submit."""
    facts, source = subject.facts, "sacctmgr show user $USER withassoc"
    if facts.associations is None or not facts.enforces_associations:
        return
    if facts.accounts:
        yield _fine("account", f"accounts: {', '.join(facts.accounts[:8])}", source)
        return
    message = f"you have no account (AccountingStorageEnforce = {facts.text('AccountingStorageEnforce')})"
    remedy = "ask the administrators for an association"
    yield Finding(Level.ERROR, "slurm.account", message, source, "sbatch rejects every job", remedy)


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
            yield _fine("partition", f"partition {partition.name}: {usable} of {len(nodes)} nodes", source)
            continue
        label, effect = f"partition {partition.name}: {problem}", "jobs that are submitted to it do not start"
        yield Finding(subject.level_of(partition), "slurm.partition", label, source, effect, remedy)


def signal_lead(subject: Subject) -> Iterator[Finding]:
    """Whether saves fit between the signal and the end of a job's time."""
    longest_s = subject.longest_save_s
    over = subject.facts.config.get("OverTimeLimit", "0")
    if longest_s is None or over.startswith("UNLIMITED"):
        return
    given_s = subject.lead_s + 60 * (subject.facts.number("OverTimeLimit") or 0)
    label = f"jobs are signalled {given_s} s before they are killed at their time limit"
    source = subject.place("slurm.signal_lead_s")
    if given_s >= options.SAVES * longest_s:
        yield _fine("signal-lead", label, source)
        return
    label = f"{label}: too little for three saves of {longest_s:.1f} s"
    effect = "a job that is killed before its save is complete loses the steps since the newest checkpoint"
    lead_s = options.SAVES * round(longest_s + 1)
    remedy = f"write slurm.signal_lead_s: {lead_s}, and a time limit of at least twice that"
    yield Finding(Level.ERROR, "slurm.signal-lead", label, source, effect, remedy)


def requeue(subject: Subject) -> Iterator[Finding]:
    """JobRequeue."""
    if subject.facts.number("JobRequeue") != 0:
        yield _fine("requeue", "JobRequeue = 1")
        return
    yield _setting(
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
        yield _setting(
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
            fits = _grace_s(partition, subject.facts) >= options.needed_s(subject.save_s)
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
            yield _fine("preempt-mode", label, source)


def grace(subject: Subject) -> Iterator[Finding]:
    """GraceTime of each partition whose jobs can be preempted."""
    needed_s = options.needed_s(subject.save_s)
    for partition, _ in _preemptable(subject.facts):
        source = f"scontrol show partition {partition.name}"
        grace_s = _grace_s(partition, subject.facts)
        is_measured = subject.longest_save_s is not None
        save = f"the longest save so far took {subject.save_s:.1f} s"
        save = save if is_measured else "a save may take 10 s"
        setting = partition.values.get("GraceTime", "0")
        label = f"partition {partition.name}: GraceTime = {setting} s"
        label += f", so KillWait's {grace_s} s count" if setting == "0" else ""
        if grace_s >= needed_s:
            yield _fine("grace", label, source)
            continue
        yield Finding(
            subject.level_of(partition) if is_measured else Level.WARNING,
            "slurm.grace",
            f"{label}: shorter than a save",
            source,
            f"{save}, and a step and maybe another save must end before: {needed_s:.0f} s. A "
            "job that is killed before continues from the newest checkpoint and loses the steps since",
            _ADMINISTRATORS.format(f"GraceTime={needed_s:.0f} in partition {partition.name}")
            + ", or write a smaller checkpoint.every_min",
        )


def kill_wait(subject: Subject) -> Iterator[Finding]:
    """KillWait."""
    wait_s = subject.facts.number("KillWait")
    measured = subject.longest_save_s
    needed = _KILL_WAIT_S if measured is None else max(_KILL_WAIT_S, round(measured) + 1)
    if wait_s is None:
        return
    if wait_s >= needed:
        yield _fine("kill-wait", f"KillWait = {wait_s} s")
        return
    yield _setting(
        "kill-wait",
        Level.WARNING,
        f"KillWait = {wait_s} s: shorter than {needed} s",
        "that is all that ranks get to save at `scontrol requeue` and to write why they end after another "
        "rank's crash",
        _ADMINISTRATORS.format(f"KillWait={max(needed, 30)}") + ", or write a smaller checkpoint.every_min",
    )


def node_timeout(subject: Subject) -> Iterator[Finding]:
    """SlurmdTimeout."""
    late_s = subject.facts.number("SlurmdTimeout")
    if late_s is None:
        return
    if 0 < late_s <= _NODE_TIMEOUT_S:
        yield _fine("node-timeout", f"SlurmdTimeout = {late_s} s")
        return
    never = late_s == 0
    yield _setting(
        "node-timeout",
        Level.ERROR if never else Level.WARNING,
        f"SlurmdTimeout = {late_s} s: a dead node is {'never' if never else 'late'} set down",
        f"Slurm {'never requeues' if never else f'waits {late_s} s to requeue'} the jobs of a node that dies",
        _ADMINISTRATORS.format("SlurmdTimeout=300"),
    )


def exit_codes(subject: Subject) -> Iterator[Finding]:
    """RequeueExit and RequeueExitHold."""
    for name in ("RequeueExit", "RequeueExitHold"):
        text = subject.facts.text(name)
        if codes := [code for code in _EXIT_CODES if _contains(text, code)]:
            holds = " and held until somebody releases them" if name.endswith("Hold") else ""
            yield _setting(
                "exit-codes",
                Level.ERROR,
                f"{name} = {text}: jobs that end with {', '.join(map(str, codes))} are requeued{holds}",
                "hpc-train's batch script ends with these codes when a run has failed for good, or has been "
                "requeued already",
                _ADMINISTRATORS.format(f"a {name} without them"),
            )


def _preemptable(facts: ClusterFacts) -> Iterator[tuple[Partition, str]]:
    """Yield each partition whose jobs another one preempts, and its PreemptMode."""
    for partition in facts.partitions:
        mode = partition.values.get("PreemptMode") or facts.config.get("PreemptMode", "OFF")
        if options.grace_s_of(partition.values, facts.config) is None:
            continue
        higher = [candidate for candidate in facts.partitions if _tier(candidate) > _tier(partition)]
        nodes = _names(facts, partition)
        if any(nodes & _names(facts, candidate) for candidate in higher):
            yield partition, mode


def _names(facts: ClusterFacts, partition: Partition) -> set[str]:
    return {node.name for node in facts.nodes_of(partition.name)}


def _tier(partition: Partition) -> int:
    text = partition.values.get("PriorityTier", "1")
    return int(text) if text.isdecimal() else 1


def _grace_s(partition: Partition, facts: ClusterFacts) -> int:
    return options.grace_s_of(partition.values, facts.config) or 0


def _contains(text: str, code: int) -> bool:
    for word in text.split(","):
        if _CODE.fullmatch(word):
            low, _, high = word.partition("-")
            if int(low) <= code <= int(high or low):
                return True
    return False


#: In the order in which they are reported.
CHECKS: tuple[Callable[[Subject], Iterator[Finding]], ...] = (
    partition_state, requests, account, signal_lead, requeue, preempt_mode, grace, kill_wait, node_timeout,
    exit_codes,
)  # fmt: skip


def _setting(check: str, level: Level, problem: str, effect: str, remedy: str) -> Finding:
    return Finding(level, f"slurm.{check}", problem, _CONFIG, effect, remedy)


def _fine(check: str, result: str, source: str = _CONFIG) -> Finding:
    return Finding(Level.OK, f"slurm.{check}", result, source)
