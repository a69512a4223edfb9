"""Equal work gives equal numbers on all ranks; only what comes further is progress."""

from __future__ import annotations

import pytest

from hpc_train.training.health.progress import Progress, Standing


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr("hpc_train.training.health.progress.time.monotonic", lambda: now[0])
    return now


def advance(clock: list[float], seconds: float = 10.0) -> None:
    clock[0] += seconds


def test_each_new_piece_of_work_counts_and_renews_the_age(clock: list[float]) -> None:
    progress = Progress()
    work = [("checking", None, 0), ("training", 1, 0), ("training", 2, 0)]
    for number, (phase, step, part) in enumerate([*work, ("evaluating", 2, 0), ("evaluating", 2, 1)]):
        advance(clock)
        progress.at(phase, step, part)
        standing = progress.standing
        assert (standing.times, standing.phase, standing.step) == (number + 1, phase, step)
        assert standing.since == clock[0]


def test_reporting_the_same_work_again_is_not_progress(clock: list[float]) -> None:
    progress = Progress()
    assert str(Standing(0, "joining", None, 0, None, False, 0.0, True)) == "joining"
    with pytest.raises(AssertionError):
        progress.at("trainig")
    progress.at("training", 5)
    before = progress.standing
    advance(clock)
    progress.at("training", 5)
    assert progress.standing == before


def test_a_wait_is_a_note_that_counts_nothing(clock: list[float]) -> None:
    waiting, other = Progress(), Progress()
    for progress in (waiting, other):
        progress.at("training", 5)
    waiting.at("waiting for data")
    assert str(waiting.standing) == "step 5 (training, waiting for data)"
    assert waiting.standing.times == other.standing.times
    for progress in (waiting, other):
        progress.at("training", 6)
    assert waiting.standing == other.standing
    assert str(waiting.standing) == "step 6 (training)"


def test_a_wait_has_a_time_of_its_own_but_only_once(clock: list[float]) -> None:
    """A loop that asks for the same data over and over is hung, however often it says so."""
    progress = Progress()
    progress.at("training", 5)
    advance(clock)
    progress.at("waiting for data")
    began = clock[0]
    assert progress.standing.since == began
    for _ in range(3):
        advance(clock)
        progress.at("training", 5)
        progress.at("waiting for data")
    assert progress.standing.since == began


def test_what_compiles_or_waits_for_one_disk_may_take_long() -> None:
    progress = Progress()

    def may_take_long(phase: str, step: int) -> bool:
        progress.at(phase, step)
        return progress.standing.may_take_long

    assert may_take_long("first step", 0)
    progress.has_stepped()
    assert not progress.standing.may_take_long
    assert not may_take_long("training", 1)
    assert may_take_long("evaluating", 1)
    assert not may_take_long("training", 2)
    assert not may_take_long("evaluating", 2)
    assert may_take_long("saving", 2)
    assert not may_take_long("training", 3)
    assert may_take_long("saving", 3)


def test_what_is_built_again_may_take_long_again() -> None:
    progress = Progress()
    for phase in ("building", "first step", "training"):
        progress.at(phase, 1)
    progress.has_stepped()
    progress.at("building")
    assert not progress.standing.may_take_long
    progress.forget_phases()
    for phase in ("building", "first step"):
        progress.at(phase, 2)
        assert progress.standing.may_take_long


def test_what_is_compiled_is_shown_and_counts_as_no_progress() -> None:
    progress = Progress()
    progress.at("first step", 0)
    before = progress.standing
    progress.compiles(3)
    assert (progress.standing.times, progress.standing.since) == (before.times, before.since)
    assert str(progress.standing) == "step 0 (first step, compiling graph 3)"
    progress.compiles(0)
    assert progress.standing == before
