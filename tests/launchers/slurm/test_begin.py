"""The batch script claims an attempt, once, and starts nothing that must not start."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from hpc_train.errors import BadFileError, TryAgainError, UsageError, UserError
from hpc_train.launchers.slurm.batch_job import MARK, allocated_hosts
from hpc_train.launchers.slurm.begin import BudgetSpentError, WrongNodeError, begin
from hpc_train.launchers.slurm.queue import JobState
from hpc_train.launchers.slurm.queue_status import Folder, status_of
from hpc_train.paths import RunPaths
from hpc_train.run.attempts import EventLog, claim_attempt, now_ms, write_record
from hpc_train.run.checkpoints import committed
from hpc_train.run.files import write_json
from hpc_train.run.processes import Process
from hpc_train.run.run_status import RunStatus, read_status, write_status
from tests.launchers.slurm.batch import ENVIRON, as_command, restarted, submitted_run
from tests.launchers.slurm.programs import put_programs_first
from tests.launchers.slurm.queued import add_job
from tests.run.runs import record_of
from tests.run.test_checkpoints import write_checkpoint


@pytest.fixture
def other() -> Iterator[Process]:
    """A living process: somebody else's batch script."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as popen:
        found = Process.of(popen.pid)
        assert found is not None
        yield found
        popen.kill()


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    return submitted_run(tmp_path)[0]


def folder_of(paths: RunPaths) -> Path:
    """Return the folder of the submission that has the run as its first task."""
    return paths.siblings.submission("feed").folder


def begun(paths: RunPaths, environ: dict[str, str]) -> tuple[int, str, Path]:
    line = begin(folder_of(paths), environ)
    assert line is not None
    attempt, token, folder = line.split("\t")
    return int(attempt), token, Path(folder)


def test_begin_claims_an_attempt(paths: RunPaths, capsys: pytest.CaptureFixture[str]) -> None:
    number, token, folder = begun(paths, ENVIRON)
    assert (number, folder) == (1, paths.folder)
    assert len(token) == 32
    record = record_of(paths.attempt(1))
    assert (record.job, record.restart, record.launcher) == ("12_0", 0, "slurm")
    assert (record.hosts, record.ranks, record.end) == (["n1", "n2"], 4, None)
    assert record.events.keys() == {"begin"}
    status = read_status(paths)
    assert (status.state, status.attempt, status.reason) == ("running", 1, None)
    assert f"{MARK} 1 of run abc, job 12_0" in capsys.readouterr().err


def test_a_job_that_is_not_an_array_is_its_own_name(paths: RunPaths) -> None:
    begun(paths, {"SLURM_JOB_ID": "13", "SLURM_NTASKS": "3", "HPC_TRAIN_HOSTS": "n1"})
    record = record_of(paths.attempt(1))
    assert (record.job, record.ranks) == ("13", 3)


def test_the_same_batch_script_claims_once(paths: RunPaths) -> None:
    first, second = begun(paths, ENVIRON), begun(paths, ENVIRON)
    assert first[0] == second[0] == 1
    assert first[1] != second[1], "a token of an earlier start of ranks"
    assert len(paths.attempt_folders()) == 1


@pytest.mark.fault(46)
@pytest.mark.parametrize("state", ["completed", "cancelled"])
def test_an_ended_run_starts_nothing(paths: RunPaths, capfd: pytest.CaptureFixture[str], state: str) -> None:
    if state == "completed":
        write_status(paths, RunStatus("completed", 10, 10))
    else:
        write_json(paths.cancelled, {})
    assert begin(folder_of(paths), ENVIRON) is None
    assert not paths.attempt_folders()
    assert f"run abc is {state}; nothing to do" in capfd.readouterr().err


def test_a_job_that_is_not_the_runs_newest_starts_nothing(
    paths: RunPaths, capfd: pytest.CaptureFixture[str]
) -> None:
    """The run was resumed, or its folder was removed and made again, while the older job waited."""
    add_job(paths, "12_0")
    add_job(paths, "15")
    assert begin(folder_of(paths), ENVIRON) is None
    assert "run abc belongs to job 15; job 12_0 has nothing to do" in capfd.readouterr().err
    submission = folder_of(paths)
    shutil.rmtree(paths.folder)
    with pytest.raises(BadFileError, match="abc is gone; nothing to do"):
        begin(submission, ENVIRON)
    assert not paths.folder.exists()


