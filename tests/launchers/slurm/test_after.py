"""The batch script's last lines: what they write down, and that they always answer."""

from __future__ import annotations

import errno
import shutil
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from hpc_train.launchers.slurm.after import after, main, refused
from hpc_train.launchers.slurm.batch_job import MARK
from hpc_train.launchers.slurm.begin import begin
from hpc_train.paths import AttemptPaths, RunPaths
from hpc_train.run import storage_errors
from hpc_train.run.attempts import EventLog, RankEnd, rank_ends, write_record
from hpc_train.run.files import read_json, write_json
from hpc_train.run.run_status import RunStatus, read_status, write_status
from tests.launchers.slurm.batch import as_command, restarted, submitted_run
from tests.launchers.slurm.programs import put_programs_first
from tests.run.runs import record_of
from tests.run.test_checkpoints import write_checkpoint

TRACEBACK = "Traceback (most recent call last):\n  File …\nValueError: too hot\n"


@dataclass
class Batch:
    """A batch job at work on a run."""

    paths: RunPaths
    submission: Path
    restart: int = 0
    number: int = 0

    @property
    def attempt(self) -> AttemptPaths:
        return self.paths.attempt(self.number)

    def begin(self, restart: int = 0) -> None:
        line = begin(self.submission, restarted(restart))
        assert line is not None
        self.restart, self.number = restart, int(line.split("\t")[0])

    @property
    def environ(self) -> dict[str, str]:
        return restarted(self.restart) | {"HPC_TRAIN_ATTEMPT": str(self.number)}

    def after(self, code: int) -> str:
        return after(self.submission, code, self.environ)

    def rank(self, number: int, code: int, error: str = "") -> None:
        """Leave what a rank leaves."""
        self.attempt.log(number).write_text("a line\nthe last line\n")
        if code:
            self.attempt.exit(number).write_text(f"{code}\n")
        if error:
            self.attempt.error(number).write_text(error)

    def crash(self) -> str:
        self.rank(0, 76)
        self.rank(1, 1, TRACEBACK)
        return self.after(76)


@pytest.fixture
def batch(tmp_path: Path) -> Batch:
    found = Batch(*submitted_run(tmp_path, slurm={"time_limit": "2h"}))
    found.begin()
    return found


def local(seconds: float) -> str:
    """Return the time ``seconds`` from now in the format of scontrol."""
    return (datetime.now() + timedelta(seconds=seconds)).isoformat(timespec="seconds")


JOB = "JobId=12 JobState=RUNNING Restarts=0 PreemptTime={preempted} TimeLimit=02:00:00 EndTime={end} x=1"
#: The lines of versions with other fields, and lines that are damaged or late: only a whole one permits it.
_SHOWN = {
    "JobId=12 JobState=RUNNING Restarts=0 TimeLimit=02:00:00 EndTime=Unknown SuspendTime=None x=1": "again",
    "JobId=12 JobState=RUNNING Restarts=0 TimeLimit=02:00:00 PreemptTime=None x=1": "again",
    "JobId=12 JobState=RUNNING Restarts=0 TimeLimit=00:03:00 PreemptTime=None x=1": "requeue 75",
    "JobId=12 JobState=RUNNING Restarts=0 PreemptTime=None x=1": "requeue 75",
    "JobId=12 JobState=RUNNING Restarts=0 TimeLimit=02:00:00 EndTime=Unknown Dead": "requeue 75",
    "JobId=12 JobState=RUNNING Restarts=0 PreemptTime=None EndTime=2026-11- x=1": "requeue 75",
    "JobId=12 JobState=RUNNING Restarts=0 PreemptTime=2026-11-0 EndTime=Unknown x=1": "requeue 75",
    "JobId=12 JobState=RUNNING Restarts=0 EndTime=Unknown PreemptTime=None": "requeue 75",
    "JobId=12 JobState=RUNNING Restarts=1 PreemptTime=None EndTime=Unknown x=1": "requeue 75",
    "JobId=12 JobState=COMPLETING Restarts=0 PreemptTime=None EndTime=Unknown x=1": "requeue 75",
    "JobId=12 JobState=RUNNING": "requeue 75",
    "": "requeue 75",
}


