"""Requests that Slurm may accept, and that nothing may refuse: what is not certain counts for the file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hpc_train.launchers.slurm import cluster_facts, commands, forecast
from hpc_train.launchers.slurm.cluster_facts import ClusterFacts, parsed_associations
from hpc_train.launchers.slurm.tres_limits import parsed_qos
from tests.launchers.slurm.clusters import cluster
from tests.launchers.slurm.programs import Programs, put_programs_first
from tests.launchers.slurm.test_request_checks import facts, said
from tests.run.runs import small_experiment

#: Above each limit of the partition that a QOS can lift.
_LARGE = {"time_limit": "2h", "nodes": 2}
_SMALL = {"MaxTime": "00:30:00", "MaxNodes": "1"}


def with_associations(text: str, **partition: str) -> ClusterFacts:
    return replace(facts(**partition), associations=parsed_associations(text, "here"))


@pytest.mark.parametrize(
    ("constraint", "missing"),
    [
        ("80gb", []),
        ("GPU_MEM:80GB", []),
        ("2080ti&80gb", []),
        ("[80gb*2|2080ti*1]", []),
        ("(80gb|GPU_MEM:80GB)", []),
        ("[80gb*1&40gb*1]", ["40gb"]),
        ("h100|gpu_mem:80GB", ["h100", "gpu_mem:80GB"]),
        ("h100%2", []),  # nothing that a constraint has: Slurm has its own say
    ],
)
def test_features_are_read_whole(constraint: str, missing: list[str]) -> None:
    known = cluster(nodes="n1|low|idle|32|256000|gpu:a100:4|80gb,GPU_MEM:80GB,2080ti")
    found = [line.split()[1].rstrip(",") for line in said(known, constraint=constraint)]
    assert found == missing


@pytest.mark.parametrize(
    ("config", "is_refused"),
    [
        ({}, True),
        ({"JobSubmitPlugins": "(null)", "CliFilterPlugins": "(null)"}, True),
        ({"JobSubmitPlugins": "require_timelimit,logging", "CliFilterPlugins": "none"}, True),
        ({"JobSubmitPlugins": "job_submit/throttle"}, True),
        ({"JobSubmitPlugins": "lua"}, False),
        ({"JobSubmitPlugins": "logging, all_partitions"}, False),
        ({"CliFilterPlugins": "user_defaults"}, False),
    ],
)
def test_a_site_that_changes_requests_has_its_own_say(
    config: dict[str, str], is_refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = cluster(MaxJobCount="1", **config)
    monkeypatch.setattr(forecast, "_is_here", lambda: True)
    monkeypatch.setattr(cluster_facts, "read", lambda: known)
    found = forecast.never_starts([small_experiment(slurm={"partition": "nope"})] * 2)
    assert {each.key for each in found} == ({"slurm.partition", "sweep"} if is_refused else set())


def test_associations_with_other_clusters_do_not_count() -> None:
    elsewhere = "vision||normal||vision||00:10:00||||There\n"
    here = "vision||normal,long||vision|long|||||Here\n"
    known = with_associations(elsewhere + here)
    assert said(known, time_limit="1h", qos="normal") == said(known, qos="long") == []
    assert len(said(with_associations(elsewhere.replace("There", "")), time_limit="1h")) == 1
    assert len(parsed_associations(elsewhere + here)) == 2


def test_the_association_of_the_partition_comes_first() -> None:
    everywhere = "vision||normal|1|vision|normal|00:10:00||||here\n"
    in_low = "vision|low|normal,long|9|vision|long|1-00:00:00||||here\n"
    in_high = "vision|high|normal|1|vision|normal|00:10:00||||here\n"
    known = with_associations(everywhere + in_high + in_low)
    assert said(known, time_limit="1h") == said(known, time_limit="1h", qos="long") == []
    (line,) = said(known, partition="high", time_limit="1h")
    assert "60 min exceed the 10 min of your association" in line
    assert len(said(known, partition="high", qos="long")) == 1
    # The account has none for this partition: nothing is known.
    assert said(with_associations(in_high), time_limit="1h") == []


@pytest.mark.parametrize(
    "unknown",
    [
        {"qos": None},
        {"qos": []},
        {"associations": None},
        {"associations": parsed_associations("nlp||normal||nlp|||||\n")},
    ],
)
def test_an_unknown_qos_may_allow_all(unknown: dict[str, Any]) -> None:
    request = {**_LARGE, "account": "vision"}
    known = facts(**_SMALL, AllowQos="vip", QoS="long")
    found = said(replace(known, **unknown), **request)
    found += said(replace(facts(MinNodes="3"), **unknown), account="vision")
    assert [line for line in found if not line.startswith("slurm.account: vision is not")] == []
    assert len(said(known, **request)) == 3


def test_jobs_and_steps_that_are_not_recorded_enforce_no_associations() -> None:
    known = facts()
    for words, is_refused in (("nojobs,nosteps", False), ("associations", True), ("qos", True)):
        config = {**known.config, "AccountingStorageEnforce": words}
        assert bool(said(replace(known, config=config), account="nobody")) is is_refused


def test_nodes_that_are_not_listed_may_fit() -> None:
    request = {"nodes": 3, "gpus_per_node": 8, "constraint": "ib", "exclude": "n9"}
    assert said(cluster(partition={"TotalNodes": "4"}), **request) == []
    assert said(cluster(partition={"TotalNodes": "4"}), extra={"nodelist": "n4"}) == []
    assert len(said(cluster(), **request)) == 4
    less = cluster(partition={"TotalNodes": "4", "MaxMemPerNode": "1024"})
    assert len(said(less, mem_gb=2)) == 1


def test_several_qos_are_looked_up_one_by_one() -> None:
    assert said(facts(**_SMALL), qos="long,normal", **_LARGE) == []
    expected = ["slurm.qos: there is no QOS nope", "slurm.qos: account nlp may not use QOS long"]
    assert said(facts(), qos="normal,nope", account="nlp") == expected[:1]
    assert said(facts(), qos="normal,long", account="nlp") == expected[1:]


def test_an_account_may_be_below_one_that_the_partition_allows() -> None:
    assert said(facts(AllowAccounts="science")) == []
    assert said(facts(AllowAccounts="ALL", DenyAccounts="vision")) == [
        "slurm.account: vision: partition low refuses this account"
    ]


@pytest.mark.parametrize("state", ["DRAIN", "INACTIVE"])
def test_jobs_of_a_replaced_partition_go_to_its_alternate(state: str) -> None:
    assert len(said(cluster(partition={"State": state}))) == 1
    replaced = cluster(partition={"State": state, "Alternate": "high", "MaxTime": "00:30:00"})
    assert said(replaced, time_limit="1h") == []
    waits = cluster(partition={"State": "DOWN", "Alternate": "high", "MaxTime": "00:30:00"})
    assert len(said(waits, time_limit="1h")) == 1


def test_limits_of_a_node_hide_those_of_weaker_qos() -> None:
    limits = "wide||gres/gpu=8|||||||\nnarrow||gres/gpu=1|||||||\n"
    lines = [line.split("|") for line in limits.splitlines()]
    qos = parsed_qos("".join(f"{line[0]}||{line[2]}||||||\n" for line in lines))
    known = with_associations("vision||wide,narrow||vision|narrow|||||here\n", QoS="wide")
    request = {"gpus_per_node": 4}
    assert said(replace(known, qos=qos), **request) == []
    without = with_associations("vision||wide,narrow||vision|narrow|||||here\n")
    assert len(said(replace(without, qos=qos), **request)) == 1


def test_a_qos_limit_of_submitted_jobs_hides_the_associations() -> None:
    runs = [small_experiment(slurm={"qos": "long"})] * 10
    association = "vision||normal,long|5|vision|normal|||||here\n"
    assert forecast._too_many(runs, with_associations(association)) == []
    (found,) = forecast._too_many(runs * 3, with_associations(association))
    assert "30 runs are more than the 20 jobs" in found.message
    default = [small_experiment(slurm={"time_limit": "1h"})] * 10
    (found,) = forecast._too_many(default, with_associations(association))
    assert "(MaxSubmitJobs)" in found.message
    assert forecast._too_many(default, replace(with_associations(association), qos=None)) == []
    more_in_low = "vision|low|normal|50|vision|normal|||||here\n"
    assert forecast._too_many(default, with_associations(association + more_in_low)) == []


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Programs:
    return put_programs_first(tmp_path, monkeypatch)


def test_facts_are_of_this_cluster_and_unknown_where_its_database_fails(programs: Programs) -> None:
    programs.put("sinfo", "echo 'n1|low|idle|32|256000||'")
    config = "AccountingStorageType = accounting_storage/slurmdbd\nClusterName = Here"
    programs.put("scontrol", f"echo '{config}'")
    programs.put("sacctmgr", "echo 'a||q||a||||||here'; echo 'b||q||b||||||there'")
    found = cluster_facts.read()
    assert [each.account for each in found.associations or ()] == ["a"]
    programs.put("sacctmgr", "echo 'Problem talking to the database' >&2; exit 1")
    found = cluster_facts.read()
    assert (found.associations, found.qos) == (None, None)


def test_a_persons_own_options_of_sinfo_do_not_hide_nodes(
    programs: Programs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SINFO_PARTITION", "high")
    programs.put("sinfo", 'echo "[$SINFO_PARTITION]"')
    assert commands.run(["sinfo"]) == "[]\n"
