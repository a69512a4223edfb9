"""32 runs of a sweep as 32 jobs and as 4 jobs of 8 slots, on exclusive nodes of a real Slurm.

    python -m benchmarks.shared_jobs [--rounds 7] [--quick] [--part makespan|disturbed]

Starts the test cluster (tests/slurm/cluster.py; root, Debian's Slurm): four nodes, each given to one job as a
whole. A run trains a small network on one CPU rank for about ten seconds, of which it sleeps nearly all: the
four nodes share the cores of this machine, so computing would take as long either way. Ranks are forked from
a process that has imported torch (tests/warm.py), for the same reason. Measured are the time from ``submit``
to the end of the last run, and the number of jobs; every run must have completed, and equal the run of the
same seed of the first round, which has a job of its own, bit by bit.

Then one of the 4 jobs of 8 slots is disturbed, each time in another way: SIGKILL of a run's rank, preemption
of the job, and a full disk of a run's folder, which ends that run. ``--part`` measures one of the two parts.
``--quick`` runs two rounds of 8 runs in 2 jobs of 4 slots, and writes no results. Writes
benchmarks/results/shared_jobs.json.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from benchmarks import slurm_cluster
from benchmarks.measuring import comparison, conditions, interleaved, parser, report, rounds_of, table
from hpc_train.paths import RunPaths
from hpc_train.run.checkpoints import committed
from hpc_train.run.run_status import read_status
from tests import warm
from tests.disks import on_small_disk, take_room
from tests.end_to_end.runs import assert_equal_to_the_bit, found_runs, wait_for
from tests.slurm.cluster import Cluster
from tests.slurm.configuration import Settings
from tests.slurm.experiments import (
    ENVIRONMENT,
    EXPERIMENT,
    LIMIT_S,
    account,
    job_of,
    ranks_of,
    records,
    start_now,
    submit,
    wait_for_attempt_end,
    wait_for_state,
    wait_for_step,
)
from tests.slurm.runs import high_job

#: Sleep in each of the four micro-batches of a step, so that a run takes about ten seconds.
PACE_S = 0.06
STEPS = 40
EXCLUSIVE = "slurm.extra={exclusive: true}"
HELD = "slurm.extra={exclusive: true, hold: true}"
TEXT = (
    EXPERIMENT.partition("slurm:")[0]
    + """\