@pytest.mark.parametrize(
    ("preempted", "end_s", "changes", "stop", "answer"),
    [
        (None, 7200, {}, None, "again"),
        (None, None, {}, None, "again"),  # no limit
        (-3600, 7200, {}, None, "again"),  # the preemption before the last requeue
        (None, 7200, {"recovery": {"restart": "requeue"}}, None, "requeue 75"),
        (1, 7200, {}, None, "requeue 75"),
        (None, 500, {}, None, "requeue 75"),  # less than checkpoint.every_min
        (None, 7200, {}, "SIGTERM", "requeue 75"),
    ],
)
def test_a_crash_restarts_in_place_if_the_nodes_are_left_to_the_job(
    preempted: float | None,
    end_s: float | None,
    changes: dict[str, Any],
    stop: str | None,
    answer: str,
    tmp_path: Path,
) -> None:
    batch = Batch(*submitted_run(tmp_path, slurm={"time_limit": "2h"}, **changes))
    batch.begin()
    if stop:
        EventLog(batch.attempt).signalled(stop, datetime.now(UTC).isoformat())
    times = {
        "preempted": "None" if preempted is None else local(preempted),
        "end": "Unknown" if end_s is None else local(end_s),
    }
    batch.rank(1, 1, TRACEBACK)
    environ = batch.environ | {"HPC_TRAIN_JOB": JOB.format(**times)}
    assert after(batch.submission, 76, environ) == answer
    assert read_status(batch.paths).state == "requeued"


@pytest.mark.parametrize("shown", _SHOWN)
def test_what_slurm_does_not_state_permits_no_restart_in_place(shown: str, batch: Batch) -> None:
    batch.rank(1, 1, TRACEBACK)
    environ = batch.environ | {"HPC_TRAIN_JOB": shown}
    assert after(batch.submission, 76, environ) == _SHOWN[shown]


def test_an_attempt_in_place_says_so_and_the_next_quick_failure_is_requeued(batch: Batch) -> None:
    job = {"HPC_TRAIN_JOB": JOB.format(preempted="None", end="Unknown")}
    batch.rank(1, 1, TRACEBACK)
    assert after(batch.submission, 76, batch.environ | job) == "again"
    line = begin(batch.submission, restarted(0) | {"HPC_TRAIN_IN_PLACE": "1"})
    assert line is not None and line.startswith("2\t")
    batch.number = 2
    assert [record_of(batch.paths.attempt(number)).in_place for number in (1, 2)] == [False, True]
    batch.rank(1, 1, TRACEBACK)
    assert after(batch.submission, 76, batch.environ | job) == "requeue 75"


@pytest.mark.parametrize(
    ("nodes", "down", "output", "answer"),
    [
        ("n[1-3]", "", "", "again"),
        ("n[1-3]", "n2 down", "", "again"),
        ("n[1,3]", "", "srun: error: Node failure on n2", "again"),
        ("n[1-3]", "n2 down", "srun: error: Node failure on n2", "again"),
        ("n[1-2]", "", "srun: error: Node failure on n2", "requeue 75"),  # n3 was lost before
        ("n[1-3]", "n2 down*\nn3 allocated*", "", "requeue 75"),
        ("n[2-3]", "", "srun: error: Node failure on n1", "requeue 75"),  # that of the batch script
    ],
)
def test_a_spare_node_replaces_a_lost_one(
    batch: Batch,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    nodes: str,
    down: str,
    output: str,
    answer: str,
) -> None:
    put_programs_first(tmp_path, monkeypatch).put("sinfo", f"echo '{down}'")
    with (batch.submission / "12_0_0_log.out").open("a") as file:
        file.write(f"{MARK} 1 of run abc\n{output}\n")
    batch.rank(0, 76)
    job = JOB.format(preempted="None", end="Unknown") + f" NodeList={nodes}"
    own = {"HPC_TRAIN_JOB": job, "HPC_TRAIN_NUM_NODES": "2", "SLURMD_NODENAME": "n1"}
    assert after(batch.submission, 76, batch.environ | own) == answer
    if output:
        assert record_of(batch.attempt).bad_nodes == {output.split()[-1]: "died"}
    else:
        assert record_of(batch.attempt).cause == "crash"


