"""Whether the next step's batches are there, and what happens while they are waited for."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from hpc_train.errors import BadFileError
from hpc_train.training.datasets.batches import TrainingBatches, evaluation_batches
from hpc_train.training.datasets.reading import Failure, Read, SlotReader
from hpc_train.training.datasets.sampler import Slot
from hpc_train.training.datasets.workers import WorkerLostError
from tests.datasets.samples import (
    AUGMENT,
    CPU,
    TOTAL_STEPS,
    BrokenSplit,
    OneByOne,
    RandomSplit,
    assert_equal,
    experiment,
    random_split,
    steps,
    training,
)
from tests.waiting import HANG_LIMIT_S


class GatedSplit:
    """Loader processes wait before each sample, or before sample ``only``, until ``gate`` is there."""

    def __init__(self, gate: Path, only: int | None = None) -> None:
        self._rank_pid = os.getpid()
        self._gate = gate
        self._only = only

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int, /) -> tuple[Any, int]:
        if os.getpid() != self._rank_pid and self._only in (None, index):
            while not self._gate.exists():
                time.sleep(0.01)
        return torch.zeros(3, 4, 4, dtype=torch.uint8), index


def wait_until_ready(batches: TrainingBatches, limit_s: float = HANG_LIMIT_S) -> None:
    end = time.monotonic() + limit_s
    while not batches.is_ready(within_s=0.05):
        assert time.monotonic() < end, "the batches never came"


@pytest.mark.fault(2)
def test_is_ready_tells_whether_the_next_step_is_loaded(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    with training(GatedSplit(gate), workers=2) as batches:
        assert not batches.is_ready()
        assert not batches.is_ready(within_s=0.05)
        gate.touch()
        wait_until_ready(batches)
        gate.unlink()
        assert next(batches)[0] == 0
        gate.touch()  # a process that waits for its data ends only after torch's five seconds


@pytest.mark.slow
def test_a_step_is_ready_only_when_all_its_micro_batches_are(tmp_path: Path) -> None:
    """Ten micro-batches per step, of which torch reads ahead two."""
    gate = tmp_path / "gate"
    ((_, slots),) = training(OneByOne(random_split(20)), total_steps=1, global_batch_size=20)
    last = int(slots[-1].targets[0])
    with training(GatedSplit(gate, only=last), workers=1, global_batch_size=20) as batches:
        assert not batches.is_ready(within_s=0.5)
        gate.touch()
        for step in range(TOTAL_STEPS):
            wait_until_ready(batches)
            found, slots = next(batches)
            assert found == step
            assert sorted(target for slot in slots for target in slot.targets.tolist()) == list(range(20))


@pytest.mark.parametrize("workers", [1, 2])
def test_asking_changes_no_batch(workers: int) -> None:
    asked = []
    with training(RandomSplit(), workers=workers, augment=AUGMENT) as batches:
        for step in range(TOTAL_STEPS):
            if step != 2:  # not each time
                wait_until_ready(batches)
            asked.append(next(batches))
        wait_until_ready(batches)  # the end is known as well
        with pytest.raises(StopIteration):
            next(batches)
        assert batches.is_ready()
    assert_equal(asked, steps(RandomSplit()))


def test_without_loader_processes_nothing_is_read_ahead() -> None:
    read: list[int] = []

    class Counted(OneByOne):
        def __getitem__(self, index: int, /) -> tuple[Any, int]:
            read.append(index)
            return super().__getitem__(index)

    with training(Counted(random_split(20)), workers=0) as batches:
        assert batches.is_ready(within_s=1.0)
        assert read == []
        next(batches)
        assert batches.is_ready()
        assert len(read) == 8


@pytest.mark.parametrize(("side", "at_a_time"), [(12, 8), (70, 2), (300, 1)])
def test_small_batches_in_memory_are_read_several_at_a_time(
    side: int, at_a_time: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batches of 3, 118 and 2,160 KB; they equal those of a loader process."""
    read: list[int] = []
    getitems = SlotReader.__getitems__

    def counted(self: SlotReader, slot: Slot) -> Read | Failure:
        read.append(slot.number)
        return getitems(self, slot)

    monkeypatch.setattr(SlotReader, "__getitems__", counted)
    split = random_split(20, height=side, width=side)
    sizes = {"micro_batch_size": 8, "global_batch_size": 8}
    with training(split, workers=0, total_steps=20, augment=AUGMENT, **sizes) as batches:
        all_steps = [next(batches)]
        assert len(read) == at_a_time
        all_steps += batches
    assert len(read) == 20
    assert_equal(all_steps, steps(split, workers=1, total_steps=20, **sizes))


def test_where_the_loader_cannot_be_asked_next_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hpc_train.training.datasets.workers._LOADER_PARTS", ("_of_another_torch",))
    with training(random_split(20), workers=1, augment=AUGMENT) as batches:
        assert batches.is_ready()
        assert_equal(list(batches), steps(random_split(20)))


@pytest.mark.fault(22)
def test_an_error_makes_ready_and_is_raised_by_next() -> None:
    broken = BrokenSplit(OSError("truncated"))
    with training(broken, workers=1) as batches, pytest.raises(BadFileError, match="sample 5"):
        while True:
            wait_until_ready(batches)
            next(batches)


@pytest.mark.slow
@pytest.mark.fault(21)
def test_a_killed_worker_makes_ready_and_is_explained_by_next(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGCHLD)
    with training(GatedSplit(tmp_path / "gate"), workers=1) as batches:
        assert not batches.is_ready()
        (pid,) = batches.stream.worker_pids
        os.kill(pid, signal.SIGKILL)
        wait_until_ready(batches)
        with pytest.raises(WorkerLostError, match=r"data\.workers: .*killed.*memory.*fewer workers"):
            next(batches)
        assert batches.stream.worker_pids == []
    assert signal.getsignal(signal.SIGCHLD) == before


@pytest.mark.slow
@pytest.mark.fault(21)
@pytest.mark.parametrize("asks", [False, True])
def test_workers_killed_at_any_moment_are_explained(asks: bool) -> None:
    """Also while a batch of theirs is on its way, when torch raises what its connections raise."""
    for delay_s in (0.0, 0.003, 0.01, 0.03, 0.06):
        with training(random_split(20), total_steps=10**6, workers=2) as batches:
            next(batches)
            killer = threading.Timer(delay_s, os.kill, (batches.stream.worker_pids[-1], signal.SIGKILL))
            killer.start()
            with pytest.raises(WorkerLostError, match=r"data\.workers: .*killed \(pid \d+, signal 9\)"):
                while True:
                    if asks:
                        wait_until_ready(batches)
                    next(batches)
            killer.join()


@pytest.mark.fault(2)
def test_a_signal_is_noted_while_next_waits(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    before = signal.signal(signal.SIGUSR1, lambda *_: gate.touch())
    killer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGUSR1))
    try:
        with training(GatedSplit(gate), workers=1) as batches:
            killer.start()
            assert next(batches)[0] == 0  # else it would wait for ever: the handler opens the gate
    finally:
        killer.join()
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.slow
def test_evaluation_does_not_wait_for_training_batches() -> None:
    with training(RandomSplit(), total_steps=1000, workers=2) as batches:
        for _ in range(10):
            batches.is_ready()
            evaluation = evaluation_batches(random_split(11), experiment(workers=2), 0, 1, CPU)
            assert sum(int(batch.valid.sum()) for batch in evaluation) == 11
            wait_until_ready(batches)
            next(batches)
