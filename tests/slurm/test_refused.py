"""Files that Slurm would refuse, or hold for ever, are refused by ``plan`` and ``submit`` with the reason.

No job runs: partitions, QOS and accounts are made for the test, and each file asks for too much of one.
"""

from __future__ import annotations

import os
import pwd
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpc_train.paths import runs_root
from tests.cli.commands import hpc_train
from tests.plan.files import EXPERIMENT
from tests.slurm.cluster import Cluster

pytestmark = [pytest.mark.slow]

_USER = pwd.getpwuid(os.getuid()).pw_name
#: Partition → what differs from ``low``.
_PARTITIONS = {
    "few": ("Nodes=n[1-2]", "MaxNodes=1", "MaxMemPerNode=8000"),
    "many": ("Nodes=ALL", "MinNodes=3"),
    "members": ("Nodes=ALL", "DenyAccounts=test"),
    "chosen": ("Nodes=ALL", "AllowQos=vip"),
    "closed": ("Nodes=ALL", "State=DRAIN"),
    "reserved": ("Nodes=ALL", "ReqResv=YES"),
}
_ACCOUNTING = (
    ("add", "qos", "small", "MaxWall=5", "MaxTRESPerJob=cpu=2", "MaxTRESPerUser=node=1"),
    ("add", "qos", "foreign"),
    ("add", "qos", "vip"),
    ("modify", "user", _USER, "set", "qos+=small"),
    ("add", "account", "narrow"),
    ("add", "user", _USER, "account=narrow", "MaxWall=20", "MaxSubmitJobs=2", "qos=normal"),
)
_SMALL = ("slurm.qos=small",)
_NARROW = ("slurm.account=narrow",)
#: What the file asks for → what the commands say. Micro-batches of one sample: enough for 32 ranks.
_CASES: tuple[tuple[tuple[str, ...], str], ...] = (
    (("slurm.partition=nope",), "slurm.partition: there is no partition nope; write one of low, high"),
    (("slurm.partition=closed",), "slurm.partition: partition closed takes no jobs (State = DRAIN)"),
    (("slurm.partition=reserved",), "slurm.reservation: is missing: partition reserved takes only jobs with"),
    (("slurm.partition=short",), "slurm.time_limit: 30 min exceed the 10 min of partition short; write at"),
    (("slurm.nodes=5",), "slurm.nodes: 5, but the partition has 4"),
    (("slurm.partition=few", "slurm.nodes=2"), "slurm.nodes: 2, but a job in partition few gets at most 1"),
    (("slurm.partition=many",), "slurm.nodes: 1, but a job in partition many needs at least 3 (MinNodes)"),
    (("slurm.gpus_per_node=5",), "slurm.gpus_per_node: 5, but a node has at most 4"),
    (("slurm.gpus_per_node=1", "slurm.gpu_type=a100"), "slurm.gpu_type: a100, but no node has such GPUs"),
    (("slurm.mem_gb=100",), "slurm.mem_gb: 100, but a node has at most 20"),
    (("slurm.partition=few", "slurm.mem_gb=9"), "slurm.mem_gb: 9, but partition few gives 7.8125 per node"),
    (("slurm.cpus_per_gpu=9",), "slurm.cpus_per_gpu: 9 is 9 per node, a node has at most 8"),
    (("slurm.ranks_per_node=9",), "slurm.ranks_per_node: 9 ranks need a core each, a node has at most 8"),
    (("slurm.constraint=nvme",), "slurm.constraint: nvme, but no node has this feature"),
    (("slurm.account=nobody",), "slurm.account: nobody is not an account of yours; write one of"),
    (("slurm.partition=members",), "slurm.account: test: partition members refuses this account"),
    (("slurm.partition=chosen",), "slurm.qos: normal: partition chosen takes only QOS vip"),
    (("slurm.qos=nope",), "slurm.qos: there is no QOS nope; write one of"),
    (("slurm.qos=foreign",), "slurm.qos: account test may not use QOS foreign; write one of"),
    (_SMALL, "slurm.time_limit: 30 min exceed the 5 min of QOS small (MaxWall)"),
    ((*_SMALL, "slurm.cpus_per_gpu=3"), "slurm.cpus_per_gpu: the job requests 3 cpu, but a job of QOS small"),
    ((*_SMALL, "slurm.nodes=2"), "slurm.nodes: the job requests 2 node, but a job of QOS small"),
    (_NARROW, "slurm.time_limit: 30 min exceed the 20 min of your association (MaxWall)"),
    ((*_NARROW, "sweep.grid={seed: [1, 2, 3]}"), "sweep: 3 runs are more than the 2 jobs that this cluster"),
    (("slurm.reservation=nope",), "slurm.reservation: there is no reservation nope; take it out"),
    (("slurm.exclude=n9",), "slurm.exclude: there is no node n9"),
    (("slurm.exclude=n[1-3]", "slurm.nodes=2"), "slurm.exclude: leaves 1 of the 4 nodes of partition low"),
    (("slurm.partition=few", "slurm.extra={nodelist: n3}"), "slurm.extra.nodelist: node n3 is not in"),
)  # fmt: skip


@pytest.fixture
def strict(cluster: Cluster) -> Iterator[None]:
    """The cluster with partitions, QOS and an account that allow little."""
    try:
        for words in _ACCOUNTING:
            cluster.run("sacctmgr", "-i", *words)
        for name, values in _PARTITIONS.items():
            cluster.run("scontrol", "create", f"PartitionName={name}", *values)
        yield
    finally:
        for name in _PARTITIONS:
            cluster.run("scontrol", "delete", f"PartitionName={name}", check=False)
        for words in (
            ("modify", "user", _USER, "set", "qos-=small"),
            ("delete", "user", _USER, "account=narrow"),
            ("delete", "account", "narrow"),
            ("delete", "qos", "small,foreign,vip"),
        ):
            cluster.run("sacctmgr", "-i", *words, check=False)


@pytest.mark.usefixtures("strict")
def test_what_slurm_would_never_start_is_refused(cluster: Cluster, tmp_path: Path) -> None:
    file = tmp_path / "exp.yaml"
    file.write_text(f"{EXPERIMENT}slurm: {{partition: low, time_limit: 30min}}\n")
    small = ("optimization.micro_batch_size=1", "optimization.global_batch_size=32")
    for overrides, words in _CASES:
        for command in ("plan", "submit"):
            done = hpc_train(command, file, *small, *overrides)
            assert (done.code, words in done.err) == (65, True), (command, overrides, done.err)
    assert not runs_root().exists(), "nothing is made for a file that is refused"
    assert not cluster.run("squeue", "--noheader")

    done = hpc_train("plan", file, *small, "slurm.nodes=2")
    assert done.code == 0 and "earliest start: to" in done.err and "on n[1-2]" in done.err, done.err
