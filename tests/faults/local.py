"""The experiment that faults strike, and runs of it on this machine that survive a schedule's faults."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpc_train.paths import RunPaths
from tests.end_to_end.runs import PACED
from tests.faults.driver import survive
from tests.faults.runs import LocalRun
from tests.faults.schedule import Frame, Schedule, chosen_seeds
from tests.faults.shim import Shim
from tests.quiet import QuietRuns
from tests.slurm.experiments import ENVIRONMENT

EXPERIMENT = (
    PACED.replace("  steps: 60", "  steps: 40").replace("{every_steps: 7}", "{every_steps: 4}")
    + "recovery: {max_crashes: 100, max_without_progress: 100, exclude_nodes_for_h: 0}\n"
)
LOCAL = Frame(ranks=2, nodes=1, first=3, last=22)
seeds = pytest.mark.parametrize("seed", chosen_seeds("1"))


def uninterrupted(quiet_runs: QuietRuns) -> RunPaths:
    """Return the run that local runs of ``EXPERIMENT`` must equal."""
    return quiet_runs.of(text=EXPERIMENT, ranks=LOCAL.ranks, environment=ENVIRONMENT)


def survive_here(
    kind: str,
    seed: int,
    quiet_runs: QuietRuns,
    folder: Path,
    *overrides: str,
    shim: Shim | None = None,
) -> None:
    """Let the faults of a seed strike a local run; ``shim`` where they need it."""
    expected = uninterrupted(quiet_runs)
    run = LocalRun(folder, EXPERIMENT, *overrides, shim=shim)
    survive(run, Schedule.of(seed, kind, LOCAL).faults, expected)