def test_the_exit_codes_of_a_lost_node_are_unknown(batch: Batch) -> None:
    """Then srun ends with exit code 0 (22.05)."""
    with (batch.submission / "12_0_0_log.out").open("a") as file:
        file.write(f"{MARK} 1 of run abc\nsrun: error: Node failure on n2\n")
    assert batch.after(0).startswith("requeue 75")
    record = record_of(batch.attempt)
    assert (record.cause, record.exit_codes) == ("lost", None)


def test_in_place_an_attempt_whose_end_is_not_on_disk_is_not_claimed_again(batch: Batch) -> None:
    """Its disk was full."""
    line = begin(batch.submission, restarted(0) | {"HPC_TRAIN_IN_PLACE": "1"})
    assert line is not None and line.startswith("2\t")
    assert record_of(batch.attempt).end is not None


def signalled(batch: Batch, name: str, minutes_after_begin: float) -> None:
    began = datetime.now(UTC) - timedelta(minutes=minutes_after_begin)
    record = record_of(batch.attempt)
    write_record(batch.attempt, replace(record, events={"begin": began.isoformat()}))
    EventLog(batch.attempt).signalled(name, datetime.now(UTC).isoformat())


def stop(batch: Batch, name: str, minutes_after_begin: float) -> None:
    """Let the ranks save after the signal; the job is requeued."""
    signalled(batch, name, minutes_after_begin)
    batch.rank(0, 75)
    assert batch.after(75) == "requeue 75"


def test_a_run_that_is_done_is_left_as_it_is(batch: Batch) -> None:
    done = RunStatus("completed", 10, 10, 1.0, 1)
    write_status(batch.paths, done)
    assert batch.after(0) == "stop 0"
    assert read_status(batch.paths) == done
    record = record_of(batch.attempt)
    assert (record.cause, record.reason, record.exit_codes) == ("completed", None, [0] * 4)
    assert record.end is not None
    assert record.events.keys() == {"begin", "end"}


def test_a_preempted_run_is_requeued_and_keeps_its_events(batch: Batch) -> None:
    write_status(batch.paths, RunStatus("running", 6, 10, attempt=1))
    stop(batch, "SIGTERM", 1)
    assert read_status(batch.paths) == RunStatus("requeued", 6, 10, 0.0, 1, "preempted at step 6")
    record = record_of(batch.attempt)
    assert (record.cause, record.exit_codes) == ("preemption", [75] * 4)
    assert record.events.keys() == {"begin", "signal", "end", "requeue"}


@pytest.mark.parametrize(("minutes", "cause"), [(1, "preemption"), (110, "time limit")])
def test_a_warning_long_before_the_limit_is_a_preemption(batch: Batch, minutes: float, cause: str) -> None:
    """Slurm's preempt_send_user_signal."""
    stop(batch, "SIGUSR2", minutes)
    assert record_of(batch.attempt).cause == cause


def test_a_warning_in_an_attempt_without_a_recorded_start_is_a_time_limit(batch: Batch) -> None:
    signalled(batch, "SIGUSR2", 1)
    record = record_of(batch.attempt)
    write_record(batch.attempt, replace(record, events={"signal": record.events["signal"]}))
    batch.rank(0, 75)
    assert batch.after(75) == "requeue 75"
    assert record_of(batch.attempt).cause == "time limit"


