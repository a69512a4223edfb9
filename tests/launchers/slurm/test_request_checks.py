"""Requests that Slurm refuses or never starts, by facts as it prints them; others are tried on a real one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hpc_train.config.cluster_sections import SlurmConfig
from hpc_train.errors import NoSchedulerError
from hpc_train.launchers.slurm import forecast
from hpc_train.launchers.slurm.cluster_facts import ClusterFacts, parsed_associations, parsed_reservations
from hpc_train.launchers.slurm.node_names import expanded
from hpc_train.launchers.slurm.request_checks import problems
from hpc_train.launchers.slurm.tres_limits import parsed_qos, tres
from tests.launchers.slurm.clusters import cluster
from tests.launchers.slurm.programs import put_programs_first
from tests.run.runs import small_experiment

_QOS = """\
normal||||||||
long|2-00:00:00|||20|gres/gpu=8,mem=1T||node=4,gres/gpu:a100=2|
vip|01:00:00||PartitionTimeLimit,OverPartQOS||cpu=64|||gres/gpu=16
"""
_ASSOCIATIONS = "vision||normal,long,vip|200|vision|long|1-00:00:00|gres/gpu=4|\nnlp||normal||vision|||||\n"


def facts(**partition: str) -> ClusterFacts:
    """Return a cluster with accounting that enforces limits."""
    config = {
        "AccountingStorageType": "accounting_storage/slurmdbd",
        "AccountingStorageEnforce": "associations,limits,qos,safe",
    }
    found = cluster(partition=partition, **config)
    return replace(
        found,
        qos=parsed_qos(_QOS),
        associations=parsed_associations(_ASSOCIATIONS),
        reservations=["maintenance"],
    )


def said(known: ClusterFacts, **request: Any) -> list[str]:
    found = problems(SlurmConfig.model_validate(request), known)
    assert all(each.remedy for each in found)
    return [f"{each.key}: {each.message}" for each in found]


@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        # The default QOS of the default account is long.
        ({"gpus_per_node": 4, "nodes": 2, "qos": "normal", "account": "nlp"}, None),
        ({"gpus_per_node": 3, "gpu_type": "a100"}, "a job of QOS long gets at most 2 (MaxTRESPerAccount)"),
        ({"gpus_per_node": 4, "nodes": 2, "qos": "normal", "account": "vision"},
         ("slurm.gpus_per_node: the job requests 8 gres/gpu, but a job of your association gets at most 4")),
        ({"time_limit": "3-00:00:00"}, "slurm.time_limit: 4320 min exceed the 2880 min of QOS long"),
        ({"nodes": 2, "mem_gb": 200, "qos": "long"}, None),
        ({"time_limit": "2h", "qos": "VIP"}, "120 min exceed the 60 min of QOS vip"),
        ({"cpus_per_gpu": 33, "qos": "vip"}, "slurm.cpus_per_gpu: 33 is 33 per node, a node has at most 32"),
        ({"nodes": 2, "cpus_per_gpu": 32, "qos": "vip"}, None),
        ({"qos": "long", "account": "nlp"}, "slurm.qos: account nlp may not use QOS long"),
        ({"reservation": "maintenance"}, None),
    ],
)  # fmt: skip
def test_limits_of_accounting(request_: dict[str, Any], expected: str | None) -> None:
    found = said(facts(), **request_)
    assert (found == []) if expected is None else any(expected in each for each in found), found


def test_the_partitions_qos_comes_first_unless_the_jobs_says_otherwise() -> None:
    known = facts(QoS="long")
    assert "2880 min of QOS long" in said(known, time_limit="3-00:00:00", qos="normal", account="nlp")[0]
    # vip overrides the partition's QOS: its own 60 min count.
    assert "60 min of QOS vip" in said(known, time_limit="3-00:00:00", qos="vip")[0]


def test_a_qos_may_lift_the_partitions_time_limit() -> None:
    short = facts(MaxTime="00:30:00")
    assert "30 min of partition" in said(short, time_limit="45min", qos="long")[0]
    assert said(short, time_limit="45min", qos="vip") == []


def test_limits_that_are_not_enforced_do_not_count() -> None:
    known = facts()
    config = {**known.config, "AccountingStorageEnforce": "associations"}
    assert said(replace(known, config=config), time_limit="3-00:00:00") == []


def test_one_of_several_partitions_is_enough() -> None:
    small = facts(MaxTime="00:30:00")
    assert said(small, partition="low,high", time_limit="45min") == []
    assert len(said(small, partition="low", time_limit="45min")) == 1
    assert said(small, partition="low,nope") == ["slurm.partition: there is no partition nope"]


def test_all_requests_together_need_enough_nodes() -> None:
    nodes = "n1|low|idle|32|256000|gpu:a100:4|nvme\nn2|low|idle|32|64000|gpu:a100:8|nvme"
    known = cluster(nodes=nodes)
    assert said(known, gpus_per_node=4, nodes=2) == said(known, gpus_per_node=8, mem_gb=62) == []
    expected = "slurm.nodes: 1, but no nodes have all of: slurm.gpus_per_node: 8, slurm.mem_gb: 100"
    assert said(known, gpus_per_node=8, mem_gb=100) == [expected]


def test_the_persons_own_defaults_of_sbatch_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SBATCH_PARTITION", "nope")
    assert said(cluster()) == ["slurm.partition: there is no partition nope"]
    assert said(cluster(), partition="low") == []


def test_a_slurm_that_tells_nothing_refuses_nothing() -> None:
    assert said(ClusterFacts({}, [], []), partition="low", nodes=99, time_limit="99h") == []


def test_texts_of_slurm_are_read() -> None:
    assert tres("cpu=4,gres/gpu:a100=2,mem=1.50G,node=,x") == {"cpu": 4, "gres/gpu:a100": 2, "mem": 1536}
    assert tres("mem=1.5T") == {"mem": 1536 * 1024}
    assert tres("mem=2048K") == {"mem": 2}
    assert parsed_qos("a|b\n\n") == []
    assert parsed_reservations("ReservationName=a b=c\nReservationName=d\n") == ["a", "d"]
    assert expanded("n[01-03,7],login1") == ["n01", "n02", "n03", "n7", "login1"]
    assert expanded("a[1-2]b[3-4]") == ["a1b3", "a1b4", "a2b3", "a2b4"]
    assert expanded("/path/to/nodes") == expanded("n[1-99999999]") == expanded("n[x]") == []


def test_a_machine_without_slurm_refuses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    experiment = small_experiment(slurm={"partition": "nope"})
    monkeypatch.setenv("PATH", str(tmp_path))
    assert forecast.never_starts([experiment]) == []


def test_a_slurm_that_does_not_answer_is_no_refusal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    programs = put_programs_first(tmp_path, monkeypatch)
    for name in ("sbatch", "squeue", "srun"):
        programs.put(name, "exit 1")
    programs.put("scontrol", "echo Unable to contact slurm controller >&2; exit 1")
    with pytest.raises(NoSchedulerError):
        forecast.never_starts([small_experiment(slurm={"partition": "nope"})])


def test_the_earliest_start_is_read() -> None:
    said_ = (
        "sbatch: Job 1 to start at 2026-11-25T01:42:26 using 4 processors on nodes n[1-2] in partition low"
    )
    found = forecast._parsed([], said_)
    assert (found.earliest_start, found.nodes) == ("2026-11-25T01:42:26+00:00", "n[1-2]")
    assert forecast._parsed([], "sbatch: fine").earliest_start is None


def test_a_node_in_no_partition_may_be_excluded() -> None:
    facts = replace(cluster(), node_names=["n1", "n2", "n3"])
    assert said(facts, partition="low", exclude="n3") == []
    (line,) = said(facts, partition="low", exclude="n9")
    assert "there is no node n9" in line
