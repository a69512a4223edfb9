"""Facts of clusters, as Slurm prints them, with what a test changes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hpc_train.launchers.slurm.cluster_facts import ClusterFacts, parsed_nodes, parsed_partitions
from hpc_train.launchers.slurm.commands import parsed_config

RECORDED: dict[str, Any] = json.loads(Path(__file__).with_name("recorded.json").read_text())
#: What the test cluster prints besides what is recorded.
_MORE = """\
KillWait                = 30 sec
MinJobAge               = 300 sec
OverTimeLimit           = 0 min
PreemptType             = preempt/partition_prio
ProctrackType           = proctrack/cgroup
RequeueExit             = (null)
RequeueExitHold         = (null)
SlurmdTimeout           = 300 sec
"""
_NODES = "\n".join(
    f"n{number}|{partition}|idle|32|256000|gpu:a100:4(S:0-1)|nvme"
    for number in (1, 2)
    for partition in ("low", "high")
)
_HIGH = (
    "PartitionName=high Default=NO GraceTime=0 MaxTime=2-00:00:00 PriorityTier=10 PreemptMode=OFF State=UP"
)


def cluster(
    version: str = "22.05.8", *, partition: dict[str, str] | None = None, nodes: str = _NODES, **config: str
) -> ClusterFacts:
    """Return the facts of a cluster: two partitions over two nodes, ``low`` preempted by ``high``."""
    recorded = RECORDED[version]
    settings = parsed_config("\n".join([*recorded["config"], _MORE])) | config
    low, high = parsed_partitions(f"{recorded['partition']}\n{_HIGH}\n")
    listed = parsed_nodes(nodes)
    total = str(sum(node.partition == low.name for node in listed))
    changed = type(low)({**low.values, "TotalNodes": total, **(partition or {})})
    return ClusterFacts(settings, [changed, high], listed)