@pytest.mark.fault(36)
def test_the_fourth_crash_of_a_job_ends_the_run(batch: Batch) -> None:
    for number in (1, 2, 3):
        assert batch.crash() == "requeue 75"
        status = read_status(batch.paths)
        reason = f"crash {number} of 3: rank 1: ValueError: too hot"
        assert (status.state, status.reason) == ("requeued", reason)
        batch.begin(restart=number)
    assert batch.crash() == "stop 1"
    status = read_status(batch.paths)
    assert (status.state, status.reason) == ("failed", "rank 1: ValueError: too hot")
    assert record_of(batch.attempt).cause == "crash"


def test_another_job_begins_with_no_crashes(batch: Batch) -> None:
    for number in (1, 2, 3):
        batch.crash()
        batch.begin(restart=number)
    batch.crash()
    resumed = batch.environ | {"SLURM_ARRAY_JOB_ID": "99"}
    line = begin(batch.submission, resumed)
    assert line is not None
    batch.number = int(line.split("\t")[0])
    batch.rank(1, 1, TRACEBACK)
    assert after(batch.submission, 1, resumed | {"HPC_TRAIN_ATTEMPT": str(batch.number)}) == "requeue 75"


@pytest.mark.fault(36)
def test_time_limits_end_at_the_third_after_the_last_that_saved(batch: Batch) -> None:
    for number in (1, 2, 3, 4, 5):
        signalled(batch, "SIGUSR2", 110)
        batch.rank(0, 75)
        if number == 2:
            write_checkpoint(batch.paths, 2, attempt=2)
        assert batch.after(75) == ("requeue 75" if number < 5 else "stop 1")
        assert record_of(batch.attempt).saved_step == (2 if number > 1 else 0)
        if number == 1:
            reason = "time limit at step 0; no progress 1 of 2: no checkpoint at all"
            assert read_status(batch.paths).reason == reason
        if number < 5:
            batch.begin(restart=number)
    assert "raise slurm.time_limit" in (read_status(batch.paths).reason or "")


def test_the_runs_own_limits_count(tmp_path: Path) -> None:
    batch = Batch(*submitted_run(tmp_path, slurm={}, recovery={"max_crashes": 0}))
    batch.begin()
    assert batch.crash() == "stop 1"


@pytest.mark.fault(14)
def test_a_node_that_failed_its_check_is_named_to_the_script(batch: Batch) -> None:
    batch.attempt.exit(2).write_text("78 n2\n")
    batch.attempt.error(2).write_text("node n2: its memory is full\n")
    assert batch.after(78) == "requeue 75 n2"
    record = record_of(batch.attempt)
    assert (record.cause, record.bad_nodes) == (
        "bad node",
        {"n2": "failed its check: node n2: its memory is full"},
    )
    reason = "crash 1 of 3: n2 failed its check: node n2: its memory is full"
    assert read_status(batch.paths).reason == reason


def test_a_node_is_excluded_once_it_has_ended_two_attempts(batch: Batch) -> None:
    output = batch.submission / "12_0_0_log.out"
    for number in (1, 2):
        output.write_text(f"hpc-train: attempt {number} of run abc\nsrun: error: Node failure on n2\n")
        assert batch.after(76) == ("requeue 75" if number == 1 else "requeue 75 n2")
        batch.begin(restart=number) if number == 1 else None


def test_only_what_this_attempt_printed_is_read(batch: Batch) -> None:
    """All attempts of a job append to one file."""
    output = batch.submission / "12_0_0_log.out"
    output.write_text(
        "hpc-train: attempt 1 of run abc, job 12_0\nsrun: error: Node failure on n2\n"
        "hpc-train: attempt 2 of run abc, job 12_0\nsrun: error: n1: task 0: Segmentation fault\n"
    )
    batch.begin(restart=1)
    assert batch.after(139) == "requeue 75"
    assert read_status(batch.paths).reason == "crash 1 of 3: rank 0 on n1: killed by SIGSEGV"


