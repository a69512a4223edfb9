"""What a run has used and lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hpc_train.experiment.topology.degrees import Ranks
from hpc_train.launchers.base import JobUsage
from hpc_train.report.metrics_reader import rows_in
from hpc_train.report.run_files import RunFiles
from hpc_train.report.usage import Usage, counts_by_state, step_seconds, usage_of
from hpc_train.run.attempts import AttemptRecord, write_record
from hpc_train.run.run_status import read_status
from tests.report.made_runs import made_sweep
from tests.run.runs import change_facts, small_run

_ON_16 = Ranks(most=16, gpus=16, cores=64)


def test_time_is_divided_by_cause_and_adds_up(tmp_path: Path) -> None:
    """A preempted run of 8 ranks, half of the 16 that are planned: half of the GPUs."""
    (paths,) = made_sweep(tmp_path, 1, steps=100)
    run = RunFiles.read(paths)
    usage = usage_of(
        run, read_status(paths), list(rows_in(paths.metrics)), 1.0, _ON_16, JobUsage(6.0, 32.0, 0.75)
    )
    assert usage is not None
    elapsed_s = sum(usage.time.values())
    assert usage.gpu_hours == pytest.approx(8 * elapsed_s / 3600, rel=0.01)
    assert usage.core_hours == pytest.approx(4 * usage.gpu_hours, rel=0.01)
    assert usage.time["evaluation"] == pytest.approx(2 * 6.0, abs=2.5)
    assert usage.time["starting"] == pytest.approx(2 * 26, abs=1) and usage.time["saving"] == 7.0
    assert (usage.peak_gpu_memory_gib, usage.memory_efficiency) == (21.4, 0.1875)
    lines = dict(usage.details())
    assert lines["used"].endswith("GPU-hours") and "starts 52s" in lines["time lost"]
    assert lines["memory"] == "peak 21.4 GiB on a GPU, peak 6 GiB on a node, 19% of the 32 GiB requested"
    assert lines["CPU"] == "75% of the cores' time"
    assert Usage(**vars(usage)) == usage


def test_the_queue_is_waited_for_before_the_first_attempt_and_after_a_requeue(tmp_path: Path) -> None:
    paths = small_run(tmp_path)
    assert usage_of(RunFiles.read(paths), read_status(paths), [], 1.0, _ON_16, None) is None, "no attempt"
    change_facts(paths, created="2026-11-20T09:00:00+00:00")
    for number, (start, end, job, cause) in enumerate(
        [("09:10", "09:20", "12", "preemption"), ("09:25", "09:30", "12", "crash"),
         ("09:31", "09:40", "12", "user error"), ("18:00", "18:10", "13", "completed")], start=1,
    ):  # fmt: skip
        attempt = paths.attempt(number)
        attempt.folder.mkdir(parents=True)
        begin, ended = (f"2026-11-20T{time}:00+00:00" for time in (start, end))
        write_record(
            attempt, AttemptRecord(number, begin, [], None, end=ended, job=job, cause=cause, ranks=4)
        )
    usage = usage_of(RunFiles.read(paths), read_status(paths), [], 1.0, None, None)
    assert usage is not None
    assert usage.time["queue"] == 600 + 300 + 60, "not the hours until it was resumed by hand"
    assert (usage.gpu_hours, usage.cpu_efficiency) == (None, None)


def test_runs_are_counted_by_state() -> None:
    assert counts_by_state(["running", "failed", "running"]) == "3 runs: 2 running, 1 failed"
    assert counts_by_state(["failed"]) == "1 run: 1 failed"


def test_large_numbers_of_hours_are_written_in_full() -> None:
    assert dict(Usage(12345.6, None).details())["used"] == "12,346 GPU-hours"
    assert dict(Usage(None, 1.25).details())["used"] == "1.25 core-hours"


def row(
    step: int, step_s: float | None = None, wait_s: float | None = None, split: str = "train"
) -> dict[str, Any]:
    times = {"step_s": step_s, "data_wait_s": wait_s}
    return {"split": split, "step": step} | {key: time for key, time in times.items() if time is not None}


@pytest.mark.parametrize(
    ("rows", "num_steps", "seconds"),
    [
        ([], 10, None),
        ([row(5), row(10)], 10, None),
        ([row(5, 2.0), row(10, 4.0)], 10, 5 * 2 + 5 * 4),
        # Waits for data do not count.
        ([row(5, 2.0, 0.5)], 5, 5 * 1.5),
        # The first row of an attempt counts as the next one of any attempt.
        ([row(5), row(10, 2.0)], 10, 20),
        ([row(5, 1.0), row(8), row(9), row(10, 2.0)], 10, 5 + 10),
        # What follows the last row with a time counts as that row.
        ([row(5, 2.0), row(7)], 8, 16),
        # Steps that no checkpoint contains do not count.
        ([row(5, 2.0), row(10, 4.0), row(15, 8.0)], 7, 10 + 8),
        ([row(5, 2.0)], 0, 0),
        # Evaluations and other content of the file.
        ([row(5, 2.0), row(5, split="val"), row(10, 2.0)], 10, 20),
        ([{"split": "train"}, {"split": "train", "step": "x"}, row(5, 2.0)], 5, 10),
    ],
)
def test_each_step_counts_once(rows: list[dict[str, Any]], num_steps: int, seconds: float | None) -> None:
    found = step_seconds(rows, num_steps)
    assert (found and found.useful) == seconds
