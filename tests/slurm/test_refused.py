"""Files whose jobs Slurm would refuse, or never start, are refused with the key and the remedy.

No job runs: partitions, QOS and accounts are made for the test, and each file requests too much of one.
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
    ("add", "qos", "denying", "MaxWall=5", "MinTRESPerJob=cpu=2", "Flags=DenyOnLimit"),
    ("add", "qos", "foreign"),
    ("add", "qos", "vip"),
    ("modify", "user", _USER, "set", "qos+=small,denying"),
    ("add", "account", "narrow"),
    ("add", "user", _USER, "account=narrow", "MaxWall=20", "MaxSubmitJobs=2", "qos=normal"),
)
_SMALL = ("slurm.qos=small",)
_NARROW = ("slurm.account=narrow",)
#: Requests that ``sbatch --test-only`` refuses, or that no node satisfies, also by ``plan``.
#: Micro-batches of one sample: enough for 32 ranks.
_REFUSED: tuple[tuple[tuple[str, ...], str], ...] = (
    (("slurm.partition=nope",), "slurm.partition: Slurm refuses it: invalid partition specified: nope"),
    (("slurm.partition=closed",), "slurm.partition: Slurm refuses it: Required partition not available"),
    (("slurm.partition=reserved",), "slurm.partition: Slurm refuses it: Access/permission denied; write"),
    (("slurm.partition=short",), "slurm.time_limit: 30 min exceed the 10 min of partition short; write at"),
    (("slurm.nodes=5",), "slurm.nodes: 5, but the partition has 4"),
    (("slurm.partition=few", "slurm.nodes=2"), "slurm.nodes: 2, but a job in partition few gets at most 1"),
    (("slurm.partition=many",), "slurm.nodes: 1, but a job in partition many needs at least 3 (MinNodes)"),
    (("slurm.gpus_per_node=5",), "slurm.gpus_per_node: 5, but a node has at most 4"),
    (("slurm.gpus_per_node=1", "slurm.gpu_type=a100"), "slurm.gpu_type: a100, but no node has such GPUs"),
    (("slurm.mem_gb=100",), "slurm.mem_gb: 100, but a node has at most 20"),
    (("slurm.cpus_per_gpu=9",), "slurm.cpus_per_gpu: 9 is 9 per node, a node has at most 8"),
    (("slurm.ranks_per_node=9",), "slurm.ranks_per_node: 9 ranks need a core each, a node has at most 8"),
    (("slurm.constraint=nvme",), "slurm.constraint: Slurm refuses it: Invalid feature specification; write"),
    (("slurm.account=nobody",), "slurm.account: Slurm refuses it: Invalid account or account/partition"),
    (("slurm.qos=nope",), "slurm.qos: Slurm refuses it: Invalid qos specification; write one"),
    (("slurm.qos=foreign",), "slurm.qos: Slurm refuses it: Invalid qos specification; write one"),
    (
        ("slurm.qos=denying", "slurm.cpus_per_gpu=2"),
        "slurm.time_limit: Slurm refuses it: QOSMaxWallDurationPerJobLimit; Job violates",
    ),
    (("slurm.qos=denying", "slurm.time_limit=4min"), "slurm.cpus_per_gpu: Slurm refuses it: QOSMinCpu"),
    (("slurm.reservation=nope",), "slurm.reservation: Slurm refuses it: Requested reservation is invalid"),
    (("slurm.exclude=n9",), "slurm.exclude: Slurm refuses it: Invalid node name specified; write"),
)  # fmt: skip
_SWEEP = (*_NARROW, "slurm.time_limit=10min", "sweep.grid={seed: [1, 2, 3]}")
#: Requests that Slurm accepts; when the job is released it gives the reason. ``submit`` withdraws it.
_HELD: tuple[tuple[tuple[str, ...], str], ...] = (
    (("slurm.partition=few", "slurm.mem_gb=9"), "slurm.mem_gb: {never}: MaxMemPerLimit; write another"),
    (("slurm.partition=members",), "slurm.account: {never}: Job's account not permitted to use this"),
    (("slurm.partition=chosen",), "slurm.qos: {never}: Job's QOS not permitted to use this partition"),
    (_SMALL, "slurm.time_limit: {never}: QOSMaxWallDurationPerJobLimit; request less"),
    ((*_SMALL, "slurm.time_limit=4min", "slurm.cpus_per_gpu=3"), "slurm.cpus_per_gpu: {never}: QOSMaxCpu"),
    ((*_SMALL, "slurm.time_limit=4min", "slurm.nodes=2"), "slurm.nodes: {never}: QOSMaxNodePerUserLimit"),
    (_NARROW, "slurm.time_limit: {never}: AssocMaxWallDurationPerJobLimit; request less"),
    (("slurm.exclude=n[1-3]", "slurm.nodes=2"), "satisfies all of: slurm.nodes: 2, slurm.exclude: n[1-3]"),
    (("slurm.partition=few", "slurm.extra={nodelist: n3}"), "no node satisfies all of: slurm.nodes: 1"),
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
            ("modify", "user", _USER, "set", "qos-=small,denying"),
            ("delete", "user", _USER, "account=narrow"),
            ("delete", "account", "narrow"),
            ("delete", "qos", "small,denying,foreign,vip"),
        ):
            cluster.run("sacctmgr", "-i", *words, check=False)


@pytest.mark.fault(35)
@pytest.mark.usefixtures("strict")
def test_jobs_that_slurm_would_refuse_or_never_start_are_refused(cluster: Cluster, tmp_path: Path) -> None:
    file = tmp_path / "exp.yaml"
    file.write_text(f"{EXPERIMENT}slurm: {{partition: low, time_limit: 30min}}\n")
    small = ("optimization.micro_batch_size=1", "optimization.global_batch_size=32")
    submit_limit = (_SWEEP, "slurm: Slurm refuses it: AssocMaxSubmitJobLimit")
    fewer_jobs = (_SWEEP, "you may have 2 jobs; slurm.runs_per_job: 2 makes 2 jobs of 3 runs")
    for overrides, message in (*_REFUSED, submit_limit, fewer_jobs):
        for command in ("plan", "submit"):
            done = hpc_train(command, file, *small, *overrides)
            assert (done.code, message in done.err) == (65, True), (command, overrides, done.err)
    assert not runs_root().exists(), "nothing is made for a file that is refused before its submission"

    never = "Slurm accepts the job, but never starts it"
    for overrides, message in _HELD:
        done = hpc_train("submit", file, *small, *overrides)
        assert (done.code, message.format(never=never) in done.err) == (65, True), (overrides, done.err)
        assert not list(runs_root().glob("tiny/[!.]*")), overrides
    assert not cluster.run("squeue", "--noheader")

    done = hpc_train("doctor", file, "slurm.qos=foreign")
    assert done.code == 1 and "slurm.qos: Slurm refuses it: Invalid qos specification" in done.out
    done = hpc_train("plan", file, *small, "slurm.nodes=2")
    assert done.code == 0 and "earliest start: to" in done.err and "on n[1-2]" in done.err, done.err