@pytest.mark.fault(46)
def test_a_cancelled_run_stays_cancelled(batch: Batch) -> None:
    write_json(batch.paths.cancelled, {})
    batch.rank(0, 75)
    assert batch.after(75) == "stop 1"
    assert read_status(batch.paths).state == "cancelled"
    assert record_of(batch.attempt).cause == "cancelled"


def test_an_attempt_that_another_took_over_from_says_nothing(batch: Batch) -> None:
    old = batch.environ
    batch.begin(restart=1)
    before = read_status(batch.paths)
    assert after(batch.submission, 137, old) == "stop 1"
    assert read_status(batch.paths) == before
    assert record_of(batch.paths.attempt(1)).cause == "lost"


def test_codes_are_kept_where_all_are_known(batch: Batch) -> None:
    for rank in range(4):
        batch.rank(rank, 1 if rank == 2 else 76, TRACEBACK if rank == 2 else "")
    batch.after(76)
    assert record_of(batch.attempt).exit_codes == [76, 76, 1, 76]


@pytest.mark.slow
def test_as_a_command_it_prints_the_verdict_alone(batch: Batch) -> None:
    batch.rank(0, 75)
    done = as_command("after", batch.environ, batch.submission, "75")
    assert (done.stdout, done.returncode) == ("requeue 75\n", 0)
    assert "hpc-train: requeued: preempted at step 0" in done.stderr


def test_it_answers_even_where_it_fails_itself(batch: Batch) -> None:
    batch.attempt.record.write_text("no JSON")
    done = as_command("after", batch.environ, batch.submission, "75")
    assert (done.stdout, done.returncode) == ("stop 1\n", 0)
    assert "Traceback" in done.stderr
    status = read_status(batch.paths)
    assert status.state == "failed"
    assert "could not be judged: HpcTrainError" in (status.reason or "")
    shutil.rmtree(batch.paths.folder)
    done = as_command("after", batch.environ, batch.submission, "75")
    assert (done.stdout, done.stderr.count("\n")) == ("stop 1\n", 1)
    assert "is gone; nothing to do" in done.stderr and not batch.paths.folder.exists()


