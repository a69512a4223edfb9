"""Faults that the shim injects into the calls of ranks: of files and of clocks.

In a file of their own: all ranks here are forked from a process that was started with the shim.
"""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest

from tests import warm
from tests.faults.driver import assert_whole, complete, strike
from tests.faults.faults import Kill
from tests.faults.local import EXPERIMENT, seeds, survive_here, uninterrupted
from tests.faults.runs import LocalRun, wait
from tests.faults.shim import Shim, Touch
from tests.quiet import QuietRuns

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900), pytest.mark.usefixtures("preloaded")]


@pytest.fixture
def shim(tmp_path: Path) -> Shim:
    return Shim(tmp_path / "orders")


@pytest.mark.fault(6, 13)
@seeds
def test_kills_while_a_checkpoint_is_written(
    seed: int, quiet_runs: QuietRuns, tmp_path: Path, shim: Shim
) -> None:
    survive_here("writes", seed, quiet_runs, tmp_path, shim=shim)


@pytest.mark.fault(7, 8)
@seeds
def test_no_room_and_no_quota(seed: int, quiet_runs: QuietRuns, tmp_path: Path, shim: Shim) -> None:
    survive_here("no room", seed, quiet_runs, tmp_path, shim=shim)


@pytest.mark.fault(9)
@seeds
def test_input_output_errors(seed: int, quiet_runs: QuietRuns, tmp_path: Path, shim: Shim) -> None:
    survive_here("input/output error", seed, quiet_runs, tmp_path, shim=shim)


@pytest.mark.fault(9)
def test_input_output_errors_of_rows_log_and_status_end_no_attempt(
    quiet_runs: QuietRuns, tmp_path: Path
) -> None:
    """A file server that fails for a moment while rows, log and status are written ends no attempt."""
    expected = uninterrupted(quiet_runs)
    shim = Shim(tmp_path / "orders", ("status.json", "metrics.jsonl", "rank-0.log"))
    shim.order(0, 60, errno.ESTALE, 2, Touch.WRITE | Touch.SYNC | Touch.CREATE | Touch.RENAME)
    run = LocalRun(tmp_path, EXPERIMENT, shim=shim)
    complete(run)
    assert shim.has_struck(0) and run.attempt() == 1, run.account()
    assert_whole(run, expected)


@pytest.mark.fault(42)
def test_clocks_that_disagree(quiet_runs: QuietRuns, tmp_path: Path, shim: Shim) -> None:
    """Two hours between ranks, and the next attempt begins two hours before the one before."""
    expected = uninterrupted(quiet_runs)
    run = LocalRun(tmp_path, EXPERIMENT, shim=shim, FAULTS_CLOCK_S="7200,0")
    wait(lambda: len(run.ranks()) == 2, run.account)
    assert warm.FRESH in os.environ or all(map(warm.is_forked, run.ranks().values())), "they import torch"
    strike(run, Kill(step=11, ranks=(0, 1)), FAULTS_CLOCK_S="-7200,0")
    complete(run)
    assert_whole(run, expected)
    times = [json.loads(line)["time"] for line in run.paths.metrics.read_text().splitlines()]
    assert float(times[0]) > float(times[-1]) + 7200, "the ranks' clocks were right"
