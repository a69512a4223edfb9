"""Which runs are requeued, and how often: by the attempts' records alone."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from hpc_train.experiment.config.schema import RecoveryConfig
from hpc_train.recovery.budgets import (
    COMES_BACK,
    CRASHES,
    Decision,
    GpuHours,
    Left,
    decide,
    gpu_hours_of,
    is_idle,
    left,
    may_stay,
    num_early_preemptions,
    num_repeats,
    spent_budget,
)
from hpc_train.run.attempts import AttemptRecord

pytestmark = pytest.mark.fault(36)

DEFAULTS = RecoveryConfig()
STEPPED = {"begin": "…", "first_step": "…"}


def attempt(cause: str, began: int = 0, saved: int | None = 0, **facts: Any) -> AttemptRecord:
    """Return an attempt that trained from step ``began`` on and left a checkpoint of step ``saved``."""
    listed = [f"step-{began:08d}", "step-00000001"] if began else []
    known: dict[str, Any] = {"events": STEPPED, "end": "2026-11-21T06:00:00+00:00", "reason": "so it was"}
    return AttemptRecord(1, "…", listed, None, cause=cause, saved_step=saved, **(known | facts))


def crashes(count: int) -> list[AttemptRecord]:
    return [attempt("crash", saved=0)] * count


@pytest.mark.parametrize("cause", sorted(CRASHES))
def test_three_crashes_of_any_kind_come_back_and_the_fourth_fails(cause: str) -> None:
    for number in (1, 2, 3):
        found = decide([*crashes(number - 1), attempt(cause)], DEFAULTS)
        assert found == Decision(True, f"crash {number} of 3: so it was")
    assert decide([*crashes(3), attempt(cause)], DEFAULTS) == Decision(False, "so it was")


@pytest.mark.parametrize(
    ("restart", "records", "stays"),
    [
        ("auto", [attempt("crash")], True),
        ("auto", [attempt("crash"), attempt("hang")], False),
        ("auto", [attempt("crash"), attempt("crash", 0, 5), attempt("hang", 5, 5)], True),
        ("auto", [attempt("crash"), attempt("preemption"), attempt("bad node")], True),
        ("in_place", [attempt("crash"), attempt("crash")], True),
        ("requeue", [attempt("crash")], False),
        ("in_place", [attempt("preemption")], False),
        ("in_place", [attempt("time limit")], False),
        ("in_place", [attempt("lost")], False),
    ],
)
def test_a_failure_may_stay_on_its_nodes(restart: Any, records: list[AttemptRecord], stays: bool) -> None:
    assert may_stay(records, RecoveryConfig(restart=restart)) is stays


@pytest.mark.parametrize(
    ("restart", "causes", "stays"),
    [
        ("auto", ["crash", "hang"], True),
        ("auto", ["lost"], True),
        ("auto", ["preemption"], False),
        ("requeue", ["crash"], False),
    ],
)
def test_a_failure_may_stay_where_other_nodes_are(restart: Any, causes: list[str], stays: bool) -> None:
    recovery = RecoveryConfig(restart=restart)
    assert may_stay([*map(attempt, causes)], recovery, has_other_nodes=True) is stays


def test_preemptions_come_back_without_end_as_long_as_something_is_saved() -> None:
    steps = range(0, 10_000, 10)
    records = [attempt("preemption", began=step, saved=step + 10) for step in steps]
    assert decide(records, DEFAULTS) == Decision(True, "so it was")
    assert left(records, DEFAULTS) == Left(3, None, 2)


@pytest.mark.parametrize("cause", ["preemption", "time limit"])
def test_a_bound_on_preemptions_holds(cause: str) -> None:
    recovery = RecoveryConfig(max_preemptions=2)
    records = [attempt("preemption", began=step, saved=step + 1) for step in (1, 2)]
    assert decide(records, recovery) == Decision(True, "preemption 2 of 2: so it was")
    assert left(records, recovery).preemptions_left == 0
    found = decide([*records, attempt(cause, began=3, saved=4)], recovery)
    assert not found.comes_back
    assert "so it was" in found.reason and "raise recovery.max_preemptions (2)" in found.reason


def test_preemptions_and_crashes_have_budgets_of_their_own() -> None:
    records = [*crashes(3), *[attempt("preemption", saved=4)] * 9]
    assert decide(records, RecoveryConfig(max_preemptions=9)).comes_back
    assert decide([*records[3:], attempt("crash")], RecoveryConfig(max_preemptions=0)).comes_back


@pytest.mark.parametrize(
    "idle",
    [
        attempt("time limit", began=40, saved=40),
        attempt("time limit", began=40, saved=40, events={}),
        attempt("preemption", began=40, saved=40),
        attempt("lost", began=40, saved=40),
        attempt("lost", began=40, saved=40, events={}, bad_nodes={"n1": "died"}),
    ],
)
def test_two_attempts_without_progress_come_back_and_the_third_fails(idle: AttemptRecord) -> None:
    for number in (1, 2):
        found = decide([idle] * number, DEFAULTS)
        assert found == Decision(True, f"so it was; no progress {number} of 2: no checkpoint beyond step 40")
        assert left([idle] * number, DEFAULTS).without_progress_left == 2 - number
    found = decide([idle] * 3, DEFAULTS)
    assert not found.comes_back
    assert found.reason.startswith("no progress in 3 attempts: no checkpoint beyond step 40; ")
    assert found.reason.endswith("raise slurm.time_limit or write a smaller checkpoint.every_min")
    assert left([idle] * 3, DEFAULTS) == Left(3, None, 0)


@pytest.mark.parametrize(("begins", "number"), [
    ([1], 0), ([1, 1], 1), ([1, 1, 1, 1], 3), ([1, 501, 501], 1), ([1, 501, 1], 1), ([1, 1, 501], 0),
    ([1, None], 0), ([None, 1, "preemption", 1], 1),
])  # fmt: skip
def test_a_program_that_begins_again_at_each_time_limit_is_not_requeued_forever(
    begins: list[Any], number: int
) -> None:
    """Its own checkpoints are unknown, but not where its metrics begin."""
    ends = [
        attempt("preemption", saved=None, first_row=1)
        if begin == "preemption"
        else attempt("time limit", saved=None, first_row=begin)
        for begin in begins
    ]
    decision = decide(ends, DEFAULTS)
    assert (num_repeats(ends), decision.comes_back) == (number, number <= 2)
    assert left(ends, DEFAULTS).without_progress_left == max(0, 2 - number)
    words = f"no progress {number} of 2: it began with step {begins[-1]} again"
    assert decision.reason.partition("; ")[2] == (words if 0 < number <= 2 else "") or number > 2
    if number > 2:
        assert decision.reason.startswith(
            "no progress in 3 attempts: it began with step 1 again; the last one"
        )
        assert decision.reason.endswith("have the program save more often and resume (program.resume)")


def test_nothing_saved_at_all_is_reported() -> None:
    assert "no checkpoint at all" in decide([attempt("time limit")], DEFAULTS).reason


@pytest.mark.parametrize(
    "neutral",
    [
        attempt("preemption", events={}),
        attempt("lost", events={}),
        attempt("crash"),
        attempt("time limit", saved=None),  # nobody looked
    ],
)
def test_what_had_no_chance_counts_neither_way(neutral: AttemptRecord) -> None:
    idle = attempt("time limit")
    assert not is_idle(neutral)
    assert decide([neutral] * 3, DEFAULTS).comes_back
    assert left([idle, neutral, idle, neutral], DEFAULTS).without_progress_left == 0
    assert not decide([idle, neutral, idle, neutral, idle], DEFAULTS).comes_back


def test_a_checkpoint_resets_the_count() -> None:
    idle, good = attempt("preemption", began=40, saved=40), attempt("preemption", began=40, saved=50)
    assert left([idle, idle, good], DEFAULTS).without_progress_left == 2
    assert decide([idle, idle, good, idle, idle], DEFAULTS).comes_back
    crashed = attempt("crash", began=40, saved=50)
    assert left([idle, idle, crashed], DEFAULTS).without_progress_left == 2


def test_zero_is_never() -> None:
    none = RecoveryConfig(max_crashes=0, max_preemptions=0, max_without_progress=0)
    for cause in COMES_BACK:
        assert not decide([attempt(cause)], none).comes_back
    assert left([], none) == Left(0, 0, 0)


def test_large_numbers_of_gpu_hours_are_written_in_full() -> None:
    found = decide([attempt("preemption", saved=4)], DEFAULTS, GpuHours(2000.25, 1234.0, "the key"))
    assert "; 2,000 of 1,234 GPU-hours are used, so" in found.reason
    found = decide([attempt("preemption", saved=4)], DEFAULTS, GpuHours(8.125, 7.5, "the key"))
    assert "; 8.12 of 7.5 GPU-hours are used, so" in found.reason


@pytest.mark.fault(21)
def test_a_killed_loader_process_comes_back_once() -> None:
    lost = attempt("worker lost", reason="rank 0: data.workers: a loader process was killed")
    assert decide([lost], RecoveryConfig()).comes_back
    decision = decide([lost, attempt("preemption", saved=5), lost], RecoveryConfig())
    assert not decision.comes_back and "data.workers" in decision.reason
    assert not decide([lost], RecoveryConfig(max_crashes=0)).comes_back


def test_attempts_in_jobs_use_gpu_hours_and_others_do_not() -> None:
    began, ended = "2026-11-01T00:00:00+00:00", "2026-11-01T01:00:00+00:00"
    in_job = replace(attempt("preemption"), job="7", hosts=["n1", "n2"], start=began, end=ended)
    running = replace(in_job, end=None)
    assert gpu_hours_of([in_job, running, replace(in_job, job=None)], 4) == 8
    assert gpu_hours_of([replace(in_job, spare_hosts=["n9"])], 4) == 12


def test_gpu_hours_are_spent_once_their_budget_is_reached() -> None:
    preempted = [attempt("preemption", saved=10)]
    assert decide(preempted, DEFAULTS, GpuHours(6.99, 7.0, "slurm.max_gpu_hours")).comes_back
    assert not decide(preempted, DEFAULTS, GpuHours(7.0, 7.0, "slurm.max_gpu_hours")).comes_back


@pytest.mark.parametrize(("hours", "is_spent"), [(1, False), (2, True), (3, True)])
def test_a_run_is_not_resumed_once_the_budget_of_its_file_is_reached(hours: int, is_spent: bool) -> None:
    """The attempt has one node of four GPUs, the file a budget of eight GPU-hours."""
    slurm = SimpleNamespace(max_gpu_hours=8.0, gpus_per_node=4, runs_per_gpu=1)
    times = {"start": "2026-11-21T00:00:00+00:00", "end": f"2026-11-21T0{hours}:00:00+00:00"}
    lasted = replace(attempt("preemption"), job="1", hosts=["n1"], **times)
    found = spent_budget(cast(Any, SimpleNamespace(slurm=slurm)), [lasted])
    assert (found is not None) == is_spent


def test_preemptions_before_the_first_step_are_bounded() -> None:
    early = attempt("preemption", events={"begin": "…"})
    assert decide([early] * 10, DEFAULTS).comes_back
    assert not decide([early] * 11, DEFAULTS).comes_back
    assert decide([*[early] * 10, attempt("preemption", saved=5), early], DEFAULTS).comes_back
    for cause in ("time limit", "crash", "lost"):
        assert num_early_preemptions([early, attempt(cause, events={"begin": "…"})]) == 0


def test_a_time_limit_that_the_scheduler_has_cut_is_not_to_be_raised_in_the_file() -> None:
    cut = attempt("time limit", requested_limit_s=1800.0, time_limit_s=120.0)
    found = decide([cut] * 3, DEFAULTS)
    assert not found.comes_back and "raise slurm.time_limit" not in found.reason
