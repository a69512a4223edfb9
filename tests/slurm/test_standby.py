"""``recovery.standby`` on a real Slurm: the next attempt begins in processes that were started before."""

from __future__ import annotations

import os
import signal
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
    ranks_of,
    records,
    standby_files,
    submit_one,
    wait_for_attempt_end,
    wait_for_state,
)
from tests.slurm.runs import high_job
from tests.slurm.test_spare_nodes import wait_until_held

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

STANDBY = ("recovery.standby=true", "recovery.restart=in_place", "checkpoint.every_steps=5")


def wait_for_standby(paths: RunPaths, attempt: int) -> set[int]:
    """Wait until both ranks of the attempt are on standby; return their processes."""

    def are_ready() -> bool:
        files = [file for file in standby_files(paths) if file.parent.name.endswith(f"-{attempt}")]
        # A command that a rank starts looks like the rank for a moment.
        return len(files) == len(ranks_of(paths, attempt=attempt)) == 2

    wait_for(are_ready, f"ranks on standby\n{account(paths)}", LIMIT_S)
    return set(ranks_of(paths, attempt=attempt))


def wait_for_ranks(paths: RunPaths, attempt: int, processes: set[int]) -> None:
    """Wait until these are the ranks of the attempt."""
    wait_for(lambda: set(ranks_of(paths, attempt=attempt)) == processes, account(paths), LIMIT_S)


def kill(paths: RunPaths, rank: int, attempt: int) -> None:
    (process,) = ranks_of(paths, rank=rank, attempt=attempt)
    os.kill(process, signal.SIGKILL)


@pytest.mark.fault(16, 56, 59)
def test_a_restart_uses_the_ranks_on_standby(cluster: Cluster, quiet_runs: QuietRuns, tmp_path: Path) -> None:
    """After a kill of one of those the next restart starts ranks as usual."""
    with Hold(tmp_path, 12) as hold:
        paths = submit_one(tmp_path, *STANDBY, hold.override, text=TWO_RANKS)
        wait_until_held(hold, paths)
        waiting = wait_for_standby(paths, 2)
        hold.at(14, since_attempt=2, since_row=2)
        kill(paths, rank=1, attempt=1)
        wait_until_held(hold, paths)
        wait_for_ranks(paths, 2, waiting)
        assert "which was on standby" in paths.attempt(2).log(1).read_text()
        waiting = wait_for_standby(paths, 3)
        kill(paths, rank=1, attempt=3)
        wait_for(lambda: not ranks_of(paths, attempt=3), "the end of all ranks on standby", LIMIT_S)
        kill(paths, rank=0, attempt=2)  # on another node: one that ended two attempts is excluded
        wait_for(lambda: len(records(paths)) == 3 and bool(ranks_of(paths, attempt=3)), "attempt 3", LIMIT_S)
        assert waiting.isdisjoint(ranks_of(paths, attempt=3)), account(paths)
        wait_for_standby(paths, 4)
    assert wait_for_state(paths, "completed", "failed") == "completed", account(paths)
    wait_for_attempt_end(paths, 3)
    first, second, third = records(paths)
    assert [record.in_place for record in (first, second, third)] == [False, True, True], account(paths)
    assert first.job == second.job == third.job
    for record, victim in ((first, "rank 1 on n2"), (second, "rank 0 on n1")):
        assert (record.cause, f"{victim}: killed by SIGKILL" in str(record.reason)) == ("crash", True), record
    wait_for(lambda: not ranks_of(paths) and not standby_files(paths), "the end of all ranks", LIMIT_S)
    assert_equal_to_the_bit(quiet_runs.of(text=TWO_RANKS, environment=ENVIRONMENT), paths)


@pytest.mark.fault(14, 58, 59)
def test_a_lost_node_is_replaced_while_ranks_are_on_standby(
    cluster: Cluster, quiet_runs: QuietRuns, tmp_path: Path
) -> None:
    """Ranks start as usual on the spare node, and others are on standby there for the next restart."""
    with Hold(tmp_path, 12) as hold:
        paths = submit_one(tmp_path, "slurm.spare_nodes=1", *STANDBY, hold.override, text=TWO_RANKS)
        wait_until_held(hold, paths)
        (first,) = records(paths)
        assert (first.hosts, first.spare_hosts) == (["n1", "n2"], ["n3"]), account(paths)
        waiting = wait_for_standby(paths, 2)
        cluster.kill_node("n2", with_jobs=True)
        hold.at(14, since_attempt=2, since_row=2)
        assert wait_for_attempt_end(paths, 1).bad_nodes == {"n2": "died"}, account(paths)
        wait_until_held(hold, paths)
        assert waiting.isdisjoint(ranks_of(paths, attempt=2)), account(paths)
        waiting = wait_for_standby(paths, 3)
        kill(paths, rank=1, attempt=2)
        hold.at(16, since_attempt=3)
        wait_until_held(hold, paths)
        wait_for_ranks(paths, 3, waiting)
    assert wait_for_state(paths, "completed", "failed") == "completed", account(paths)
    wait_for_attempt_end(paths, 3)
    _, second, third = records(paths)
    for record in (second, third):
        assert (record.in_place, record.job, record.hosts) == (True, first.job, ["n1", "n3"]), account(paths)
    wait_for(lambda: not ranks_of(paths) and not standby_files(paths), "the end of all ranks", LIMIT_S)
    assert_equal_to_the_bit(quiet_runs.of(text=TWO_RANKS, environment=ENVIRONMENT), paths)


@pytest.mark.fault(1)
def test_a_preemption_ends_the_ranks_on_standby(cluster: Cluster, tmp_path: Path) -> None:
    with Hold(tmp_path, 12) as hold:
        paths = submit_one(tmp_path, *STANDBY, hold.override, text=TWO_RANKS)
        wait_until_held(hold, paths)
        wait_for_standby(paths, 2)
        with high_job(cluster, records(paths)[0].hosts):
            assert wait_for_attempt_end(paths, 1).cause == "preemption", account(paths)
            wait_for(lambda: not ranks_of(paths), "the end of all ranks", LIMIT_S)
    assert wait_for_state(paths, "completed", "failed") == "completed", account(paths)
    assert not records(paths)[1].in_place
