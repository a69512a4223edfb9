"""The interval of ``checkpoint.every: auto``: by the run's own saves and interruptions."""

from __future__ import annotations

import math
from typing import Any

import pytest

from hpc_train.recovery.save_interval import SaveInterval, save_interval
from hpc_train.run.attempts import AttemptRecord

HOUR_S = 3600.0
FIRST_STEP = {"first_step": "2026-11-21T06:00:00.000+00:00"}


def attempt(cause: str, hours: int, saves: int = 0, stall_s: float = 0.0, **events: str) -> AttemptRecord:
    """Return an attempt that trained for ``hours``, with saves that stopped it for ``stall_s`` in all."""
    measured: dict[str, Any] = {"save_interval": SaveInterval(saves=saves).to_json()} if saves else {}
    end = f"2026-11-21T{6 + hours:02}:00:00+00:00"
    return AttemptRecord(
        1, "…", [], None, cause=cause, end=end, events=FIRST_STEP | events,
        checkpoint_stall_s=stall_s or None, **measured,
    )  # fmt: skip


NONE_YET = "no interruption so far; the default"
CRASHED = attempt("crash", 2, saves=10, stall_s=20.0)


@pytest.mark.parametrize(
    ("earlier", "now", "every_s", "explanation"),
    [
        ([], (0.0, 0, 0.0), 600.0, "every 10 min (auto): the default"),
        # Interruptions of one hour and two, a stall of 2 s per save.
        (
            [CRASHED, attempt("lost", 1)],
            (0.0, 0, 0.0),
            math.sqrt(2 * 2.0 * 1.5 * HOUR_S),
            "C = 2 s; 2 interruptions, one per M = 1.5 h of training; Young's √(2·C·M)",
        ),
        # This attempt's own saves count, and the time that it has trained.
        ([CRASHED], (2 * HOUR_S, 10, 60.0), math.sqrt(2 * 4.0 * 4 * HOUR_S), "C = 4 s; 1 interruption"),
        # An end that saved first has lost nothing: without an interruption never below the default.
        ([attempt("preemption", 1, 10, 20.0, saved="…")], (0.0, 0, 0.0), 600.0, NONE_YET),
        ([attempt("preemption", 1, 10, 20.0)], (0.0, 0, 0.0), math.sqrt(4 * HOUR_S), "1 interruption"),
        ([], (100 * HOUR_S, 5, 10.0), math.sqrt(4 * 100 * HOUR_S), "Young's √(2·C·M) with the time so far"),
        # Bounds.
        ([attempt("crash", 1, 10, 0.01)], (0.0, 0, 0.0), 60.0, "is 0.0447 min; bounds 1 and 60 min"),
        ([attempt("crash", 10, 1, 999.0)], (0.0, 0, 0.0), 3600.0, "bounds 1 and 60 min"),
        ([attempt("completed", 1, 1, 9.0), attempt("user error", 1)], (0.0, 0, 0.0), 600.0, NONE_YET),
    ],
)
def test_the_interval_follows_from_the_stall_and_the_interruptions(
    earlier: list[AttemptRecord], now: tuple[float, int, float], every_s: float, explanation: str
) -> None:
    trained_s, saves, stall_s = now
    interval = save_interval(earlier, trained_s=trained_s, saves=saves, stall_s=stall_s)
    assert interval.every_s == pytest.approx(every_s)
    assert explanation in str(interval)
    assert SaveInterval.of(interval.to_json()) == interval


def test_a_damaged_or_missing_interval_is_none() -> None:
    assert SaveInterval.of({}) is None and SaveInterval.of({"every_s": "soon"}) is None
