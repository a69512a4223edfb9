"""The section of a new file: partition, GPUs, cores, time and account of this cluster."""

from __future__ import annotations

import pytest

from hpc_train.errors import UsageError
from hpc_train.launchers.slurm.cluster_facts import (
    Association,
    ClusterFacts,
    Partition,
    job_section,
    parsed_nodes,
)
from tests.launchers.slurm.clusters import cluster


def test_all_gpus_of_a_node_of_the_default_partition() -> None:
    job = job_section(cluster(), None, None)
    expected = {"partition": "low", "nodes": 1, "gpus_per_node": 4, "cpus_per_gpu": 8, "time_limit": "24h"}
    assert job.values == expected
    assert (job.ranks, job.has_gpus) == (4, True)
    assert job.notes[0] == "partition low (default): 2 nodes with 4 GPUs (a100), no time limit"
    assert job.notes[1] == "partition high: 2 nodes with 4 GPUs (a100), at most 48h"


def test_a_partition_with_gpus_goes_before_the_default_one_without() -> None:
    nodes = "n1|low|idle|32|1|(null)|\nn2|high|idle|32|1|gpu:v100:2,gpu:a100:8|"
    job = job_section(cluster(nodes=nodes), None, None)
    assert job.values["partition"] == "high"
    assert (job.values["gpus_per_node"], job.values["gpu_type"]) == (8, "a100")
    assert job.values["cpus_per_gpu"] == 3, "all 10 GPUs of the node have a share"


def test_a_partition_without_gpus() -> None:
    facts = cluster(nodes="n1|low|idle|32|1|(null)|", partition={"MaxTime": "02:00:00"})
    job = job_section(facts, "low", None)
    assert job.values == {"partition": "low", "nodes": 1, "time_limit": "2h"}
    assert (job.ranks, job.has_gpus) == (1, False)


def test_what_is_asked_for_must_exist() -> None:
    with pytest.raises(UsageError, match="--queue: there is no partition 'lo'; there are low, high"):
        job_section(cluster(), "lo", None)
    with pytest.raises(UsageError, match="--gpus: 5, but a node of low has at most 4"):
        job_section(cluster(), None, 5)


def test_an_account_is_written_where_there_are_several() -> None:
    facts = cluster()
    some = [Association("nlp", False), Association("vision", True)]
    mine = ClusterFacts(facts.config, facts.partitions, facts.nodes, some)
    job = job_section(mine, None, None)
    assert job.values["account"] == "vision" and job.notes[-1] == "accounts: vision, nlp"
    one = ClusterFacts(facts.config, facts.partitions, facts.nodes, some[1:])
    assert "account" not in job_section(one, None, None).values


def test_a_name_that_no_script_can_contain_is_not_written() -> None:
    facts = ClusterFacts({}, [Partition({"PartitionName": "$(id)", "Default": "YES"})], parsed_nodes(""))
    assert "partition" not in job_section(facts, None, None).values
