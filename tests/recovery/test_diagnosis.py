"""Why an attempt ended: the same wording for every launcher and every command that reports it."""

from __future__ import annotations

import inspect
import signal
from pathlib import Path

import pytest

from hpc_train.launchers.outcome import judge as judge_local
from hpc_train.launchers.rank_processes import RankProcess
from hpc_train.launchers.slurm import queue_status
from hpc_train.launchers.slurm.evidence import Facts, evidence, stop_by
from hpc_train.launchers.slurm.evidence import judge as judge_slurm
from hpc_train.paths import RunPaths
from hpc_train.recovery import diagnosis
from hpc_train.recovery.diagnosis import (
    Evidence,
    SilentEnd,
    Stop,
    diagnose,
    diagnose_lost,
    one_line,
    signal_name,
    stopped_by_signal,
)
from hpc_train.run.attempts import CAUSES

TRACEBACK = "Traceback (most recent call last):\n  File …\nValueError: too hot"
OWN_ERROR = "Traceback (most recent call last):\n  …\nhpc_train.errors.NonFiniteError: loss is NaN at step 7"


def _local(folder: Path, code: int, error: str | None) -> tuple[str, str | None]:
    """Diagnose a local attempt whose rank 1 ended with ``code`` and rank 0 after it."""
    attempt = RunPaths(folder).attempt(1)
    attempt.folder.mkdir(parents=True)
    for rank in range(2):
        attempt.log(rank).write_text("last line\n")
    if error is not None:
        attempt.error(1).write_text(error)
    popen = None
    ended = [RankProcess(1, popen, code), RankProcess(0, popen, 76)]  # type: ignore[arg-type]
    outcome = judge_local(attempt, ended, num_ranks=2, interrupted_by=None, is_completed=False)
    return outcome.cause, outcome.reason


def _slurm(code: int, error: str | None, how: str) -> tuple[str, str | None]:
    codes = {0: 76} | ({1: code} if code > 0 and error is not None else {})
    errors = {} if error is None else {1: error}
    output = f"srun: error: n1: task 1: {how}\n"
    logs = {0: "last line", 1: "last line"}
    verdict = judge_slurm(Facts(srun_code=code % 256, errors=errors, codes=codes, output=output, logs=logs))
    return verdict.cause, verdict.reason


@pytest.mark.parametrize(
    ("code", "error", "cause"),
    [
        (1, TRACEBACK, "crash"),
        (2, "RANK: 'x' is not a number", "user error"),
        (65, "data.root: not there\ndata.args: wrong", "user error"),
        (77, OWN_ERROR, "diverged"),
        (78, "BadNodeError: 2 GB of memory are free", "bad node"),
        (79, "HangError: rank 1 on n1 made no progress", "hang"),
        (82, "ranks 0 and 1 compute different numbers in step 3", "bad node"),
        (80, "data.workers: a loader process was killed", "worker lost"),
        (81, "ulimit -n: rank 1 may open 64 files", "user error"),
        (3, None, "crash"),
    ],
)
def test_reasons_are_equal_on_all_launchers(tmp_path: Path, code: int, error: str | None, cause: str) -> None:
    here = _local(tmp_path, code, error)
    there = _slurm(code, error, f"Exited with exit code {code}")
    assert here[0] == there[0] == cause
    assert (there[1] or "").replace(" on n1: ended", ": ended") == here[1]


def test_a_killed_rank_has_the_same_reason_except_for_its_node_and_slurms_key(tmp_path: Path) -> None:
    cause, words = _slurm(137, None, "Killed")
    assert words is not None
    words = words.replace(" on n1", "").replace("ask for more slurm.mem_gb; ", "")
    assert (cause, words) == _local(tmp_path, -int(signal.SIGKILL), None)


def test_every_cause_is_one_of_the_records() -> None:
    ends = {cause for cause, _ in queue_status._JOB_ENDS.values()}
    lost = {diagnose_lost(4, is_requeued=requeued).cause for requeued in (True, False)}
    assert ends | lost <= set(CAUSES)


