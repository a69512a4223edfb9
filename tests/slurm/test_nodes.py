"""Ranks on the nodes of a real Slurm: how they meet, and what becomes of them when one or all must end."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path

import pytest

from hpc_train.paths import RunPaths
from hpc_train.run.attempts import EVENTS, exit_codes
from hpc_train.run.checkpoints import Manifest, committed
from tests import warm
from tests.end_to_end.holding import Hold
from tests.end_to_end.runs import assert_equal_to_the_bit, status, wait_for
from tests.quiet import QuietRuns
from tests.slurm.cluster import Cluster
from tests.slurm.experiments import (
    ENVIRONMENT,
    EXPERIMENT,
    LIMIT_S,
    TWO_RANKS,
    account,
    job_of,
    ranks_of,
    records,
    submit_one,
    wait_for_attempt_end,
    wait_for_completion,
    wait_for_state,
    wait_for_step,
)
from tests.slurm.runs import high_job, squeue

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

#: Of each micro-batch of a run that does not end by itself.
PACE_S = 0.05


def quiet(runs: QuietRuns) -> RunPaths:
    return runs.of(text=EXPERIMENT, ranks=4, environment=ENVIRONMENT)


@pytest.mark.usefixtures("fresh_ranks")
def test_two_nodes_meet_and_train_to_the_end(cluster: Cluster, quiet_runs: QuietRuns, tmp_path: Path) -> None:
    paths = submit_one(tmp_path)
    wait_for_state(paths, "completed")
    record = wait_for_attempt_end(paths, 1)
    assert (len(record.hosts), record.ranks, record.exit_codes) == (2, 4, [0] * 4), account(paths)
    assert (record.cause, record.restart) == ("completed", 0)
    assert list(record.events) == [name for name in EVENTS if name in record.events], "out of order"
    assert record.events.keys() == {"begin", "rank", "joined", "loaded", "first_step", "end"}
    times = list(record.events.values())
    assert times == sorted(times)
    met = json.loads(paths.attempt(1).rendezvous.read_text())
    assert met["hosts"][0] == "127.0.0.1", "all nodes are this machine, and nobody else can reach the store"
    for rank in range(4):
        assert paths.attempt(1).log(rank).stat().st_mode & 0o077 == 0
    assert_equal_to_the_bit(quiet(quiet_runs), paths)


@pytest.mark.fault(16, 56)
def test_a_killed_rank_takes_the_others_with_it_and_nothing_is_saved(
    cluster: Cluster, quiet_runs: QuietRuns, tmp_path: Path
) -> None:
    with Hold(tmp_path, 12) as hold:
        paths = submit_one(tmp_path, "checkpoint.every_steps=5", hold.override)
        wait_for_step(paths, 12)
        (victim,) = ranks_of(paths, rank=2)
        assert warm.is_forked(victim) or warm.FRESH in os.environ, "all ranks here import torch"
        os.kill(victim, signal.SIGKILL)
    record = wait_for_attempt_end(paths, 1)
    assert record.cause == "crash", account(paths)
    assert record.reason is not None
    assert "rank 2 on" in record.reason and "killed by SIGKILL" in record.reason
    codes = exit_codes(paths.attempt(1))
    assert codes == {0: 76, 1: 76, 3: 76}
    # SIGTERM reached the survivors, and they took it for what it was: a peer's end.
    assert all(step.step % 5 == 0 for step in committed(paths) if Manifest.read(step).attempt == 1)
    wait_for_state(paths, "completed")
    assert_equal_to_the_bit(quiet(quiet_runs), paths)
    second = records(paths)[1]
    assert second.in_place and (second.job, second.restart) == (record.job, 0), account(paths)
    assert second.hosts == record.hosts
    assert second.events["begin"] > record.events["end"]


@pytest.mark.fault(17, 57)
def test_a_rank_that_hangs_is_gone_before_the_next_attempt_begins_in_the_same_job(
    cluster: Cluster, quiet_runs: QuietRuns, tmp_path: Path
) -> None:
    """A stopped process, which only SIGKILL ends."""
    limits = ("checkpoint.every_steps=5", "recovery.hang_after_min=0.25")
    paths = submit_one(tmp_path, *limits, text=TWO_RANKS, pace_s=0.1)
    wait_for_step(paths, 12)
    (victim,) = ranks_of(paths, rank=1, attempt=1)
    os.kill(victim, signal.SIGSTOP)
    first = wait_for_attempt_end(paths, 1)
    assert "HangError: rank 1 on n2 made no progress" in str(first.reason), account(paths)
    wait_for(lambda: len(records(paths)) > 1, f"attempt 2\n{account(paths)}", LIMIT_S)
    assert not ranks_of(paths, attempt=1), account(paths)
    wait_for_completion(paths)
    second = wait_for_attempt_end(paths, 2)
    assert (second.in_place, second.job, second.hosts) == (True, first.job, first.hosts), account(paths)
    assert_equal_to_the_bit(quiet_runs.of(text=TWO_RANKS, environment=ENVIRONMENT), paths)


@pytest.mark.fault(2, 3)
@pytest.mark.usefixtures("fresh_first_attempt")
def test_ranks_that_are_preempted_before_they_have_met_lose_nothing(
    cluster: Cluster, quiet_runs: QuietRuns, tmp_path: Path
) -> None:
    """Signals wait while Python imports; none of the ranks is left waiting for another."""
    paths = submit_one(tmp_path, text=TWO_RANKS)
    wait_for(lambda: len(ranks_of(paths)) == 2, "two ranks", LIMIT_S)
    hosts = records(paths)[0].hosts
    with high_job(cluster, hosts):
        record = wait_for_attempt_end(paths, 1)
        assert (record.cause, record.reason) == ("preemption", "preempted at step 0"), account(paths)
    wait_for_state(paths, "completed")
    assert_equal_to_the_bit(quiet_runs.of(text=TWO_RANKS, environment=ENVIRONMENT), paths)


@pytest.mark.fault(14, 15)
def test_ranks_of_a_node_that_was_given_up_end_once_others_go_on(cluster: Cluster, tmp_path: Path) -> None:
    """The node's daemons are gone, its ranks are not: two attempts of one run are alive for a while."""
    one_node = EXPERIMENT.replace("nodes: 2", "nodes: 1")
    endless = ("optimization.steps=5000", "checkpoint.every_steps=5")
    paths = submit_one(tmp_path, *endless, text=one_node, pace_s=PACE_S)
    wait_for_step(paths, 7)
    old = ranks_of(paths)
    assert len(old) == 2
    cluster.kill_node(records(paths)[0].hosts[0])
    wait_for(lambda: squeue(cluster)[job_of(paths)].state == "PENDING", "Slurm's notice", LIMIT_S)
    assert set(old) <= set(ranks_of(paths)), "nothing ends them until somebody goes on"
    cluster.run("scontrol", "update", f"JobId={job_of(paths)}", "StartTime=now")
    wait_for(lambda: not set(old) & set(ranks_of(paths)), f"the old ranks' end\n{account(paths)}", LIMIT_S)
    error = paths.attempt(1).error(0).read_text()
    # Told by the next row or by the next save, whichever came first.
    assert re.search("attempt( 2)? continues this run; attempt 1 (ends|saves nothing more)", error), error
    assert records(paths)[0].cause == "lost"
    first = int(records(paths)[1].checkpoints[0].removeprefix("step-"))
    wait_for(lambda: committed(paths)[0].step > first + 5, f"its own saves\n{account(paths)}", LIMIT_S)
    assert Manifest.read(committed(paths)[0]).attempt == 2
    rows = [json.loads(line) for line in paths.metrics.read_text().splitlines() if line.endswith("}")]
    steps = [row["step"] for row in rows if row["split"] == "train"]
    assert len(steps) == len(set(steps)), "an old rank wrote a row"
    assert status(paths)["attempt"] == 2
