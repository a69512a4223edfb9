"""Schedules are the seed's: the same again, others with another seed, in the order in which they strike."""

from __future__ import annotations

import pytest

from tests.faults.schedule import KINDS, SEEDS, Frame, Schedule, chosen_seeds, parse_seeds

FRAME = Frame(ranks=4, nodes=2, first=3, last=22)


@pytest.mark.parametrize("kind", [*KINDS, "soak"])
def test_a_seed_gives_the_same_faults_again(kind: str) -> None:
    drawn = {Schedule.of(seed, kind, FRAME).faults for seed in range(30)}
    assert drawn == {Schedule.of(seed, kind, FRAME).faults for seed in range(30)}
    assert len(drawn) > 5, "seeds make no difference"


@pytest.mark.parametrize("kind", [*KINDS, "soak"])
def test_faults_strike_one_after_the_other_within_the_frame(kind: str) -> None:
    for seed in range(30):
        steps = [fault.step for fault in Schedule.of(seed, kind, FRAME).faults]
        assert steps == sorted(set(steps)) and FRAME.first <= steps[0] and steps[-1] <= FRAME.last


def test_seeds_are_read_with_both_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    assert parse_seeds("3-5") == [3, 4, 5] and parse_seeds("7") == [7] and parse_seeds("9,2-3") == [9, 2, 3]
    monkeypatch.setenv(SEEDS, "2-3")
    assert chosen_seeds("1") == [2, 3]
    monkeypatch.delenv(SEEDS)
    assert chosen_seeds("1") == [1]
    with pytest.raises(ValueError):
        parse_seeds("a-b")
