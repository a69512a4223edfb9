"""``nodes: 1-2`` on a real Slurm: requeued, a run goes on with the nodes it gets, and trains the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hpc_train.paths import RunPaths
from tests.end_to_end.holding import Hold
from tests.end_to_end.runs import final_tensors, rows
from tests.quiet import QuietRuns
from tests.slurm.cluster import Cluster
from tests.slurm.configuration import NODES
from tests.slurm.experiments import (
    ENVIRONMENT,
    EXPERIMENT,
    account,
    records,
    submit_one,
    wait_for_attempt_end,
    wait_for_completion,
    wait_for_step,
)
from tests.slurm.runs import high_job

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

STEPS = 40
#: In float64 rounding stays small. BatchNorm on any number of ranks is compared in tests/parallelism.
ELASTIC = (
    EXPERIMENT.replace(':net"}', ':net", args: {norm: false}}')
    .replace("adamw, lr: 0.003", "sgd, lr: 0.05, momentum: 0.9")
    .replace("steps: 60", f"steps: {STEPS}")
    .replace("nodes: 2, ranks_per_node: 2", "nodes: 1-2, ranks_per_node: 1")
    + "precision: fp64\n"
)
assert "norm: false" in ELASTIC and "momentum" in ELASTIC and "nodes: 1-2" in ELASTIC


@pytest.mark.fault(40)
def test_a_requeued_run_goes_on_with_the_nodes_that_are_left(
    cluster: Cluster, quiet_runs: QuietRuns, tmp_path: Path
) -> None:
    quiet = quiet_runs.of(text=ELASTIC, environment=ENVIRONMENT)
    hold = Hold(tmp_path, 5)
    paths = submit_one(tmp_path / "elastic", hold.override, text=ELASTIC)
    wait_for_step(paths, 5)
    hosts = records(paths)[0].hosts
    assert len(hosts) == 2, "all four nodes are free"
    kept = hosts[0]
    with high_job(cluster, [node for node in NODES if node != kept]):  # which preempts the run
        assert wait_for_attempt_end(paths, 1).cause == "preemption", account(paths)
        hold.release()
        wait_for_completion(paths)
        wait_for_attempt_end(paths, 2)
    found = records(paths)
    assert [record.cause for record in found] == ["preemption", "completed"], account(paths)
    assert [(len(record.hosts), record.ranks) for record in found] == [(2, 2), (1, 1)]
    assert found[1].hosts == [kept] and found[0].job == found[1].job
    assert_same_training(paths, quiet)
    logs = [attempt.log(0).read_text() for attempt in paths.attempt_folders()]
    assert ["continuing with" in log for log in logs] == [False, True]
    assert (
        "continuing with 1 rank under ddp from checkpoint " in logs[1] and "of 2 ranks under ddp" in logs[1]
    )


def assert_same_training(paths: RunPaths, quiet: RunPaths) -> None:
    """Compare but for rounding: each step's loss tells that it saw the same samples, none twice or lost."""
    assert [row["step"] for row in rows(paths, "train")] == list(range(1, STEPS + 1))
    for row, other in zip(rows(paths), rows(quiet), strict=True):
        assert numbers(row) == pytest.approx(numbers(other), rel=0, abs=1e-9)
    ours, theirs = final_tensors(paths), final_tensors(quiet)
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        if isinstance(value, torch.Tensor):
            assert value.dtype == torch.float64, name
            torch.testing.assert_close(ours[name], value, rtol=0, atol=1e-9, msg=name)


def numbers(row: dict[str, Any]) -> dict[str, float]:
    return {key: value for key, value in row.items() if not isinstance(value, str)}