slurm: {partition: low, time_limit: 60min}
"""
)


@dataclass
class Sweep:
    """A sweep over seeds, submitted to a cluster again and again."""

    cluster: Cluster
    folder: Path
    num_runs: int
    #: Seed → the run in a job of its own with which others are compared.
    alone: dict[int, RunPaths] = field(default_factory=dict)
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    def makespan_s(self, slots: int) -> float:
        """Return the seconds from ``submit`` to the end of the last run; all must complete."""
        began = time.time()
        runs = self._submit(slots, EXCLUSIVE)
        _wait_for_all(runs)
        seconds = time.time() - began
        num_jobs = len({job_of(run) for run in runs.values()})
        assert num_jobs == self.num_runs // slots, num_jobs
        if not self.alone and slots == 1:
            self.alone = runs
        print(f"{num_jobs} jobs: {seconds:.1f} s, {self._num_identical(runs)} runs", file=sys.stderr)
        self._clear()
        return seconds

    def disturbed(self, slots: int, disturb: Callable[[Cluster, RunPaths], None]) -> dict[str, float | None]:
        """Disturb the first run while all train; return what became of all."""
        runs = self._submit(slots, HELD, "checkpoint.every_steps=5")
        first, is_full = runs[1], disturb is _fill_disk
        with on_small_disk(first.folder, "24m") if is_full else nullcontext():
            self.cluster.run("scontrol", "release", job_of(first).partition("_")[0])
            for run in runs.values():
                wait_for_step(run, 5)
            disturb(self.cluster, first)
            _wait_for_all(runs, "failed" if is_full else "completed")
            states = [read_status(run).state for run in runs.values()]
            row: dict[str, float | None] = {
                "completed, bitwise identical": self._num_identical(runs),
                "failed": states.count("failed"),
                "trained in one attempt": sum(len(records(run)) == 1 for run in runs.values()),
            }
            self._clear()
        print(f"{disturb.__name__}: {row}", file=sys.stderr)
        return row

    def _submit(self, slots: int, *overrides: str) -> dict[int, RunPaths]:
        """Submit the runs; return them by their seeds."""
        (folder := self.folder / f"sweep-{next(self._numbers)}").mkdir()
        grid = f"sweep.grid={{seed: {list(range(1, self.num_runs + 1))}}}"
        sizes = (grid, f"slurm.runs_per_job={slots}", f"optimization.steps={STEPS}")
        submit(folder, *sizes, *overrides, text=TEXT, pace_s=PACE_S)
        runs = {int(json.loads(run.resolved.read_text())["seed"]): run for run in found_runs(folder)}
        assert len(runs) == self.num_runs
        return dict(sorted(runs.items()))

    def _num_identical(self, runs: dict[int, RunPaths]) -> int:
        """Return the number of completed runs. Raises AssertionError if one differs from the run alone."""
        completed = {seed: run for seed, run in runs.items() if read_status(run).state == "completed"}
        for seed, run in completed.items() if self.alone else ():
            assert_equal_to_the_bit(self.alone[seed], run)
        return len(completed)

    def _clear(self) -> None:
        self.cluster.wait(lambda: not self.cluster.run("squeue", "--noheader"), "the end of all jobs")


def _kill_rank(cluster: Cluster, run: RunPaths) -> None:
    (rank,) = ranks_of(run)
    os.kill(rank, signal.SIGKILL)


def _preempt_job(cluster: Cluster, run: RunPaths) -> None:
    with high_job(cluster, records(run)[-1].hosts):
        ended = wait_for_attempt_end(run, 1)
    assert ended.cause == "preemption", account(run)
    start_now(cluster, run)


def _fill_disk(cluster: Cluster, run: RunPaths) -> None:
    wait_for(lambda: bool(committed(run)), "a checkpoint", LIMIT_S)
    wait_for(lambda: take_room(run.folder / "ballast", leave_bytes=500_000), "a full disk", LIMIT_S)


def _wait_for_all(runs: dict[int, RunPaths], first_state: str = "completed") -> None:
    """Wait until all runs have completed, the first one until it is in ``first_state``."""
    for seed, run in runs.items():
        state = wait_for_state(run, "completed", "failed")
        assert state == (first_state if seed == 1 else "completed"), account(run)


DISTURBANCES = {
    "SIGKILL of a run's rank": _kill_rank,
    "preemption of a job": _preempt_job,
    "full disk of a run's folder": _fill_disk,
}


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--part", choices=["makespan", "disturbed"], help="measure only this")
    arguments = options.parse_args()
    num_runs, slots = (8, 4) if arguments.quick else (32, 8)
    num_jobs = num_runs // slots
    try:
        with slurm_cluster.started(Settings(accounting=False)) as (cluster, folder, slurm):
            os.environ.update(ENVIRONMENT | warm.for_jobs())
            sweep = Sweep(cluster, folder, num_runs)
            arms = {
                f"{num_runs} jobs": partial(sweep.makespan_s, 1),
                f"{num_jobs} jobs of {slots} slots": partial(sweep.makespan_s, slots),
            }
            values: dict[str, list[float]] = {}
            rows: dict[str, dict[str, float | None]] = {}
            if arguments.part != "disturbed":
                values = interleaved(arms, rounds_of(arguments))
            else:
                sweep.makespan_s(1)  # the runs with which others are compared
            if arguments.part != "makespan":
                rows = {name: sweep.disturbed(slots, disturb) for name, disturb in DISTURBANCES.items()}
    finally:
        warm.close()
    title = f"Sweep of {num_runs} runs on four exclusive nodes: submit to the end of the last run"
    compared = [comparison(title, "seconds", values, f"{num_runs} jobs")] if values else []
    title = f"Sweep of {num_runs} runs in {num_jobs} jobs of {slots} slots, one of them disturbed"
    disturbed = [table(title, "runs", rows)] if rows else []
    report("shared_jobs", arguments, conditions() | {"slurm": slurm}, compared, disturbed)


if __name__ == "__main__":
    main()