@pytest.mark.fault(14)
def test_a_requeued_job_ends_the_record_of_what_was_lost(paths: RunPaths) -> None:
    begun(paths, ENVIRON)
    begun(paths, restarted(1))
    first, second = record_of(paths.attempt(1)), record_of(paths.attempt(2))
    assert (first.cause, first.end is None) == ("lost", False)
    assert (second.restart, second.end) == (1, None)


def test_the_next_start_knows_of_a_requeue_by_hand(paths: RunPaths) -> None:
    begun(paths, ENVIRON)
    (submission,) = paths.siblings.submission_folders()
    (submission.folder / "12_0_0_log.out").write_text(
        f"{MARK} 1 of run\nerror: *** JOB 12 ON n1 CANCELLED AT 2026-11-27 DUE TO JOB REQUEUE ***\n"
    )
    begun(paths, restarted(1))
    record = record_of(paths.attempt(1))
    assert (record.cause, record.reason) == ("requeue", "requeued by hand at step 0")


@pytest.mark.parametrize(
    ("signal", "saved", "code", "cause"),
    [
        ("SIGTERM", True, None, "preemption"),
        ("SIGUSR2", True, None, "time limit"),
        ("SIGTERM", False, "75", "preemption"),
        ("SIGTERM", False, None, "lost"),
        ("SIGTERM", False, "76", "lost"),
        (None, True, "75", "lost"),
    ],
)
def test_cause_if_slurm_ended_it(
    paths: RunPaths, signal: str | None, saved: bool, code: str | None, cause: str
) -> None:
    begun(paths, ENVIRON)
    events = EventLog(paths.attempt(1))
    if signal:
        events.signalled(signal, now_ms())
    if saved:
        events.note("saved")
    if code:
        paths.attempt(1).exit(0).write_text(f"{code}\n")
    begun(paths, restarted(1))
    assert record_of(paths.attempt(1)).cause == cause


@pytest.mark.fault(15)
@pytest.mark.fault(36)
def test_attempts_that_slurm_requeues_without_progress_end_at_the_third(paths: RunPaths) -> None:
    for restart in range(3):
        begun(paths, restarted(restart))
        EventLog(paths.attempt(restart + 1)).note("first_step")
    with pytest.raises(BudgetSpentError, match="no progress in 3 attempts: no checkpoint at all; "):
        begin(folder_of(paths), restarted(3))
    assert len(paths.attempt_folders()) == 3
    status = read_status(paths)
    assert status.state == "failed" and "no progress in 3 attempts" in (status.reason or "")
    last = record_of(paths.attempt(3))
    assert (last.cause, last.saved_step, last.restart) == ("lost", 0, 3), "for status it has not come back"
    assert "no progress 2 of 2" in (record_of(paths.attempt(2)).reason or "")
    for job_state in ("RUNNING", "COMPLETING"):  # until the batch script has exited
        found = status_of(Folder.read(paths), JobState("12_0", job_state, restarts=3))
        assert found == read_status(paths) == status
    # Requeued by hand after that: somebody wants it.
    assert begun(paths, restarted(4))[0] == 4


def fail(paths: RunPaths, number: int, **events: str) -> None:
    """End the attempt as ``after`` does when the run has failed."""
    record = record_of(paths.attempt(number))
    events = record.events | {"end": now_ms()} | events
    write_record(paths.attempt(number), replace(record, end=now_ms(), cause="user error", events=events))
    write_status(paths, RunStatus("failed", 0, 10, attempt=number, reason="data.root: nothing there"))


