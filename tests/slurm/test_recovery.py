"""Nodes that are left out, and runs that give up rather than be requeued without end, on a real Slurm."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from hpc_train.run.attempts import write_record
from hpc_train.run.checkpoints import committed
from tests.end_to_end.runs import wait_for
from tests.slurm.cluster import Cluster
from tests.slurm.experiments import (
    EXPERIMENT,
    LIMIT_S,
    account,
    job_of,
    ranks_of,
    records,
    standing_of,
    start_now,
    submit_one,
    succeed,
    wait_for_attempt,
    wait_for_attempt_end,
    wait_for_first_step,
    wait_for_state,
    wait_for_step,
)
from tests.slurm.runs import field, high_job

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

ONE_NODE = EXPERIMENT.replace("nodes: 2", "nodes: 1")
ONE_RANK = ONE_NODE.replace("ranks_per_node: 2", "ranks_per_node: 1")
BAD_NODE = EXPERIMENT.replace("tests.end_to_end.paced:net", "tests.slurm.bad_node:net").replace(
    "ranks_per_node: 2", "ranks_per_node: 1"
)
STUCK = ONE_RANK.replace("tests.end_to_end.paced:net", "tests.slurm.stuck:net")


@pytest.mark.fault(14)
def test_a_node_that_fails_its_check_is_left_out_at_once(cluster: Cluster, tmp_path: Path) -> None:
    paths = submit_one(tmp_path, "slurm.exclude=n4", text=BAD_NODE)
    wait_for_state(paths, "completed", "failed")
    first, second = records(paths)[0], wait_for_attempt_end(paths, 2)
    assert (first.hosts, first.cause) == (["n1", "n2"], "bad node"), account(paths)
    how = "failed its check: its memory is held by another"
    assert (first.reason, first.bad_nodes) == (f"crash 1 of 3: n1 {how}", {"n1": how})
    assert (second.hosts, second.cause) == (["n2", "n3"], "completed"), account(paths)
    assert field(cluster, job_of(paths), "ExcNodeList") == "n4,n1", "the file's nodes stay excluded"
    run = standing_of(paths)
    assert run["excluded_nodes"] == {"n1": how}
    assert run["budget"] == {"crashes_left": 2, "preemptions_left": None, "without_progress_left": 2}


@pytest.mark.fault(14, 36)
def test_a_node_stays_where_too_few_others_are_left(cluster: Cluster, tmp_path: Path) -> None:
    more = ("slurm.nodes=4", "recovery.max_crashes=1")
    paths = submit_one(tmp_path, *more, text=BAD_NODE)
    assert wait_for_state(paths, "completed", "failed") == "failed"
    assert [record.cause for record in records(paths)] == ["bad node"] * 2, account(paths)
    assert field(cluster, job_of(paths), "ExcNodeList") == "(null)"
    assert paths.attempt(1).kept_nodes.read_text() == "n1\n"
    assert "can't exclude n1" in account(paths)
    assert "can't exclude n1" in succeed(tmp_path, "resume", paths.folder).err
    wait_for_attempt(paths, 3)


@pytest.mark.fault(14, 16)
def test_a_node_that_ended_two_attempts_is_left_out(cluster: Cluster, tmp_path: Path) -> None:
    """It dies, comes back, and a rank on it is killed."""
    paths = submit_one(tmp_path, "optimization.steps=5000", text=ONE_RANK, pace_s=0.05)
    wait_for_step(paths, 2)
    assert records(paths)[0].hosts == ["n1"]
    cluster.kill_node("n1", with_jobs=True)
    start_now(cluster, paths)
    assert wait_for_attempt(paths, 2) == ["n2"]
    first = records(paths)[0]
    assert (first.cause, first.bad_nodes) == ("lost", {"n1": "died"}), account(paths)
    assert "node n1 died" in (first.reason or "") and "no progress 1 of 2" in (first.reason or "")
    cluster.start_node("n1")
    wait_for_first_step(paths)  # metrics.jsonl may hold any number of steps of the first attempt
    with high_job(cluster, ["n2"]):
        assert wait_for_attempt(paths, 3) == ["n1"], "one end is nobody's fault"
        began = committed(paths)[0].step
        wait_for_step(paths, began + 2)
    for rank in ranks_of(paths):
        os.kill(rank, signal.SIGKILL)
    assert wait_for_attempt(paths, 4) == ["n2"], account(paths)
    run = standing_of(paths)
    assert run["excluded_nodes"] == {"n1": "ended attempts twice: rank 0: killed by SIGKILL"}
    assert "excludes n1 (ended attempts twice: rank 0: killed by SIGKILL)" in run["reason"]


@pytest.mark.fault(14)
def test_a_job_that_slurm_puts_on_a_node_it_leaves_out_asks_for_another(
    cluster: Cluster, tmp_path: Path
) -> None:
    paths = submit_one(tmp_path, text=ONE_RANK, pace_s=0.3)
    wait_for_step(paths, 2)
    record = records(paths)[0]
    assert record.hosts == ["n1"]
    write_record(paths.attempt(1), replace(record, bad_nodes={"n1": "failed its check: hot"}))
    cluster.run("scontrol", "requeue", job_of(paths))
    start_now(cluster, paths)
    assert wait_for_attempt(paths, 2) == ["n2"], account(paths)
    assert "asks for other nodes: excludes n1 (failed its check: hot)" in account(paths)


@pytest.mark.fault(36)
def test_a_run_that_gets_nowhere_gives_up(cluster: Cluster, tmp_path: Path) -> None:
    """Slurm would requeue it without end: each time it is gone before it has saved."""
    paths = submit_one(tmp_path, text=STUCK)
    for number in (1, 2, 3):
        wait_for_attempt(paths, number)
        wait_for_first_step(paths)
        script, ranks = records(paths)[number - 1].launcher_process, ranks_of(paths)
        assert script is not None and ranks, account(paths)
        cluster.run("scontrol", "requeue", job_of(paths))
        for pid in (script.pid, *ranks):  # the script first: it would take its rank's end for a crash
            with suppress(ProcessLookupError):  # Slurm has killed it
                os.kill(pid, signal.SIGKILL)
        start_now(cluster, paths)
    assert wait_for_state(paths, "failed", "completed") == "failed", account(paths)
    reason = standing_of(paths)["reason"]
    assert reason.startswith("no progress in 3 attempts: no checkpoint at all; "), reason
    assert len(records(paths)) == 3, "the fourth start began no attempt"
    wait_for(lambda: field(cluster, job_of(paths), "JobState") == "FAILED", "the job's end", LIMIT_S)
    wait_for_attempt_end(paths, 3)
    run = standing_of(paths)
    assert (run["state"], run["budget"]["without_progress_left"]) == ("failed", 0)
