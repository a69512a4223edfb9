"""Why an attempt ended, from what it left behind. On a real Slurm: tests/slurm."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hpc_train.launchers.slurm.verdict import Facts, judge

TRACEBACK = "Traceback (most recent call last):\n  File …\nValueError: too hot"
CRASHED = Facts(srun_code=1, errors={1: TRACEBACK}, codes={0: 76, 1: 1}, logs={0: "", 1: ""}, step=7)
STOPPED = Facts(srun_code=75, codes={0: 75}, signal="SIGTERM", logs={0: "", 1: ""}, step=120)
PREEMPTED = ("preemption", "requeue 75", "preempted at step 120")
#: As srun 22.05 says it.
EXITS_75 = "srun: error: n1: tasks 0-1: Exited with exit code 75\n"
KILLED = "srun: error: n2: task 3: Killed\n"
EXITS_76 = "srun: error: n1: tasks 0-1: Exited with exit code 76\n"


def told(facts: Facts) -> tuple[str, str, str | None]:
    verdict = judge(facts)
    return verdict.cause, verdict.words, verdict.reason


def test_what_is_completed_is_completed_however_ranks_ended_then() -> None:
    assert told(Facts(0, is_completed=True)) == ("completed", "stop 0", None)
    assert told(replace(CRASHED, is_completed=True)) == ("completed", "stop 0", None)


@pytest.mark.parametrize("facts", [CRASHED, STOPPED])
def test_a_cancelled_run_is_not_requeued(facts: Facts) -> None:
    assert told(replace(facts, is_cancelled=True))[:2] == ("cancelled", "stop 1")


@pytest.mark.parametrize("code", [65, 74])
def test_a_users_error_is_final_and_told_whole(code: int) -> None:
    facts = Facts(code, errors={0: "data.root: not there\ndata.args: wrong"}, codes={0: code, 1: 76})
    assert told(facts) == ("user error", f"stop {code}", "data.root: not there; data.args: wrong")
    assert judge(facts).state == "failed"


def test_a_users_error_on_one_rank_counts_more_than_anothers_traceback() -> None:
    facts = Facts(65, errors={1: TRACEBACK, 0: "wrong file"}, codes={0: 65, 1: 1})
    assert told(facts)[1:] == ("stop 65", "wrong file")


@pytest.mark.parametrize(
    ("before", "words", "reason"),
    [
        (0, "requeue 75", "crash 1 of 3: rank 1: ValueError: too hot"),
        (2, "requeue 75", "crash 3 of 3: rank 1: ValueError: too hot"),
        (3, "stop 1", "rank 1: ValueError: too hot"),
    ],
)
def test_a_crash_is_requeued_three_times(before: int, words: str, reason: str) -> None:
    assert told(replace(CRASHED, crashes_before=before)) == ("crash", words, reason)


def test_the_first_error_is_the_reason() -> None:
    facts = replace(CRASHED, errors={3: TRACEBACK, 0: "OSError: later"}, codes={3: 1, 0: 1})
    assert told(facts)[2] == "crash 1 of 3: rank 3: ValueError: too hot"


def test_a_crash_that_makes_others_stop_is_no_preemption() -> None:
    """The SIGTERM that srun sends to the others may reach a rank that can stop still."""
    facts = replace(CRASHED, srun_code=75, codes={0: 75, 1: 1}, signal="SIGTERM")
    assert told(facts)[0] == "crash"


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        (STOPPED, PREEMPTED),
        (replace(STOPPED, signal=None), PREEMPTED),  # it reached other ranks alone
        (replace(STOPPED, srun_code=76), PREEMPTED),  # somebody left after its peer
        (replace(STOPPED, srun_code=137, output=EXITS_75 + KILLED), PREEMPTED),  # slow to leave
        (replace(STOPPED, signal="SIGUSR2"), ("time limit", "requeue 75", "time limit at step 120")),
        (replace(STOPPED, signal="SIGUSR2", is_early=True), PREEMPTED),
        (Facts(143, step=120), PREEMPTED),  # before Python could hold signals back
        (Facts(143, step=120, output="srun: error: n1: tasks 0-1: Terminated\n"), PREEMPTED),
        (Facts(140, step=120), PREEMPTED),
    ],
)
def test_ranks_that_were_asked_to_stop_go_on_later(facts: Facts, expected: tuple[str, str, str]) -> None:
    assert told(facts) == expected


@pytest.mark.parametrize(
    ("before", "has_stepped", "words"),
    [(0, False, "requeue 75"), (1, False, "requeue 75"), (2, False, "stop 1"), (9, True, "requeue 75")],
)
def test_a_time_limit_too_short_for_one_step_is_not_tried_for_ever(
    before: int, has_stepped: bool, words: str
) -> None:
    facts = replace(STOPPED, signal="SIGUSR2", idle_before=before, has_stepped=has_stepped)
    assert judge(facts).words == words
    if words == "stop 1":
        assert "raise slurm.time_limit" in (judge(facts).reason or "")


@pytest.mark.parametrize("first", ["", EXITS_76])
def test_a_rank_that_was_killed_is_named_by_srun(first: str) -> None:
    facts = Facts(137, codes={0: 76, 1: 76, 2: 76}, output=first + KILLED, logs={0: "", 3: ""})
    cause, words, reason = told(facts)
    assert (cause, words) == ("crash", "requeue 75")
    assert reason is not None
    assert reason.startswith("crash 1 of 3: rank 3 on n2: Killed, out of memory? ask for more slurm.mem_gb")


def test_a_rank_killed_while_others_only_wait_for_it_is_no_preemption() -> None:
    facts = replace(STOPPED, srun_code=137, output=KILLED + EXITS_75)
    assert told(facts)[0] == "crash"


def test_memory_that_ran_out_is_said() -> None:
    output = "slurmstepd: error: Detected 1 oom_kill event in StepId=4.0.\n"
    output += "srun: error: n2: task 3: Out Of Memory\n"
    reason = told(Facts(125, codes={0: 76}, output=output, logs={0: ""}))[2]
    assert reason is not None
    assert "rank 3 on n2: Out Of Memory, out of memory; ask for more slurm.mem_gb" in reason


def test_a_rank_that_ended_before_it_could_write_an_error_is_quoted() -> None:
    output = "srun: error: n2: tasks 2-3: Exited with exit code 1\n"
    facts = Facts(1, codes={0: 76}, output=output, logs={0: "", 2: "ModuleNotFoundError: no submitit"})
    assert told(facts)[2] == (
        "crash 1 of 3: ranks 2-3 on n2: Exited with exit code 1: ModuleNotFoundError: no submitit"
    )


def test_a_dead_node_costs_no_crash() -> None:
    output = "srun: error: Node failure on n2\n" + EXITS_76
    facts = Facts(76, codes={0: 76}, output=output, crashes_before=3, step=9, logs={0: ""})
    assert told(facts) == ("lost", "requeue 75", "a node failed at step 9")


def test_where_no_rank_ever_started_srun_is_quoted() -> None:
    output = "Loading cuda/12\nsrun: error: Unable to create step for job 12: Invalid generic resource\n"
    assert told(Facts(1, output=output))[2] == (
        "crash 1 of 3: no rank was started: srun: error: Unable to create step for job 12: "
        "Invalid generic resource"
    )
    assert "exit code 1, and it said nothing" in (told(Facts(1))[2] or "")


def test_ranks_that_end_without_a_word_are_a_crash() -> None:
    assert told(Facts(76, codes={0: 76, 1: 76}, logs={0: "", 1: ""}))[0] == "crash"
    assert told(Facts(0, logs={0: ""}))[:2] == ("crash", "requeue 75")
    # Ended by SIGTERM, but one had lost its peer before.
    assert told(Facts(143, codes={1: 76}, logs={0: "", 1: ""}))[0] == "crash"


def test_a_reason_is_one_printable_line() -> None:
    facts = Facts(1, errors={0: f"ValueError: \x1b[31mred\n{'x' * 2000}"}, codes={0: 1})
    reason = judge(facts).reason
    assert reason is not None
    assert "\x1b" not in reason and "\n" not in reason
    assert len(reason) <= 500
