from __future__ import annotations

import io
import random
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from hpc_train.experiment.config.training_sections import CompileConfig
from hpc_train.loggers.metrics_writer import MetricsWriter
from hpc_train.paths import RunPaths
from hpc_train.run.metric_rows import MetricsFile, iter_rows
from hpc_train.run.run_status import read_status
from hpc_train.training.compiling import Compilation
from hpc_train.training.meters import Meters, StatusWriter
from hpc_train.training.step_times import FirstStep, ForwardTime, StepTimes, Stragglers
from tests.ranks import run_ranks


class Clock:
    """A clock that stands still until a test moves it."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr("hpc_train.training.step_times.time.monotonic", found)
    return found


@pytest.fixture
def times(clock: Clock) -> StepTimes:
    return StepTimes(global_batch_size=8)


def slow_data(clock: Clock, wait_s: float) -> Iterator[int]:
    for step in range(4):
        clock.now_s += wait_s
        yield step


def test_a_step_contains_its_wait_for_data_and_no_pause(clock: Clock, times: StepTimes) -> None:
    assert times.row(0) == {}
    for _ in times.reading(slow_data(clock, wait_s=0.5)):
        clock.now_s += 1.5
    with times.paused():
        clock.now_s += 60
        with times.paused():  # counts once
            clock.now_s += 60
    assert times.row(4) == {"step_s": 2.0, "data_wait_s": 0.5, "samples_per_s": 4.0}


def test_a_wait_between_steps_counts_for_the_next_row_only(clock: Clock, times: StepTimes) -> None:
    times.row(0)
    with times.waiting_for_data():
        clock.now_s += 3
    clock.now_s += 1
    assert times.row(2)["data_wait_s"] == 1.5
    clock.now_s += 4
    assert times.row(4) == {"step_s": 2.0, "data_wait_s": 0.0, "samples_per_s": 4.0}


def test_what_happened_before_an_attempts_first_row_is_not_counted(clock: Clock, times: StepTimes) -> None:
    with times.paused(), times.waiting_for_data():
        clock.now_s += 60
    assert times.row(7) == {}
    clock.now_s += 2
    assert times.row(9) == {"step_s": 1.0, "data_wait_s": 0.0, "samples_per_s": 8.0}


def test_tokens_are_counted_for_sequences(clock: Clock) -> None:
    times = StepTimes(global_batch_size=8, sequence_length=128)
    times.row(0)
    clock.now_s += 1
    assert times.row(2)["tokens_per_s"] == 8 * 128 * 2


def test_a_clock_that_does_not_advance_is_no_error(clock: Clock, times: StepTimes) -> None:
    times.row(0)
    assert times.row(1)["step_s"] > 0


def test_other_rates_follow_the_samples_per_second(clock: Clock) -> None:
    times = StepTimes(global_batch_size=8, rates=lambda samples_per_s: {"tflops_per_s": samples_per_s / 4})
    assert times.row(0) == {}
    clock.now_s += 1
    assert times.row(1)["tflops_per_s"] == 2.0


def test_the_first_step_is_split_into_data_compilation_and_the_rest(clock: Clock, times: StepTimes) -> None:
    compilation = Compilation(lambda graph, seconds: None)
    batch, calls = cast(Any, "the first micro-batch"), list[Any]()
    first = FirstStep(times, compilation, CompileConfig(), calls.append, calls.append)
    compilation.seconds = 5.0  # in an evaluation before it
    for _ in times.reading(slow_data(clock, wait_s=0.5)):
        first.begin(batch)
        clock.now_s += 12.0
        compilation.seconds += 9.0
        break
    first.end()
    parts = {"data_s": 0.5, "compile_s": 9.0, "run_s": 3.0, "graphs": 0, "cached_graphs": 0}
    assert calls == [batch, parts] and first.is_over


CPU, CUDA = torch.device("cpu"), torch.device("cuda")
RANKS = 8


def after(rows: int, slow: dict[int, float], waits: dict[int, float], noise: float = 0.05) -> Stragglers:
    """Return the account of ranks of which some are slower by a factor, or wait for data for seconds of 1."""
    drawn, found = random.Random(0), Stragglers()
    for _ in range(rows):
        forward = [slow.get(rank, 1.0) * drawn.uniform(1 - noise, 1 + noise) for rank in range(RANKS)]
        wait = [waits.get(rank, 0.0) + drawn.uniform(0, noise) for rank in range(RANKS)]
        found.add(forward, wait, 1.0)
    return found


def test_slow_ranks_are_named_with_how_slow_they_are() -> None:
    found = after(20, {3: 1.3}, {5: 0.4}).slow()
    assert found.keys() == {"3", "5"}
    assert found["3"] == {"forward": pytest.approx(1.3, abs=0.1)}
    assert found["5"] == {"data_wait": pytest.approx(0.4, abs=0.1)}


def test_of_two_ranks_the_slower_one_is_named() -> None:
    found = Stragglers()
    for _ in range(4):
        found.add([0.1, 0.15], [0.0, 0.0], 1.0)
    assert found.slow() == {"1": {"forward": 1.5}}


def test_noise_names_nobody() -> None:
    assert after(20, {}, {}).slow() == {}
    once = after(20, {}, {})
    once.add([3.0] + [1.0] * (RANKS - 1), [0.9] + [0.0] * (RANKS - 1), 1.0)
    assert once.slow() == {}
    assert after(3, {3: 2.0}, {5: 0.9}).slow() == {}, "too few rows"


def test_a_rank_that_recovers_is_named_no_more() -> None:
    found = after(20, {3: 1.5}, {})
    for _ in range(4):
        found.add([1.0] * RANKS, [0.0] * RANKS, 1.0)
    assert found.slow() == {}


def test_on_the_host_the_mean_of_forward_passes_is_taken_once(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 1.0, 10.0, 13.0])
    monkeypatch.setattr("hpc_train.training.step_times.time.perf_counter", lambda: next(clock))
    found = ForwardTime(CPU)
    for _ in range(2):
        found.begin()
        found.end()
    assert (found.take(), found.take()) == (2.0, 0.0)


def test_on_a_device_forward_passes_count_once_it_has_done_them(monkeypatch: pytest.MonkeyPatch) -> None:
    done: deque[Event] = deque()

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None: ...

        def query(self) -> bool:
            return self in done

        def elapsed_time(self, other: object) -> float:
            return 250.0

    monkeypatch.setattr(torch.cuda, "Event", Event)
    found = ForwardTime(CUDA)
    found.begin()
    found.end()
    assert found.take() == 0.0
    done.append(found._pending[0][1])  # type: ignore[arg-type]
    found.begin()
    found.end()
    assert (found.take(), len(found._pending)) == (0.25, 1)


def _write_rows(rank: int, world_size: int, folder: Path) -> None:
    paths = RunPaths(folder)
    writer = MetricsWriter(MetricsFile(paths.metrics, 0), [], io.StringIO()) if rank == 0 else None
    meters = Meters(1, world_size, 10, 1, writer)
    for step in range(1, 7):
        meters.forward_time._add(0.3 if rank == 1 else 0.2)
        meters.times.data_wait_s += 60.0 if rank == 2 else 0.0
        meters.train_row(step, 0.1, torch.tensor(float(rank)), None)
    if writer is not None:
        StatusWriter(paths, 1, 10, 10, meters.stragglers).write("completed", 6)


def test_ranks_times_come_with_the_sum_of_a_row_and_the_last_status_names_slow_ones(tmp_path: Path) -> None:
    run_ranks(3, _write_rows, tmp_path, folder=tmp_path)
    rows = list(iter_rows(RunPaths(tmp_path).metrics))
    assert [row["loss"] for row in rows] == [3.0] * 6
    assert all("forward" not in key for row in rows for key in row)
    status = read_status(RunPaths(tmp_path))
    assert status.slow_ranks is not None and status.slow_ranks["1"] == {"forward": 1.5}
    assert status.slow_ranks["2"].keys() == {"data_wait"}
    assert status.slow_words.startswith("rank 1: forward 1.50 × the median; rank 2: waits ")
