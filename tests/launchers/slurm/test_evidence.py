"""Why an attempt ended, from what it left behind. On a real Slurm: tests/slurm."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hpc_train.launchers.slurm.evidence import Facts, judge
from hpc_train.recovery.budgets import Decision
from tests import aborts

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
    return verdict.cause, verdict.words(), verdict.reason


_ENDED_EARLY = "srun: error: n2: tasks 2-3: Exited with exit code 1\n"
_LOADER = "data.workers: a loader process was killed; write fewer"
_CRASH = ("crash", "requeue 75")


@pytest.mark.fault(16, 21)
@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        (Facts(srun_code=0, is_completed=True), ("completed", "stop 0", None)),
        (replace(CRASHED, is_completed=True), ("completed", "stop 0", None)),
        (replace(CRASHED, is_cancelled=True), ("cancelled", "stop 1")),
        (replace(STOPPED, is_cancelled=True), ("cancelled", "stop 1")),
        # A user's error on one rank counts more than another rank's traceback.
        (
            Facts(srun_code=65, errors={1: TRACEBACK, 0: "wrong file"}, codes={0: 65, 1: 1}),
            ("user error", "stop 65", "wrong file"),
        ),
        (Facts(srun_code=2, errors={0: "RANK: …"}, codes={0: 2}), ("user error", "stop 2")),
        (CRASHED, (*_CRASH, "rank 1: ValueError: too hot")),
        (
            replace(CRASHED, errors={3: TRACEBACK, 0: "OSError: later"}, codes={3: 1, 0: 1}),
            (*_CRASH, "rank 3: ValueError: too hot"),
        ),
        # The SIGTERM that srun sends to the others may reach a rank that can still stop.
        (replace(CRASHED, srun_code=75, codes={0: 75, 1: 1}, signal="SIGTERM"), _CRASH),
        # A rank was killed while others only waited for it.
        (replace(STOPPED, srun_code=137, output=KILLED + EXITS_75), _CRASH),
        (
            Facts(
                srun_code=1,
                codes={0: 76},
                output=_ENDED_EARLY,
                logs={0: "", 2: "ModuleNotFoundError: no submitit"},
            ),
            (*_CRASH, "ranks 2-3 on n2: ended with exit code 1: ModuleNotFoundError: no submitit"),
        ),
        (Facts(srun_code=76, codes={0: 76, 1: 76}, logs={0: "", 1: ""}), _CRASH),
        (Facts(srun_code=0, logs={0: ""}), _CRASH),
        # Ended by SIGTERM, but one had lost its peer before.
        (Facts(srun_code=143, codes={1: 76}, logs={0: "", 1: ""}), _CRASH),
        # The kill is reported after the loss that it caused; srun then asks the others to stop, which before
        # a first step they do at once.
        (
            Facts(srun_code=137, codes={0: 75, 1: 76}, signal="SIGTERM", output=EXITS_76 + KILLED + EXITS_75),
            _CRASH,
        ),
        (
            Facts(srun_code=137, codes={0: 75}, signal="SIGTERM", output=EXITS_76 + EXITS_75 + KILLED),
            ("preemption",),
        ),
        (
            Facts(srun_code=80, errors={1: _LOADER}, codes={0: 76, 1: 80}),
            ("worker lost", "requeue 75", f"rank 1: {_LOADER}"),
        ),
    ],
)
def test_cause_and_words_of_an_end(facts: Facts, expected: tuple[str | None, ...]) -> None:
    assert told(facts)[: len(expected)] == expected


@pytest.mark.parametrize("code", [65, 74])
def test_a_users_error_is_final_and_reported_whole(code: int) -> None:
    errors = {0: "data.root: not there\ndata.args: wrong"}
    facts = Facts(srun_code=code, errors=errors, codes={0: code, 1: 76})
    assert told(facts) == ("user error", f"stop {code}", "data.root: not there; data.args: wrong")
    assert judge(facts).state == "failed"


@pytest.mark.parametrize(
    ("srun", "line", "reason"),
    [
        ("Aborted", "std::bad_alloc", "killed by SIGABRT: std::bad_alloc; -v is 1"),
        ("Exited with exit code 1", "MemoryError", "ended with exit code 1: MemoryError; -v is 1"),
        ("CPU time limit exceeded", "", "killed by SIGXCPU; -t is 60"),
        ("Segmentation fault", "pthread_create", "killed by SIGSEGV: pthread_create; -v is 1"),
    ],
)
def test_a_resource_limit_is_named_and_the_node_not_blamed(srun: str, line: str, reason: str) -> None:
    output, limits = f"srun: error: n2: task 3: {srun}\n", {"-v": "-v is 1", "-t": "-t is 60"}
    found = judge(Facts(srun_code=1, output=output, logs={3: line}, limits=limits))
    assert str(found.reason).startswith(f"rank 3 on n2: {reason}: raise it with `ulimit`")
    assert found.bad_nodes == {}


def test_a_limit_that_kept_srun_from_starting_is_named() -> None:
    output = "srun: error: fork: Resource temporarily unavailable\n"
    found = judge(Facts(srun_code=1, output=output, limits={"-u": "-u is 9"}))
    assert "no rank was started: srun: error: fork: Resource temp" in str(found.reason)
    assert "unavailable; -u is 9: raise it" in str(found.reason)


@pytest.mark.parametrize(
    ("comes_back", "state", "words"), [(True, "requeued", "requeue 75 n2,n3"), (False, "failed", "stop 1")]
)
def test_the_budget_has_the_last_word(comes_back: bool, state: str, words: str) -> None:
    verdict = judge(CRASHED).decided(Decision(comes_back, "crash 9 of 9: so it is"))
    assert (verdict.cause, verdict.state, verdict.reason) == ("crash", state, "crash 9 of 9: so it is")
    assert verdict.words({"n2": "died", "n3": "died"}) == words


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        (STOPPED, PREEMPTED),
        (replace(STOPPED, signal=None), PREEMPTED),  # it reached other ranks alone
        (replace(STOPPED, srun_code=76), PREEMPTED),  # somebody left after its peer
        (replace(STOPPED, srun_code=137, output=EXITS_75 + KILLED), PREEMPTED),  # slow to leave
        (replace(STOPPED, signal="SIGUSR2"), ("time limit", "requeue 75", "time limit at step 120")),
        (replace(STOPPED, signal="SIGUSR2", is_early=True), PREEMPTED),
        (
            replace(STOPPED, output="error: *** STEP 2.0 ON n1 CANCELLED AT 2026 DUE TO JOB REQUEUE ***"),
            ("requeue", "requeue 75", "requeued by hand at step 120"),
        ),
        (Facts(srun_code=143, step=120), PREEMPTED),  # before Python could hold signals back
        (Facts(srun_code=143, step=120, output="srun: error: n1: tasks 0-1: Terminated\n"), PREEMPTED),
        (Facts(srun_code=140, step=120), PREEMPTED),
    ],
)
def test_ranks_that_were_asked_to_stop_go_on_later(facts: Facts, expected: tuple[str, str, str]) -> None:
    assert told(facts) == expected


@pytest.mark.parametrize("first", ["", EXITS_76])
def test_a_rank_that_was_killed_is_named_by_srun(first: str) -> None:
    facts = Facts(srun_code=137, codes={0: 76, 1: 76, 2: 76}, output=first + KILLED, logs={0: "", 3: ""})
    cause, words, reason = told(facts)
    assert (cause, words) == ("crash", "requeue 75")
    assert reason is not None
    assert reason.startswith("rank 3 on n2: killed by SIGKILL; out of memory? ask for more slurm.mem_gb")


def test_memory_that_ran_out_is_reported() -> None:
    output = "slurmstepd: error: Detected 1 oom_kill event in StepId=4.0.\n"
    output += "srun: error: n2: task 3: Out Of Memory\n"
    reason = told(Facts(srun_code=125, codes={0: 76}, output=output, logs={0: ""}))[2]
    assert reason is not None
    assert "rank 3 on n2: Out Of Memory, out of memory; ask for more slurm.mem_gb" in reason


def test_a_full_disk_is_final_though_it_has_no_room_for_an_exit_code() -> None:
    output = "srun: error: n2: tasks 2-3: Exited with exit code 74\n"
    found = judge(Facts(srun_code=76, codes={0: 76}, output=output, logs={2: "/runs/x: the disk is full"}))
    assert (found.cause, found.state, found.exit_code) == ("user error", "failed", 74)
    assert found.reason == "rank 2: ended with exit code 74: /runs/x: the disk is full"


_ABORTED = "srun: Job step aborted: Waiting up to 32 seconds for job step to finish.\n"
_CANCELLED = "slurmstepd: error: *** STEP 4.0 ON n2 CANCELLED AT 2026-01-01T00:00:00{} ***\n"
_ENDED_BY_SRUN = _ABORTED + _CANCELLED.format("") + KILLED


def _not_launched(node: str, why: str) -> str:
    lines = f"Task launch for StepId=4.0 failed on node {node}: {why}", f"Application launch failed: {why}"
    return "".join(f"srun: error: {line}\n" for line in lines)


@pytest.mark.parametrize(
    ("output", "more", "cause", "reason", "bad"),
    [
        # Ranks that srun or slurmstepd has ended have not run out of memory, and their node is healthy.
        (
            _not_launched("n1", "Prolog failed") + _ENDED_BY_SRUN,
            {"hosts": ["n1", "n2"]},
            "bad node",
            "n1: no rank could be launched: Prolog failed",
            {"n1"},
        ),
        (
            _not_launched("n1", "Socket timed out") + _not_launched("n2", "Socket timed out") + _ABORTED,
            {"hosts": ["n1", "n2"]},
            "crash",
            "n1, n2: no rank could be launched: Socket timed out",
            set(),
        ),
        (_CANCELLED.format(" DUE TO TIME LIMIT") + KILLED, {}, "time limit", "time limit at step 7", set()),
        (_CANCELLED.format(" DUE TO PREEMPTION") + KILLED, {}, "preemption", "preempted at step 7", set()),
        (_ENDED_BY_SRUN, {"signal": "SIGTERM"}, "preemption", "preempted at step 7", set()),
        (_ENDED_BY_SRUN, {}, "crash", "srun: exit code 137, since its step was cancelled", set()),
        # The kill came first, and srun ended the others.
        (KILLED + _ENDED_BY_SRUN, {}, "crash", "rank 3 on n2: killed by SIGKILL; out of memory?", {"n2"}),
        # Without control groups Slurm itself ends ranks that use too much memory.
        (
            f"slurmstepd: error: StepId=4.0 exceeded memory limit (5 > 4), being killed\n{KILLED}",
            {},
            "crash",
            "killed by SIGKILL, out of memory; ask for more slurm.mem_gb",
            set(),
        ),
        (
            (
                "slurmstepd: error: execve(): /opt/python: No such file or directory\n"
                "srun: error: n1: tasks 0-1: Exited with exit code 2\n"
            ),
            {"logs": {}},
            "crash",
            "exit code 2: slurmstepd: error: execve(): /opt/python: No such file",
            set(),
        ),
        (
            (
                "srun: error: Unable to confirm allocation for job 4: Socket timed out\n"
                "srun: Check SLURM_JOB_ID environment variable. Expired or invalid job 4\n"
            ),
            {"logs": {}},
            "crash",
            "no rank was started: srun: error: Unable to confirm allocation for job 4: Socket timed out",
            set(),
        ),
    ],
)
def test_ranks_that_slurm_ended_and_ranks_that_it_could_not_start(
    output: str, more: dict[str, Any], cause: str, reason: str, bad: set[str]
) -> None:
    facts = Facts(srun_code=137, output=output, step=7, logs={0: "", 3: ""})
    found = judge(replace(facts, **more))
    assert (found.cause, found.bad_nodes.keys()) == (cause, bad)
    assert reason in str(found.reason)


def test_a_dead_node_costs_no_crash() -> None:
    output = "srun: error: Node failure on n2\n" + EXITS_76
    facts = Facts(srun_code=76, codes={0: 76}, output=output, step=9, logs={0: ""})
    assert told(facts) == ("lost", "requeue 75", "a node failed at step 9")
    assert judge(facts).bad_nodes == {"n2": "died"}


def test_where_no_rank_ever_started_srun_is_quoted() -> None:
    output = "Loading cuda/12\nsrun: error: Unable to create step for job 12: Invalid generic resource\n"
    assert told(Facts(srun_code=1, output=output))[2] == (
        "no rank was started: srun: error: Unable to create step for job 12: Invalid generic resource"
    )
    assert "exit code 1, and it said nothing" in (told(Facts(srun_code=1))[2] or "")


@pytest.mark.fault(20)
def test_what_would_fail_again_is_not_requeued() -> None:
    text = "Traceback (most recent call last):\n  …\nhpc_train.errors.NonFiniteError: loss is NaN at step 7"
    facts = Facts(srun_code=77, errors={1: "OSError: later", 0: text}, codes={0: 77, 1: 1, 2: 77})
    assert told(facts) == ("diverged", "stop 1", "loss is NaN at step 7")
    assert told(Facts(srun_code=77, codes={3: 77}, logs={3: "loss is NaN"})) == (
        "diverged",
        "stop 1",
        "rank 3: it would fail again; loss is NaN",
    )


@pytest.mark.parametrize("error", ["", "BadNodeError: 2 GB of memory are free"])
def test_a_node_that_failed_its_check_is_named(error: str) -> None:
    errors = {2: error} if error else {}
    facts = Facts(srun_code=78, errors=errors, codes={0: 76, 2: 78}, nodes={0: "n1", 2: "n2"}, output=KILLED)
    how = f"failed its check: {'2 GB of memory are free' if error else 'it said nothing'}"
    assert told(facts) == ("bad node", "requeue 75", f"n2 {how}")
    assert judge(facts).bad_nodes == {"n2": how}


@pytest.mark.fault(51)
def test_a_device_error_behind_an_abort_is_blamed_on_its_node() -> None:
    """Those that NCCL aborted over their peer may be reported first, with others in one line."""
    output = "srun: error: n1: tasks 0-1: Aborted (core dumped)\nsrun: error: n2: tasks 2-3: Aborted\n"
    lost, broken = aborts.PEER_LINE, aborts.DEVICE_LINE
    facts = Facts(srun_code=134, output=output, logs={0: lost, 1: lost, 2: lost, 3: broken})
    assert told(facts) == ("crash", "requeue 75", f"rank 3 on n2: killed by SIGABRT: {broken}")
    assert judge(facts).bad_nodes == {"n2": f"rank 3: {broken}"}
    programs = replace(facts, logs={**facts.logs, 3: aborts.PROGRAM_LINE})
    assert told(programs)[2] == f"rank 3 on n2: killed by SIGABRT: {aborts.PROGRAM_LINE}"
    assert judge(programs).bad_nodes == {}
    output = f"{output.replace('2-3', '2')}srun: error: n2: task 3: Killed\n"
    killed = Facts(srun_code=137, output=output, logs={0: lost, 1: lost, 2: lost, 3: ""})
    assert (told(killed)[2] or "").startswith("rank 3 on n2: killed by SIGKILL")


@pytest.mark.fault(51)
def test_ranks_that_nccl_aborted_over_each_other_are_nobodys_fault() -> None:
    output = "srun: error: n1: tasks 0-1: Aborted (core dumped)\n"
    facts = Facts(srun_code=134, output=output, logs={0: aborts.TIMEOUT_LINE, 1: aborts.TIMEOUT_LINE})
    cause, follows, reason = told(facts)
    assert (cause, follows, judge(facts).bad_nodes) == ("crash", "requeue 75", {})
    assert reason == f"no rank said why it ended (srun: exit code 134); rank 0: {aborts.TIMEOUT_LINE}"


@pytest.mark.fault(50)
@pytest.mark.parametrize("is_first", [True, False])
def test_where_all_nodes_fail_alike_none_is_at_fault(is_first: bool) -> None:
    """At a run's first start that would happen again; later they have worked before."""
    lacks = "torch finds 0 of the 8 GPUs that Slurm gave it"
    facts = Facts(
        srun_code=78,
        errors={2: lacks, 0: lacks},
        codes={0: 78, 1: 76, 2: 78},
        nodes={0: "n1", 1: "n1", 2: "n2"},
        hosts=["n1", "n2"],
        is_first_attempt=is_first,
    )
    reason = f"all 2 nodes fail alike, so no single node is the cause: {lacks}"
    expected = ("user error", "stop 1", reason) if is_first else ("crash", "requeue 75", reason)
    assert told(facts) == expected
    assert judge(facts).bad_nodes == {}
    one = replace(facts, codes={0: 76, 2: 78}, errors={2: lacks})
    assert judge(one).bad_nodes == {"n2": f"failed its check: {lacks}"}
    assert judge(replace(facts, hosts=["n1"])).cause == "bad node", "it may be that node"


