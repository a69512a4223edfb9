from __future__ import annotations

import gzip
import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch.profiler import profile, record_function

from hpc_train.experiment.config.training_sections import ProfileConfig
from hpc_train.paths import AttemptPaths
from hpc_train.training import profiling
from hpc_train.training.profiling import Shares, StepProfiler, shares_of, union_length
from hpc_train.training.step_times import StepTimes
from tests.waiting import HANG_LIMIT_S

CPU = torch.device("cpu")
#: Far longer than anything else in a step of these tests.
LONG_S = 0.1


def profiled(folder: Path, step: Callable[[], object], *, wait_s: float = 0.0, steps: int = 5) -> str:
    """Run ``steps`` steps, of which the second and third are profiled; return the table."""
    times = StepTimes(1)
    profiler = StepProfiler(ProfileConfig(after_steps=1, steps=2), AttemptPaths(folder), CPU, times)

    def data() -> Iterator[int]:
        for number in range(steps):
            time.sleep(wait_s)
            yield number

    for _ in times.reading(data()):
        step()
        profiler.step_done()
    profiler.close()
    table = AttemptPaths(folder).profile_table
    return table.read_text(encoding="utf-8") if table.exists() else ""


def compute() -> None:
    end = time.monotonic() + LONG_S
    matrix = torch.ones(512, 512)
    while time.monotonic() < end:
        matrix @ matrix


def annotated_sleep() -> None:
    with record_function("a model's forward"):
        torch.ones(4).sum()
        time.sleep(LONG_S)


@pytest.mark.parametrize(
    ("step", "wait_s", "limit"),
    [
        (lambda: torch.ones(4).sum(), 5 * LONG_S, "input; to go faster raise data.workers"),
        (compute, 0.0, "device; to go faster use more ranks"),
        (annotated_sleep, 0.0, "host"),
    ],
    ids=["data", "operations", "Python"],
)
def test_the_limit_is_named(step: Callable[[], object], wait_s: float, limit: str, tmp_path: Path) -> None:
    assert f"limited by: {limit}" in profiled(tmp_path, step, wait_s=wait_s)


def test_the_trace_and_the_slowest_operations_are_written(tmp_path: Path) -> None:
    table = profiled(tmp_path, compute)
    assert table.startswith("2 steps of rank 0, ")
    assert "aten::mm" in table
    with gzip.open(AttemptPaths(tmp_path).profile_trace) as trace:
        assert "aten::mm" in {event.get("name") for event in json.load(trace)["traceEvents"]}


def test_a_run_that_ends_earlier_leaves_the_steps_it_had(tmp_path: Path) -> None:
    assert profiled(tmp_path, compute, steps=2).startswith("1 step of rank 0, ")


def test_a_run_that_ends_before_its_first_profiled_step_leaves_nothing(tmp_path: Path) -> None:
    assert profiled(tmp_path, compute, steps=1) == ""
    assert not AttemptPaths(tmp_path).profile_trace.exists()


def test_an_unwritable_profile_ends_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert profiled(tmp_path / "missing", compute) == ""
    assert "training continues" in caplog.text


def test_each_moment_counts_once() -> None:
    shares = Shares.of(10.0, [(0, 2)], [(1, 4), (3, 5)], [(4, 8)])
    assert shares == Shares(input=2, device=3, network=3, host=2)
    assert "30 %  communication" in shares.table(1, "cuda")


@pytest.mark.parametrize(
    ("intervals", "expected"),
    [([], 0), ([(1, 3)], 2), ([(4, 5), (1, 3), (2, 3.5)], 3.5), ([(0, 10), (2, 3)], 10)],
)
def test_overlaps_count_once(intervals: list[tuple[float, float]], expected: float) -> None:
    assert union_length(intervals) == expected


def test_gloos_operations_are_communication() -> None:
    with profile(acc_events=True) as running, record_function("gloo:all_reduce"):
        time.sleep(LONG_S)
    shares = shares_of(running.events(), 2 * LONG_S, CPU)
    assert shares.network >= LONG_S
    assert shares.device == 0


def test_a_device_that_hangs_keeps_no_rank_from_ending(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """On the way out of an error, behind a collective whose peer is gone."""
    times, may_end = StepTimes(1), threading.Event()
    profiler = StepProfiler(ProfileConfig(after_steps=1, steps=2), AttemptPaths(tmp_path), CPU, times)
    profiler.step_done()
    monkeypatch.setattr(profiling, "_synchronize", lambda device: may_end.wait(HANG_LIMIT_S))
    monkeypatch.setattr(profiling, "_SYNCHRONIZE_LIMIT_S", 0.1)
    try:
        profiler.close()
        assert not may_end.is_set() and "cpu does not finish its steps" in caplog.text
    finally:
        may_end.set()
        assert profiler._profile is not None
        profiler._profile.stop()