@pytest.mark.fault(36)
def test_slurm_restarts_a_failed_run_three_times(paths: RunPaths, capfd: pytest.CaptureFixture[str]) -> None:
    """By RequeueExit, where the batch script could not find an exit code that is not in the list."""
    begun(paths, ENVIRON)
    for restart in (1, 2, 3):
        fail(paths, restart)
        assert begun(paths, restarted(restart))[0] == restart + 1
    assert "3 of 3 times" in capfd.readouterr().err
    fail(paths, 4)
    for restart in (4, 5):
        with pytest.raises(BudgetSpentError, match="started again 3 times without progress, by Slurm"):
            begin(folder_of(paths), restarted(restart))
    assert len(paths.attempt_folders()) == 4
    status = read_status(paths)
    assert (status.state, status.reason) == ("failed", "data.root: nothing there"), "it is still why"
    write_checkpoint(paths, 4, attempt=4)
    assert begun(paths, restarted(6))[0] == 5, "it has progressed"


def test_only_starts_that_nobody_asked_for_count(paths: RunPaths) -> None:
    begun(paths, ENVIRON)
    for restart in range(1, 6):
        fail(paths, restart, requeue=now_ms())
        begun(paths, restarted(restart))
    (folder_of(paths) / "cannot-start-12_0").write_text("exit code 1\n")
    for restart in range(6, 12):
        fail(paths, restart)
        begun(paths, restarted(restart))
    (folder_of(paths) / "cannot-start-12_0").unlink()
    for restart in range(12, 18):  # lost with its node
        begun(paths, restarted(restart))
    assert not list(folder_of(paths).glob("unrequested-*"))


def test_progress_lets_slurm_requeue_without_end(paths: RunPaths) -> None:
    for number in range(1, 7):
        begun(paths, restarted(number))
        EventLog(paths.attempt(number)).note("first_step")
        write_checkpoint(paths, number, attempt=number)
    assert record_of(paths.attempt(5)).saved_step == 5


def test_a_start_that_slurm_did_not_requeue_costs_a_crash(paths: RunPaths, other: Process) -> None:
    begun(paths, ENVIRON)
    dead = replace(other, start_ticks=0)
    write_record(paths.attempt(1), replace(record_of(paths.attempt(1)), launcher_process=dead))
    begun(paths, ENVIRON)
    record = record_of(paths.attempt(1))
    assert record.cause == "crash" and (record.reason or "").startswith("crash 1 of 3: ")


@pytest.mark.fault(14)
@pytest.mark.parametrize(
    ("state", "is_gone"),
    [
        ("down*", True),
        ("down", True),
        ("idle*", True),
        ("failing", True),
        ("idle", False),
        ("drained", False),
    ],
)
def test_a_missing_node_ended_the_attempt(
    paths: RunPaths, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str, is_gone: bool
) -> None:
    sinfo = f"echo n1 idle; echo n2 {state}"
    put_programs_first(tmp_path, monkeypatch).put("sinfo", sinfo)
    begun(paths, ENVIRON)
    begun(paths, restarted(1))
    record = record_of(paths.attempt(1))
    assert record.bad_nodes == ({"n2": "died"} if is_gone else {})
    assert ("node n2 died" in (record.reason or "")) == is_gone


def test_what_ranks_said_of_their_nodes_is_heard_though_nobody_judged(paths: RunPaths) -> None:
    begun(paths, ENVIRON)
    paths.attempt(1).exit(1).write_text("78 n1\n")
    paths.attempt(1).exit(3).write_text("79 n2\n")
    with pytest.raises(WrongNodeError):
        begin(folder_of(paths), restarted(1))
    assert record_of(paths.attempt(1)).bad_nodes == {"n1": "failed its check", "n2": "rank 3 hung"}