def test_a_rank_that_hung_is_named_however_it_ended() -> None:
    """Another rank has left the word for it; srun kills it at last."""
    text = "HangError: rank 3 on n2 made no progress for 300 s in step 57"
    output = EXITS_76 + KILLED
    facts = Facts(srun_code=137, errors={3: text}, codes={0: 76, 3: 79}, nodes={3: "n2"}, output=output)
    assert told(facts) == ("hang", "requeue 75", "rank 3 on n2 made no progress for 300 s in step 57")
    assert judge(facts).bad_nodes == {"n2": "rank 3 hung"}
    assert judge(replace(facts, nodes={})).bad_nodes == {}, "where nobody hung more than others"


@pytest.mark.parametrize(
    ("how", "suspect"),
    [
        ("Killed", "killed by SIGKILL"),
        ("Segmentation fault (core dumped)", "killed by SIGSEGV"),
        ("Bus error", "killed by SIGBUS"),
        ("Out Of Memory", None),
        ("Aborted", None),
        ("Exited with exit code 3", None),
    ],
)
def test_a_signal_tells_against_a_node_unless_memory_ran_out(how: str, suspect: str | None) -> None:
    output = f"srun: error: n2: task 3: {how}\n"
    facts = Facts(srun_code=137, codes={0: 76}, output=output, logs={0: "", 3: ""})
    assert judge(facts).bad_nodes == ({"n2": f"rank 3: {suspect}"} if suspect else {})
    assert not judge(replace(facts, output=f"{facts.output}slurmstepd: oom_kill event\n")).bad_nodes


