"""Each check of ``doctor`` on facts as Slurm 22.05 to 26.05 prints them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hpc_train.launchers.base import Finding, KeyProblem, Level
from hpc_train.launchers.slurm.cluster_checks import CHECKS, Subject
from hpc_train.launchers.slurm.cluster_facts import (
    Association,
    ClusterFacts,
    Partition,
    parsed_associations,
    parsed_nodes,
    parsed_partitions,
)
from tests.launchers.slurm.clusters import RECORDED, cluster

VERSIONS = pytest.mark.parametrize("version", RECORDED)


def findings(facts: ClusterFacts, **subject: Any) -> list[Finding]:
    return [each for check in CHECKS for each in check(Subject(facts, **subject))]


def bad(facts: ClusterFacts, **subject: Any) -> dict[str, Level]:
    """Return check → level of what is not ok."""
    found = findings(facts, **subject)
    assert all(each.why and each.remedy for each in found if each.level is not Level.OK)
    return {each.check: each.level for each in found if each.level is not Level.OK}


@VERSIONS
def test_nothing_is_reported_of_a_good_cluster(version: str) -> None:
    assert bad(cluster(version)) == {}


@pytest.mark.parametrize(
    ("config", "check", "level"),
    [
        ({"JobRequeue": "0"}, "requeue", Level.WARNING),
        ({"KillWait": "2 sec"}, "kill-wait", Level.WARNING),
        ({"SlurmdTimeout": "0 sec"}, "node-timeout", Level.ERROR),
        ({"SlurmdTimeout": "7200 sec"}, "node-timeout", Level.WARNING),
        ({"RequeueExit": "1-9"}, "exit-codes", Level.ERROR),
        ({"RequeueExitHold": "64,75"}, "exit-codes", Level.ERROR),
        ({"PreemptType": "preempt/qos"}, "preempt-mode", Level.WARNING),
    ],
)
def test_a_setting_of_the_cluster(config: dict[str, str], check: str, level: Level) -> None:
    assert bad(cluster(**config)) == {f"slurm.{check}": level}


@pytest.mark.parametrize(
    ("partition", "expected"),
    [
        # 60 s of grace are enough for a save of 10 s.
        ({"PreemptMode": "CANCEL"}, {"preempt-mode": Level.WARNING}),
        ({"PreemptMode": "CANCEL", "GraceTime": "5"}, {"preempt-mode": Level.ERROR, "grace": Level.WARNING}),
        ({"PreemptMode": "SUSPEND"}, {"preempt-mode": Level.WARNING}),
        ({"GraceTime": "5"}, {"grace": Level.WARNING}),
        # KillWait's 30 s count.
        ({"GraceTime": "0"}, {}),
        # Nobody preempts it: the other partition's tier is not above.
        ({"PreemptMode": "CANCEL", "GraceTime": "5", "PriorityTier": "10"}, {}),
        ({"State": "DOWN"}, {"partition": Level.ERROR}),
        ({"State": "DOWN", "Default": "NO"}, {"partition": Level.WARNING}),
    ],
)
def test_a_setting_of_a_partition(partition: dict[str, str], expected: dict[str, Level]) -> None:
    found = bad(cluster(partition=partition))
    assert found == {f"slurm.{check}": level for check, level in expected.items()}


def test_a_measured_save_decides_instead_of_the_assumed_one() -> None:
    facts = cluster()
    assert bad(facts, longest_save_s=27.0) == {}
    assert bad(facts, longest_save_s=35.0) == {"slurm.grace": Level.ERROR, "slurm.kill-wait": Level.WARNING}
    assert bad(facts, longest_save_s=35.0, lead_s=60)["slurm.signal-lead"] is Level.ERROR
    over = cluster(OverTimeLimit="1 min")
    assert "slurm.signal-lead" not in bad(over, longest_save_s=35.0, lead_s=60)


def test_a_partition_without_a_usable_node() -> None:
    nodes = "n1|low|drained|8|20000|(null)|(null)\nn2|low|idle*|8|20000|(null)|(null)\nn3|high|idle|8|20000||"
    found = [each for each in findings(cluster(nodes=nodes)) if each.check == "slurm.partition"]
    assert [(each.level, each.what) for each in found] == [
        (Level.ERROR, "partition low: none of its 2 nodes can be used"),
        (Level.OK, "partition high: 1 of 1 nodes"),
    ]


def test_what_slurm_says_of_the_file() -> None:
    problem = KeyProblem("slurm.qos", "Slurm refuses it: Invalid qos", "write another")
    shown = findings(cluster(), place=lambda key: f"exp.yaml: {key}", problems=[problem])
    (error,) = [finding for finding in shown if finding.level is Level.ERROR]
    assert (error.check, error.what) == (
        "slurm.request",
        "exp.yaml: slurm.qos: Slurm refuses it: Invalid qos",
    )
    assert bad(cluster(), problems=[]) == {}


def test_accounts_of_the_user() -> None:
    enforced = {"AccountingStorageType": "accounting_storage/slurmdbd", "AccountingStorageEnforce": "limits"}
    facts = cluster(**enforced)
    assert bad(replace(facts, associations=[Association("vision", True)])) == {}
    assert bad(replace(facts, associations=[])) == {"slurm.account": Level.ERROR}
    assert bad(facts) == {}, "unknown where sacctmgr does not answer"
    recorded = cluster(AccountingStorageType="accounting_storage/slurmdbd")
    assert bad(replace(recorded, associations=[])) == {}, "not enforced"


def test_associations_are_read() -> None:
    output = "a banner of a wrapper\nvision|vision|Here\nnlp|vision|here\nold|vision|there\n\n"
    expected = [Association("vision", True), Association("nlp", False)]
    assert parsed_associations(output, "here") == expected
    assert len(parsed_associations(output)) == 3


def test_a_name_that_is_no_word_is_read_as_it_is() -> None:
    (partition,) = parsed_partitions("PartitionName=a\x1b[31mb State=UP TRES=cpu=32,gres/gpu=4 Nodes=n[1-2]")
    assert (partition.name, partition.values["TRES"]) == ("a\x1b[31mb", "cpu=32,gres/gpu=4")
    assert parsed_nodes("nonsense\n|||\nn1|low|idle|x|1||") == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [("UNLIMITED", None), ("2-00:00:00", 172800), ("1:10:00", 4200), ("00:03:00", 180)],
)
def test_times_of_slurm(text: str, expected: int | None) -> None:
    assert Partition({"MaxTime": text}).max_time_s == expected