@pytest.mark.parametrize("name", ["SIGUSR2", "SIGTERM", None])
def test_a_stop_reads_the_same_judged_or_not(name: str | None) -> None:
    judged = diagnose(evidence(Facts(srun_code=75, codes={0: 75}, signal=name, step=9)))
    lost = diagnose_lost(9, stop_by(name), has_stopped=True)
    assert (judged.cause, judged.reason) == (lost.cause, lost.reason)


def test_a_lost_attempt_that_stopped_on_nobodys_known_order_is_not_called_preempted() -> None:
    found = diagnose_lost(9, has_stopped=True)
    assert (found.cause, found.reason) == ("lost", "preempted, or requeued by hand, at step 9")


def test_nodes_that_compute_different_numbers_are_both_suspects() -> None:
    error, nodes = "ranks 0, 2 compute different numbers in step 3", dict(enumerate(["n1", "n1", "n2"]))
    codes = {0: 82, 1: 76, 2: 82}
    found = diagnose(Evidence(errors={2: error, 0: error}, codes=codes, nodes=nodes, hosts=["n1", "n2"]))
    assert (found.cause, found.reason) == ("bad node", error)
    assert found.bad_nodes == dict.fromkeys(["n2", "n1"], "computed other numbers than another node")


def test_a_lost_attempt_names_the_nodes_that_died() -> None:
    blamed = {"n1": "died", "n2": "died", "n3": "rank 3 hung"}
    found = diagnose_lost(4, bad_nodes=blamed)
    assert (found.reason, found.bad_nodes) == ("nodes n1, n2 died at step 4", blamed)


@pytest.mark.parametrize(
    ("number", "words"), [(signal.SIGINT, "stopped by Ctrl-C"), (signal.SIGTERM, "stopped by SIGTERM")]
)
def test_an_interruption_names_what_sent_it(number: int, words: str) -> None:
    assert diagnose(Evidence(stop=stopped_by_signal(number))).reason == words
    assert diagnose(Evidence(stop=Stop("interrupted"))).reason == "its ranks were asked to stop"


def test_a_real_time_signal_has_a_number_only() -> None:
    assert (signal_name(9), signal_name(40)) == ("SIGKILL", "signal 40")


def test_what_is_certain_comes_first() -> None:
    silent = SilentEnd("0", signal=int(signal.SIGKILL))
    sure = Evidence(errors={1: TRACEBACK}, codes={1: 1}, silent=silent, stop=Stop("preemption"))
    assert diagnose(sure).reason == "rank 1: ValueError: too hot"
    killed = Evidence(silent=silent, stop=Stop("preemption"))
    assert diagnose(killed).cause == "crash"


def test_the_diagnosis_knows_no_scheduler() -> None:
    text = inspect.getsource(diagnosis).replace("slurm.mem_gb", "")
    assert not [word for word in ("slurm", "srun", "sacct", "sbatch") if word in text.lower()]


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (signal.SIGABRT, "rank 1: killed by SIGABRT: what():  std::bad_alloc"),
        (signal.SIGXCPU, "rank 1: killed by SIGXCPU: the limit of its CPU time is reached (`ulimit -t`)"),
        (
            signal.SIGXFSZ,
            "rank 1: killed by SIGXFSZ: the limit of the size of a file is reached (`ulimit -f`)",
        ),
        (signal.SIGSEGV, "rank 1: killed by SIGSEGV"),
    ],
)
def test_a_signal_is_explained_where_its_cause_is_certain(number: signal.Signals, words: str) -> None:
    """An abort prints its reason last; the last line before another signal may be about anything."""
    silent = SilentEnd("1", signal=int(number))
    found = diagnose(Evidence(silent=silent, logs={1: "what():  std::bad_alloc"}))
    assert found.reason == one_line(words)