@pytest.mark.fault(51)
@pytest.mark.parametrize(
    ("error", "is_suspect"),
    [
        ("torch.AcceleratorError: CUDA error: unspecified launch failure", True),
        ("torch.AcceleratorError: CUDA error: device-side assert triggered", False),
    ],
)
def test_an_error_of_the_device_tells_against_its_node(error: str, is_suspect: bool) -> None:
    said = f"{TRACEBACK}\n\n{TRACEBACK[:34]}\n  …\n{error}"
    facts = Facts(srun_code=1, errors={1: said}, codes={1: 1}, nodes={1: "n1"})
    assert judge(facts).cause == "crash"
    assert judge(facts).bad_nodes.keys() == ({"n1"} if is_suspect else set())


_TASK_75 = "srun: error: n2: task 2: Exited with exit code 75\n"


@pytest.mark.parametrize(
    "facts",
    [
        Facts(srun_code=76, codes={0: 76, 2: 75}, signal=None, logs={0: ""}, step=120),
        Facts(srun_code=76, codes={0: 76}, output=_TASK_75, step=120),
        Facts(srun_code=137, codes={2: 75}, output=_TASK_75 + KILLED, step=120),
    ],
)
def test_a_rank_that_left_before_there_was_anything_to_save_was_asked_to(facts: Facts) -> None:
    assert told(facts) == PREEMPTED


def test_what_nccl_said_of_a_lost_peer_is_told_where_nobody_said_more() -> None:
    words = {2: "a peer is gone, or NCCL fails on this node: no /dev/shm"}
    lost = Facts(srun_code=76, errors=words, codes={0: 76, 2: 76}, logs={0: "", 2: ""})
    assert told(lost) == ("crash", "requeue 75", f"rank 2: {words[2]}")
    crashed = replace(lost, errors={**words, 1: TRACEBACK}, codes={**lost.codes, 1: 1})
    assert told(crashed)[2] == "rank 1: ValueError: too hot"
    assert "killed by SIGKILL" in (told(replace(lost, output=KILLED))[2] or "")


def test_a_reason_is_one_printable_line() -> None:
    facts = Facts(srun_code=1, errors={0: f"ValueError: \x1b[31mred\n{'x' * 2000}"}, codes={0: 1})
    reason = judge(facts).reason
    assert reason is not None
    assert "\x1b" not in reason and "\n" not in reason
    assert len(reason) <= 500
