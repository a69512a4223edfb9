"""Checks of a Slurm configuration for settings that keep an interrupted run from saving or being requeued."""

from __future__ import annotations

import re
from collections.abc import Iterator

from hpc_train.launchers.findings import Finding, Level
from hpc_train.launchers.slurm import save_window
from hpc_train.launchers.slurm.check_subject import ADMINISTRATORS, Subject, configuration, fine
from hpc_train.launchers.slurm.cluster_facts import ClusterFacts, Partition

#: For ranks that lost a peer to write why. Assumed.
_KILL_WAIT_S = 5
#: A dead node's job waits that long before it is requeued. Slurm's own: 300.
_NODE_TIMEOUT_S = 3600
_CODE = re.compile(r"\d+(?:-\d+)?")
#: Exit codes of batch scripts: failed, requeued, wrong file.
_EXIT_CODES = (1, 2, 3, 65, 74, 75)


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
        + ADMINISTRATORS.format("JobRequeue=1"),
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
                ADMINISTRATORS.format(f"PreemptMode=REQUEUE in partition {partition.name}")
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
                ADMINISTRATORS.format(f"PreemptMode=REQUEUE in partition {partition.name}"),
            )
        else:
            yield fine("preempt-mode", label, source)


def grace(subject: Subject) -> Iterator[Finding]:
    """GraceTime of each partition whose jobs can be preempted."""
    needed_s = save_window.needed_s(subject.save_s)
    for partition, _ in _preemptable(subject.facts):
        source = f"scontrol show partition {partition.name}"
        grace_s = _grace_s(partition, subject.facts)
        setting = partition.values.get("GraceTime", "0")
        label = f"partition {partition.name}: GraceTime = {setting} s"
        label += f", so KillWait's {grace_s} s count" if setting == "0" else ""
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
            ADMINISTRATORS.format(f"GraceTime={needed_s:.0f} in partition {partition.name}")
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
        yield fine("kill-wait", f"KillWait = {wait_s} s")
        return
    yield configuration(
        "kill-wait",
        Level.WARNING,
        f"KillWait = {wait_s} s: shorter than {needed} s",
        "that is all that ranks get to save at `scontrol requeue` and to write why they end after another "
        "rank's crash",
        ADMINISTRATORS.format(f"KillWait={max(needed, 30)}") + ", or write a smaller checkpoint.every_min",
    )


def node_timeout(subject: Subject) -> Iterator[Finding]:
    """SlurmdTimeout."""
    late_s = subject.facts.number("SlurmdTimeout")
    if late_s is None:
        return
    if 0 < late_s <= _NODE_TIMEOUT_S:
        yield fine("node-timeout", f"SlurmdTimeout = {late_s} s")
        return
    never = late_s == 0
    yield configuration(
        "node-timeout",
        Level.ERROR if never else Level.WARNING,
        f"SlurmdTimeout = {late_s} s: a dead node is {'never' if never else 'late'} set down",
        f"Slurm {'never requeues' if never else f'waits {late_s} s to requeue'} the jobs of a node that dies",
        ADMINISTRATORS.format("SlurmdTimeout=300"),
    )


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
                ADMINISTRATORS.format(f"a {name} without them"),
            )


def _preemptable(facts: ClusterFacts) -> Iterator[tuple[Partition, str]]:
    """Yield each partition whose jobs another one preempts, and its PreemptMode."""
    for partition in facts.partitions:
        mode = partition.values.get("PreemptMode") or facts.config.get("PreemptMode", "OFF")
        if save_window.grace_s_of(partition.values, facts.config) is None:
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
    return save_window.grace_s_of(partition.values, facts.config) or 0


def _contains(text: str, code: int) -> bool:
    """Return True if a list of exit codes, such as ``1,70-80``, contains this code."""
    for word in text.split(","):
        if _CODE.fullmatch(word):
            low, _, high = word.partition("-")
            if int(low) <= code <= int(high or low):
                return True
    return False
