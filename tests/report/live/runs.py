"""Runs for the screen, written without training."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from hpc_train.paths import RunPaths, runs_root
from hpc_train.run.attempts import claim_attempt
from hpc_train.run.create import create_run
from hpc_train.run.run_status import RunStatus, write_status
from tests.run.runs import small_experiment


def made_run(
    folder: Path,
    run_id: str = "abc",
    state: str = "running",
    step: int = 30,
    reason: str = "rank 0: ValueError: no",
    values: dict[str, Any] | None = None,
) -> RunPaths:
    """Create a run of 100 steps; one that is running has this process as its launcher.

    ``reason``: of a failed run. ``values``: the swept keys and their values.
    """
    paths = RunPaths(folder / "small" / run_id)
    assert create_run(paths, small_experiment(), run_id, 100, values=values)
    claim_attempt(paths, "local", hosts=["n1"])
    write_status(paths, RunStatus(state, step, 100, 1.0, 1, reason if state == "failed" else None))
    add_rows(paths, step)
    return paths


def three_runs() -> list[RunPaths]:
    """Create a run that runs, one that has failed and one that has completed."""
    states = (("a1", "running", 50), ("b2", "failed", 20), ("c3", "completed", 100))
    return [made_run(runs_root(), *facts) for facts in states]


def add_rows(paths: RunPaths, until: int, since: int = 1, **more: Any) -> None:
    """Append a training row for each step, and an evaluation's every ten steps."""
    now = time.time()
    with paths.metrics.open("a") as file:
        for step in range(since, until + 1):
            head = {"time": now - (until - step), "attempt": 1, "step": step}
            times = {"step_s": 1.0, "data_wait_s": 0.25, "samples_per_s": 1234.5, "mfu": 0.41}
            row = {"split": "train", **head, "loss": 2.0 / step, **times}
            file.write(json.dumps(row | more) + "\n")
            if step % 10 == 0:
                file.write(json.dumps({"split": "val", **head, "accuracy": step / 100}) + "\n")