@pytest.mark.fault(14)
def test_an_excluded_node_is_left_twice(paths: RunPaths, capfd: pytest.CaptureFixture[str]) -> None:
    begun(paths, ENVIRON)
    bad = {"n2": "failed its check: hot"}
    write_record(paths.attempt(1), replace(record_of(paths.attempt(1)), bad_nodes=bad, end=now_ms()))
    for restart in (1, 2):
        with pytest.raises(WrongNodeError) as raised:
            begin(folder_of(paths), restarted(restart))
        assert raised.value.nodes == ["n2"]
        status = read_status(paths)
        assert status.state == "requeued"
        assert status.reason == "asks for other nodes: excludes n2 (failed its check: hot)"
    assert begun(paths, restarted(3))[0] == 2
    assert "Slurm allocates no other; continuing there" in capfd.readouterr().err
    write_record(paths.attempt(2), replace(record_of(paths.attempt(2)), end=now_ms()))
    with pytest.raises(WrongNodeError):
        begin(folder_of(paths), restarted(4))
    assert begun(paths, restarted(5) | {"HPC_TRAIN_ANY_NODE": "1"})[0] == 3
    assert begun(paths, restarted(5) | {"HPC_TRAIN_HOSTS": "n1 n3"})[0] == 3


SPARE = ENVIRON | {
    "SLURM_NTASKS": "4",
    "HPC_TRAIN_NUM_NODES": "2",
    "HPC_TRAIN_HOSTS": "n1 n2 n3 n4",
}


@pytest.mark.parametrize(
    ("bad", "job", "down", "hosts", "spare"),
    [
        ({}, "", "", ["n1", "n2"], ["n3", "n4"]),
        ({"n1": "failed its check: hot"}, "", "", ["n2", "n3"], ["n1", "n4"]),
        ({"n1": "died"}, "", "", ["n1", "n2"], ["n3", "n4"]),  # once
        ({}, "", "n2 down*", ["n1", "n3"], ["n2", "n4"]),
        ({}, "JobId=12 NodeList=n[1,3-4] x=1", "", ["n1", "n3"], ["n4"]),  # a lost node that responds again
        ({"n2": "failed its check: hot"}, "JobId=12 NodeList=n[1-3]", "n1 allocated*", ["n2", "n3"], ["n1"]),
    ],
)
def test_of_a_job_with_spare_nodes_healthy_ones_are_used(
    paths: RunPaths,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    bad: dict[str, str],
    job: str,
    down: str,
    hosts: list[str],
    spare: list[str],
) -> None:
    put_programs_first(tmp_path, monkeypatch).put("sinfo", f"echo '{down}'")
    begun(paths, ENVIRON)
    write_record(paths.attempt(1), replace(record_of(paths.attempt(1)), bad_nodes=bad, end=now_ms()))
    more = {"SLURM_RESTART_COUNT": "1", "HPC_TRAIN_JOB": job, "HPC_TRAIN_ANY_NODE": "1"}
    line = begin(folder_of(paths), SPARE | more)
    assert line is not None and line.split("\t")[2:] == [str(paths.folder), ",".join(hosts)]
    record = record_of(paths.attempt(2))
    assert (record.hosts, record.spare_hosts, record.ranks) == (hosts, spare, 4)


