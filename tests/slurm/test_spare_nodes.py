"""``slurm.spare_nodes`` on a real Slurm: the next attempt begins in the same job, on another node."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hpc_train.paths import RunPaths
from tests.end_to_end.holding import Hold
from tests.end_to_end.runs import assert_equal_to_the_bit, wait_for
from tests.quiet import QuietRuns
from tests.slurm.cluster import Cluster
from tests.slurm.experiments import (
    ENVIRONMENT,
    LIMIT_S,
    TWO_RANKS,
    account,
    command,
    job_of,
    ranks_of,
    records,
    standing_of,
    start_now,
    submit_one,
    wait_for_attempt_end,
    wait_for_completion,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SPARE = "slurm.spare_nodes=1"
#: The bad node is n1, the first of the allocation.
BAD_NODE = TWO_RANKS.replace("tests.end_to_end.paced:net", "tests.slurm.bad_node:net")


def nodes_of_rank(pid: int) -> dict[str, str]:
    """Return the variables of a rank that describe the nodes of its job or its step."""
    entries = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
    pairs = dict(entry.partition("=")[::2] for entry in entries if entry)
    wanted = ("NODELIST", "NNODES", "NUM_NODES", "NTASKS", "NPROCS", "TASKS_PER_NODE")
    return {
        name: value
        for name, value in pairs.items()
        if name.startswith(("SLURM_", "SLURM_JOB_")) and name.endswith(wanted)
    }


def wait_until_held(hold: Hold, paths: RunPaths) -> None:
    wait_for(lambda: hold.is_reached() or not _is_active(paths), f"the step\n{account(paths)}", LIMIT_S)
    assert hold.is_reached(), account(paths)


def _is_active(paths: RunPaths) -> bool:
    return str(json.loads(paths.status.read_text())["state"]) not in {"failed", "completed"}


@pytest.mark.fault(14, 58)
def test_a_lost_node_is_replaced_in_the_same_job(
    cluster: Cluster, quiet_runs: QuietRuns, tmp_path: Path
) -> None:
    with Hold(tmp_path, 12) as hold:
        paths = submit_one(tmp_path, SPARE, "checkpoint.every_steps=5", hold.override, text=TWO_RANKS)
        wait_until_held(hold, paths)
        (first,) = records(paths)
        assert (first.hosts, first.spare_hosts, first.ranks) == (["n1", "n2"], ["n3"], 2), account(paths)
        hold.at(14, since_attempt=2)
        cluster.kill_node("n2", with_jobs=True)
        assert wait_for_attempt_end(paths, 1).bad_nodes == {"n2": "died"}, account(paths)
        wait_until_held(hold, paths)
        variables = [nodes_of_rank(pid) for pid in ranks_of(paths)]
        assert len(variables) == 2
        for found in variables:
            lists = {value for name, value in found.items() if name.endswith("NODELIST")}
            counts = {value for name, value in found.items() if name.endswith(("NNODES", "NUM_NODES"))}
            tasks = {value for name, value in found.items() if name.endswith(("NTASKS", "NPROCS"))}
            assert lists <= {"n1,n3", "n[1,3]"} and counts == tasks == {"2"}, found
    wait_for_completion(paths)
    second = wait_for_attempt_end(paths, 2)
    assert second.in_place and (second.job, second.restart) == (first.job, 0), account(paths)
    assert (second.hosts, second.ranks) == (["n1", "n3"], 2)
    assert_equal_to_the_bit(quiet_runs.of(text=TWO_RANKS, environment=ENVIRONMENT), paths)


@pytest.mark.fault(14, 58)
def test_a_node_that_fails_its_check_is_replaced_in_the_same_job(cluster: Cluster, tmp_path: Path) -> None:
    """The node of the batch script, which stays there."""
    paths = submit_one(tmp_path, SPARE, text=BAD_NODE)
    wait_for_completion(paths)
    first, second = records(paths)[0], wait_for_attempt_end(paths, 2)
    assert (first.hosts, first.cause) == (["n1", "n2"], "bad node"), account(paths)
    assert (second.hosts, second.spare_hosts) == (["n2", "n3"], ["n1"]), account(paths)
    assert second.in_place and (second.job, second.restart) == (first.job, 0)
    assert standing_of(paths)["restart"]["in_place"]
    assert "n2, n3 (spare: n1)" in command(tmp_path, "status", paths.folder).out


@pytest.mark.fault(14, 58)
def test_the_loss_of_the_first_node_requeues_the_job(cluster: Cluster, tmp_path: Path) -> None:
    with Hold(tmp_path, 12) as hold:
        paths = submit_one(tmp_path, SPARE, "checkpoint.every_steps=5", hold.override, text=TWO_RANKS)
        wait_until_held(hold, paths)
        job = job_of(paths)
        cluster.kill_node("n1", with_jobs=True)
    start_now(cluster, paths)
    wait_for_completion(paths)
    second = wait_for_attempt_end(paths, 2)
    assert not second.in_place and (second.job, second.restart) == (job, 1), account(paths)
    assert "n1" not in second.hosts