def test_stale_is_retried(
    batch: Batch, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    batch.rank(0, 75)
    for name, value in batch.environ.items():
        monkeypatch.setenv(name, value)
    errors = [OSError(errno.ESTALE, "Stale file handle")]

    def stale(attempt: AttemptPaths) -> dict[int, RankEnd]:
        if errors:
            raise errors.pop()
        return rank_ends(attempt)

    monkeypatch.setattr(storage_errors, "RETRY_AFTER_S", (0.0,))
    monkeypatch.setattr("hpc_train.run.attempts.rank_ends", stale)
    main([str(batch.submission), "75"])
    assert capsys.readouterr().out == "requeue 75\n"
    assert read_status(batch.paths).state == "requeued"


def test_a_run_that_has_used_its_gpu_hours_is_not_requeued(tmp_path: Path) -> None:
    """Two nodes of four GPUs: an attempt of half an hour uses 4 GPU-hours."""
    slurm = {"time_limit": "2h", "gpus_per_node": 4, "max_gpu_hours": 7, "nodes": 2}
    batch = Batch(*submitted_run(tmp_path, slurm=slurm))
    for number, expected in ((1, "requeue 75"), (2, "stop 1")):
        batch.begin(restart=number - 1)
        signalled(batch, "SIGUSR2", 110)
        began = datetime.now(UTC) - timedelta(minutes=30)
        write_record(batch.attempt, replace(record_of(batch.attempt), start=began.isoformat()))
        write_checkpoint(batch.paths, number, number)
        assert batch.after(75) == expected, record_of(batch.attempt)
    assert read_status(batch.paths).state == "failed"
    reason = record_of(batch.attempt).reason or ""
    assert "8 of 7 GPU-hours are used, so it is not requeued; raise slurm.max_gpu_hours" in reason


_TWO_MINUTES = {"HPC_TRAIN_JOB": "JobId=12 JobState=RUNNING Requeue=1 TimeLimit=00:02:00 TimeMin=N/A"}


def _requests(batch: Batch) -> None:
    submission = batch.paths.siblings.submission("feed")
    facts = read_json(submission.record) or {}
    parameters = {"time": 30, "additional_parameters": {"signal": "USR2@120"}}
    write_json(submission.record, facts | {"batch": {"parameters": parameters}})


def test_the_warning_before_a_time_limit_that_slurm_has_cut_is_no_preemption(batch: Batch) -> None:
    _requests(batch)
    signalled(batch, "SIGUSR2", 1)
    batch.rank(0, 75)
    assert after(batch.submission, 75, batch.environ | _TWO_MINUTES) == "requeue 75"
    record = record_of(batch.attempt)
    assert record.cause == "time limit"
    assert (record.time_limit_s, record.requested_limit_s, record.lead_s) == (120, 1800, 60)
    assert "Slurm gives the job 2 min, not the 30 min of slurm.time_limit" in str(record.reason)


def test_an_attempt_records_the_granted_time_limit_at_its_start(batch: Batch) -> None:
    _requests(batch)
    batch.after(0)
    for shown, limits in (
        (_TWO_MINUTES["HPC_TRAIN_JOB"], (120, 1800, 60)),
        ("JobId=12 TimeLimit=1-00:00:00 Requeue=1", (86400, None, None)),
        ("JobId=12 TimeLimit=UNLIMITED Requeue=1", (None, None, None)),
        ("JobId=12 Requeue=1 TimeLimit=00:02", (None, None, None)),  # the answer is cut there
        ("", (None, None, None)),
    ):
        write_status(batch.paths, RunStatus("requeued", 0, 10, attempt=1))
        environ = restarted(batch.restart + 1) | {"SLURM_CLUSTER_NAME": "A", "HPC_TRAIN_JOB": shown}
        assert begin(batch.submission, environ) is not None
        batch.restart, batch.number = batch.restart + 1, batch.number + 1
        record = record_of(batch.attempt)
        assert (record.time_limit_s, record.requested_limit_s, record.lead_s) == limits
        assert record.cluster == "a"
        write_record(batch.attempt, replace(record, end=record.start, cause="preemption"))


def test_a_refused_requeue_fails_the_run(batch: Batch, monkeypatch: pytest.MonkeyPatch) -> None:
    notified: list[RunStatus] = []
    monkeypatch.setattr(
        "hpc_train.launchers.slurm.after.notify_end", lambda paths, say, status: notified.append(status)
    )
    stop(batch, "SIGTERM", 1)
    refused(batch.submission, "Slurm refuses to requeue job 12_0: disabled", batch.environ)
    status = read_status(batch.paths)
    assert status.state == "failed"
    assert "Slurm refuses to requeue job 12_0: disabled; `hpc-train resume" in str(status.reason)
    assert record_of(batch.attempt).reason == status.reason
    assert [each.state for each in notified] == ["requeued", "failed"]


def test_a_refusal_that_comes_too_late_changes_nothing(batch: Batch) -> None:
    """The job has begun its next attempt, or the run was cancelled or completed meanwhile."""
    stop(batch, "SIGTERM", 1)
    environ = batch.environ
    for state in ("cancelled", "completed"):
        write_status(batch.paths, RunStatus(state, 6, 10, attempt=1))
        refused(batch.submission, "Slurm refuses", environ)
        assert read_status(batch.paths) == RunStatus(state, 6, 10, attempt=1)
    write_status(batch.paths, RunStatus("requeued", 6, 10, attempt=1))
    batch.begin(restart=1)
    write_status(batch.paths, RunStatus("requeued", 6, 10, attempt=2))
    refused(batch.submission, "Slurm refuses", environ)
    assert read_status(batch.paths).state == "requeued"