def test_too_few_healthy_nodes_are_left_for_others(
    paths: RunPaths, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_programs_first(tmp_path, monkeypatch).put("sinfo", "true")
    begun(paths, ENVIRON)
    bad = dict.fromkeys(("n1", "n2", "n3"), "failed its check: hot")
    write_record(paths.attempt(1), replace(record_of(paths.attempt(1)), bad_nodes=bad, end=now_ms()))
    with pytest.raises(WrongNodeError):
        begin(folder_of(paths), SPARE | {"SLURM_RESTART_COUNT": "1"})


def test_what_an_old_attempt_saves_after_this_does_not_count(paths: RunPaths) -> None:
    """Its node was given up, and is alive."""
    begun(paths, ENVIRON)
    write_checkpoint(paths, 2, attempt=1)
    begun(paths, restarted(1))
    write_checkpoint(paths, 4, attempt=1)
    assert [each.step for each in committed(paths)] == [2]


@pytest.mark.fault(15)
def test_it_does_not_start_while_another_attempt_runs(paths: RunPaths, other: Process) -> None:
    write_status(paths, RunStatus("running", 3, 10, attempt=1))
    number = claim_attempt(paths, "local")
    write_record(paths.attempt(number), replace(record_of(paths.attempt(1)), launcher_process=other))
    with pytest.raises(TryAgainError, match="attempt 1 of run abc is running"):
        begin(folder_of(paths), ENVIRON)
    assert len(paths.attempt_folders()) == 1
    assert read_status(paths) == RunStatus("running", 3, 10, attempt=1), "it belongs to the other"


def test_it_starts_where_the_job_itself_was_started_again(paths: RunPaths, other: Process) -> None:
    """A batch script that outlived its node's daemons is over for Slurm."""
    begun(paths, ENVIRON)
    write_record(paths.attempt(1), replace(record_of(paths.attempt(1)), launcher_process=other))
    assert begun(paths, restarted(1))[0] == 2


@pytest.mark.parametrize(
    ("state", "starts"), [("RUNNING", False), ("STOPPED", False), ("COMPLETED", True), ("", True)]
)
def test_waits_for_another_job(
    paths: RunPaths, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other: Process, state: str, starts: bool
) -> None:
    put_programs_first(tmp_path, monkeypatch).put("squeue", f"echo {state}")
    begun(paths, {"SLURM_JOB_ID": "9", "HPC_TRAIN_HOSTS": "n1"})
    elsewhere = replace(other, host="n1", boot_id="another")
    write_record(paths.attempt(1), replace(record_of(paths.attempt(1)), launcher_process=elsewhere))
    if starts:
        assert begun(paths, ENVIRON)[0] == 2
        return
    with pytest.raises(TryAgainError, match="slurm on n1"):
        begin(folder_of(paths), ENVIRON)


@pytest.mark.parametrize("what", ["12_0_submitted.pkl", "."])
def test_what_others_can_write_is_not_run(paths: RunPaths, what: str) -> None:
    pickle = folder_of(paths) / "12_0_submitted.pkl"
    pickle.touch(mode=0o600)
    (folder_of(paths) / what).chmod(0o770)
    with pytest.raises(UserError, match="others may write it"):
        begin(folder_of(paths), ENVIRON)
    assert not paths.attempt_folders()
    status = read_status(paths)
    assert status.state == "failed"
    assert "others may write it" in (status.reason or "")


@pytest.mark.parametrize("runs", [[], ["../../elsewhere"], [".."], [3], "abc", None])
def test_a_submission_that_names_no_run_is_refused(paths: RunPaths, runs: object) -> None:
    write_json(folder_of(paths) / "submission.json", {"runs": runs})
    with pytest.raises(BadFileError, match="knows no run of array task 0"):
        begin(folder_of(paths), ENVIRON)


def test_outside_of_a_job_it_is_refused(paths: RunPaths) -> None:
    with pytest.raises(UsageError, match="SLURM_JOB_ID: not set"):
        begin(folder_of(paths), {})


@pytest.mark.slow
def test_as_a_command_it_prints_the_line_alone(paths: RunPaths) -> None:
    done = as_command("begin", ENVIRON, folder_of(paths))
    assert (done.returncode, done.stdout.count("\n")) == (0, 1), done.stderr
    assert done.stdout.split("\t")[::2] == ["1", f"{paths.folder}\n"]
    write_json(paths.cancelled, {})
    done = as_command("begin", ENVIRON, folder_of(paths))
    assert (done.returncode, done.stdout) == (0, "\n"), "no attempt: the answer is empty"
    write_json(folder_of(paths) / "submission.json", {})
    done = as_command("begin", ENVIRON, folder_of(paths))
    assert (done.returncode, done.stdout) == (65, "")
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_as_a_command_it_names_the_nodes_to_exclude(paths: RunPaths) -> None:
    begun(paths, ENVIRON)
    bad = {"n2": "failed its check", "n7": "failed its check"}
    write_record(paths.attempt(1), replace(record_of(paths.attempt(1)), bad_nodes=bad, end=now_ms()))
    done = as_command("begin", ENVIRON, folder_of(paths))
    assert (done.returncode, done.stdout) == (78, "n2,n7\n")


def test_a_node_list_is_expanded_without_scontrol() -> None:
    assert allocated_hosts({"SLURM_JOB_NODELIST": "n[1-3]", "HPC_TRAIN_HOSTS": ""}) == ["n1", "n2", "n3"]
