"""What holds where folder and Slurm say different things. On a real Slurm: tests/slurm/test_status.py."""

from __future__ import annotations

import os
import shutil
import time
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from hpc_train.launchers.slurm import evaluations, queue, queue_status
from hpc_train.launchers.slurm.queue import ELSEWHERE, FORGOTTEN, JobState
from hpc_train.launchers.slurm.queue_status import (
    CUT_SHORT,
    Folder,
    other_cluster,
    status_of,
    statuses,
)
from hpc_train.launchers.slurm.submission import Submissions
from hpc_train.paths import RunPaths, SubmissionPaths
from hpc_train.run import evaluation_jobs
from hpc_train.run.attempts import EventLog, read_record
from hpc_train.run.files import write_json
from hpc_train.run.run_status import RunStatus, read_status, write_status
from tests.launchers.slurm.programs import put_programs_first
from tests.launchers.slurm.queued import add_job, begin, job, queued_run
from tests.run.test_checkpoints import write_checkpoint

_LONG_AGO = "2020-01-01T00:00:00+00:00"
_NEVER = "never starts: {}; cancel it, then resume it with another slurm.{}"
_HELD = "held; `scontrol release 12_3` lets it start"


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    """A run whose job 12 is queued."""
    return queued_run(tmp_path / "runs", "12")


def _stand(paths: RunPaths, state: JobState | None) -> RunStatus:
    return status_of(Folder.read(paths), state)


def _submission(paths: RunPaths, facts: dict[str, Any], token: str = "t1") -> SubmissionPaths:
    """Write the record of a submission."""
    submission = paths.siblings.submission(token)
    submission.folder.mkdir(parents=True)
    write_json(submission.record, facts)
    return submission


def test_a_run_without_a_job_was_not_submitted_to_the_end(tmp_path: Path) -> None:
    found = _stand(queued_run(tmp_path / "runs", None), None)
    assert (found.state, found.reason) == ("pending", CUT_SHORT)


@pytest.mark.fault(35)
@pytest.mark.parametrize(
    ("state", "reason", "words"),
    [
        ("PENDING", "Priority", "waits: Priority"),
        ("PENDING", None, "waits: Slurm has given no reason yet"),
        ("PENDING", "JobArrayTaskLimit", "waits: JobArrayTaskLimit"),
        ("PENDING", "PartitionTimeLimit", _NEVER.format("PartitionTimeLimit", "time_limit")),
        ("PENDING", "QOSMaxNodePerJobLimit", _NEVER.format("QOSMaxNodePerJobLimit", "nodes")),
        ("PENDING", "QOSMaxJobsPerUserLimit", "waits: QOSMaxJobsPerUserLimit"),
        ("PENDING", "AssocGrpGRES", "waits: AssocGrpGRES"),
        ("PENDING", "JobHeldUser", _HELD),
        ("PENDING", "JobHeldAdmin", "held by an administrator, who alone can release it"),
        ("PENDING", "launch_failed_requeued_held", f"held by Slurm: launch_failed_requeued_{_HELD}"),
        ("CONFIGURING", None, "starting on n[1-2]"),
        ("RUNNING", None, "starting on n[1-2]"),
        ("SUSPENDED", None, "suspended by Slurm"),
    ],
)
def test_a_pending_job_has_its_reason(tmp_path: Path, state: str, reason: str | None, words: str) -> None:
    paths = queued_run(tmp_path / "runs", "12_3")
    nodes = None if state == "PENDING" else "n[1-2]"
    found = _stand(paths, job("12_3", state, reason, nodes=nodes))
    assert (found.state, found.reason) == ("pending", words)
    assert read_status(paths).reason is None, "shown, and wrong a moment later: not written"


def test_a_held_job_is_told_from_an_unfinished_submission(tmp_path: Path) -> None:
    paths = queued_run(tmp_path / "runs", "12_3")
    submission = _submission(paths, {"job_id": "12", "state": "submitted"})
    assert "until its submission is complete" in str(
        _stand(paths, job("12_3", "PENDING", "JobHeldUser")).reason
    )
    write_json(submission.record, {"job_id": "12", "state": "released"})
    assert "scontrol release 12_3" in str(_stand(paths, job("12_3", "PENDING", "JobHeldUser")).reason)


def test_slurms_guess_of_a_start_is_shown_in_local_time(paths: RunPaths) -> None:
    state = job("12", "PENDING", "Resources", start_estimate="2037-05-01T12:00:00+00:00")
    shown = datetime(2037, 5, 1, 12, tzinfo=UTC).astimezone().strftime("%Y-%m-%d at %H:%M")
    assert _stand(paths, state).reason == f"waits: Resources, starts on {shown} by Slurm's guess"
    assert _stand(paths, replace(state, reason="BeginTime")).reason == f"starts on {shown}"


def test_a_run_that_goes_on_is_as_its_folder_says(paths: RunPaths) -> None:
    begin(paths, "12", step=4)
    assert _stand(paths, job("12", "RUNNING")) == read_status(paths)
    assert _stand(paths, job("12", "SUSPENDED")).reason == "suspended by Slurm"
    assert _stand(paths, None) == read_status(paths)


def test_an_answer_from_before_the_start_leaves_the_run_running(
    paths: RunPaths,
) -> None:
    begin(paths, "12", restart=2, step=4)
    assert _stand(paths, job("12", "PENDING", "Priority", restarts=2)).state == "running"
    assert _stand(paths, job("12", "PENDING", "Priority", restarts=1)).state == "running"


def test_a_requeue_that_the_batch_script_had_no_say_in_is_written_down(paths: RunPaths) -> None:
    begin(paths, "12", step=4)
    found = _stand(paths, job("12", "PENDING", "Resources", restarts=1))
    assert (found.state, found.step, found.attempt) == ("requeued", 4, 1)
    assert found.reason == "ended without a word at step 4; waits: Resources"
    assert read_status(paths).reason == "ended without a word at step 4"
    assert _stand(paths, job("12", "PENDING", "Resources", restarts=1)) == found, "said once"


@pytest.mark.parametrize(
    ("by", "reason"),
    [("JOB REQUEUE", "requeued by hand at step 4; "), ("PREEMPTION", "preempted at step 4; ")],
)
def test_scontrol_requeue_is_not_called_a_preemption(paths: RunPaths, by: str, reason: str) -> None:
    begin(paths, "12", step=4)
    log = EventLog(paths.attempt(1))
    log.signalled("SIGTERM", "2026-01-01T00:00:00+00:00")
    log.note("saved")
    submission = _submission(paths, {"job_id": "12"})
    (submission.folder / "12_0_log.out").write_text(
        "hpc-train: attempt 1 of run abc, job 12\n"
        f"slurmstepd-n1: error: *** JOB 12 ON n1 CANCELLED AT 2026-11-27T23:57:23 DUE TO {by} ***\n"
    )
    found = _stand(paths, job("12", "PENDING", "Resources", restarts=1))
    assert str(found.reason).startswith(reason)


def test_the_batch_scripts_reason_for_a_requeue_is_kept(paths: RunPaths) -> None:
    begin(paths, "12", cause="preemption")
    write_status(paths, RunStatus("requeued", 4, 10, attempt=1, reason="preempted at step 4"))
    assert _stand(paths, job("12", "COMPLETING", restarts=0)).reason == "preempted at step 4"
    waiting = job("12", "PENDING", "Priority", restarts=1)
    assert _stand(paths, waiting).reason == "preempted at step 4; waits: Priority"
    starting = job("12", "RUNNING", restarts=1, nodes="n2")
    assert _stand(paths, starting).reason == "preempted at step 4; starting on n2"


@pytest.mark.fault(34)
@pytest.mark.parametrize(
    ("state", "stands", "words", "cause"),
    [
        ("CANCELLED", "cancelled", "scancel", "cancelled"),
        ("TIMEOUT", "failed", "raise slurm.signal_lead_s", "time limit"),
        ("OUT_OF_MEMORY", "failed", "slurm.mem_gb", "crash"),
        ("NODE_FAIL", "failed", "a node failed", "lost"),
        ("PREEMPTED", "failed", "does not requeue", "preemption"),
        ("DEADLINE", "failed", "deadline", "time limit"),
        ("FAILED", "failed", "job 12 ended without a word (FAILED, exit code 3)", "lost"),
        ("COMPLETED", "failed", "job 12 ended without a word (COMPLETED, exit code 3)", "lost"),
        (FORGOTTEN, "failed", "job 12: the job is gone, and Slurm has forgotten", "lost"),
    ],
)
def test_an_ended_job_ends_the_run(paths: RunPaths, state: str, stands: str, words: str, cause: str) -> None:
    begin(paths, "12", step=4)
    found = _stand(paths, job("12", state, exit_code="3:0", ended=_LONG_AGO))
    assert (found.state, found.step) == (stands, 4)
    assert words in str(found.reason)
    assert read_status(paths) == found
    record = read_record(paths.attempt(1))
    assert record is not None and record.end is not None
    assert (record.cause, record.reason) == (cause, found.reason)


def test_ranks_that_saved_at_the_time_limit_itself_are_told_from_those_that_did_not(paths: RunPaths) -> None:
    begin(paths, "12", step=4)
    EventLog(paths.attempt(1)).note("saved")
    found = _stand(paths, job("12", "TIMEOUT", ended=_LONG_AGO))
    assert found.state == "failed"
    assert found.reason == (
        "job 12: time limit reached: its ranks saved, but too late to be requeued; "
        "raise slurm.signal_lead_s or slurm.time_limit"
    )


def test_a_job_that_had_no_room_for_its_reason_has_it_in_its_exit_code(paths: RunPaths) -> None:
    begin(paths, "12", step=4)
    found = _stand(paths, job("12", "FAILED", exit_code="74:0", ended=_LONG_AGO))
    assert "(FAILED, exit code 74: its disk is full, or can't be written)" in str(found.reason)


def test_a_job_that_ended_before_any_rank_points_to_its_output(tmp_path: Path) -> None:
    found = _stand(
        queued_run(tmp_path / "runs", "12"), job("12", "FAILED", "NonZeroExitCode", exit_code="1:0")
    )
    assert found.state == "failed"
    assert found.reason == (
        "job 12 ended before any rank started (NonZeroExitCode, exit code 1); see `hpc-train logs abc`"
    )


@pytest.mark.parametrize("state", ["NODE_FAIL", "TIMEOUT", "BOOT_FAIL"])
def test_a_job_that_slurm_ended_before_any_rank_has_failed(tmp_path: Path, state: str) -> None:
    assert _stand(queued_run(tmp_path / "runs", "12"), job("12", state, ended=_LONG_AGO)).state == "failed"


def test_a_node_that_does_not_see_the_folder_of_runs_is_named(paths: RunPaths, tmp_path: Path) -> None:
    found = _stand(paths, job("12", "FAILED", "JobLaunchFailure", exit_code="0:53", nodes="n1"))
    where = f"n1 can't write into {paths.siblings.submissions}"
    assert found.state == "failed"
    assert found.reason == f"job 12: {where}; nodes must see the folder of runs at this path"
    other = queued_run(tmp_path / "runs", "13", "def")
    begin(other, "13")
    found = _stand(other, job("13", "FAILED", exit_code="0:9", ended=_LONG_AGO))
    assert "ended without a word (FAILED, signal 9)" in str(found.reason)


def test_a_forgotten_job_that_left_output_did_start(tmp_path: Path) -> None:
    paths = queued_run(tmp_path / "runs", "12_3")
    submission = _submission(paths, {"job_id": "12", "state": "released"})
    (submission.folder / "12_3_0_log.out").write_text("python: No such file or directory\n")
    found = _stand(paths, job("12_3", FORGOTTEN))
    assert found.state == "failed"
    assert found.reason == "job 12_3 ended before any rank started; see `hpc-train logs abc`"


@pytest.mark.parametrize("ahead_s", [0, 4])
def test_a_job_that_ended_this_moment_is_given_time_for_its_own_verdict(
    paths: RunPaths, ahead_s: int
) -> None:
    """Also if slurmctld's clock is ahead of this one."""
    begin(paths, "12")
    just_now = (datetime.now(UTC) + timedelta(seconds=ahead_s)).isoformat()
    found = _stand(paths, job("12", "FAILED", ended=just_now))
    assert (found.state, found.reason) == ("running", "its job has just ended: FAILED")
    assert read_status(paths).state == "running"


def test_a_job_whose_end_is_far_from_this_clock_is_diagnosed_at_once(paths: RunPaths) -> None:
    begin(paths, "12")
    later = (datetime.now(UTC) + timedelta(hours=1)).isoformat()
    assert _stand(paths, job("12", "FAILED", ended=later)).state == "failed"


def test_a_requeue_that_did_not_happen_is_an_end(paths: RunPaths) -> None:
    begin(paths, "12", end="2026-01-01T00:00:00+00:00", cause="preemption")
    write_status(paths, RunStatus("requeued", 4, 10, attempt=1, reason="preempted at step 4"))
    found = _stand(paths, job("12", "FAILED", exit_code="75:0", ended=_LONG_AGO))
    assert (
        found.reason == "job 12 was to be requeued but ended (FAILED, exit code 75); see `hpc-train logs abc`"
    )
    record = read_record(paths.attempt(1))
    assert record is not None and record.cause == "preemption"


@pytest.mark.parametrize("state", ["completed", "failed", "cancelled"])
def test_an_end_in_the_folder_is_not_questioned(paths: RunPaths, state: str) -> None:
    begin(paths, "12")
    write_status(paths, RunStatus(state, 9, 10, attempt=1, reason="rank 0: it broke"))
    for said in (job("12", "CANCELLED"), job("12", "RUNNING"), job("12", FORGOTTEN), None):
        assert _stand(paths, said) == read_status(paths)


def test_a_failed_run_whose_job_was_requeued_by_hand_continues(paths: RunPaths) -> None:
    begin(paths, "12")
    write_status(paths, RunStatus("failed", 9, 10, attempt=1, reason="rank 0: it broke"))
    found = _stand(paths, job("12", "PENDING", "Priority", restarts=1))
    assert (found.state, found.reason) == (
        "requeued",
        "requeued by hand after rank 0: it broke; waits: Priority",
    )


def test_a_cancelled_run_is_so_once_its_job_is_gone(paths: RunPaths) -> None:
    begin(paths, "12", step=4)
    write_json(paths.cancelled, {"version": 1})
    assert _stand(paths, job("12", "RUNNING")).reason == "being cancelled"
    found = _stand(paths, job("12", "COMPLETED", ended=_LONG_AGO))
    assert (found.state, found.reason, found.step) == ("cancelled", "hpc-train cancel", 4)
    assert read_status(paths) == found


def test_a_cancelled_run_is_at_its_newest_checkpoint(paths: RunPaths) -> None:
    begin(paths, "12", step=4)
    write_json(paths.cancelled, {"version": 1})
    write_checkpoint(paths, 6, attempt=1)
    found = _stand(paths, job("12", "CANCELLED", ended=_LONG_AGO))
    assert (found.state, found.step) == ("cancelled", 6)


def test_the_newest_job_counts(paths: RunPaths) -> None:
    begin(paths, "12")
    add_job(paths, "15_0")
    write_status(paths, RunStatus("pending", 4, 10, attempt=1))
    assert Folder.read(paths).job == "15_0"
    assert _stand(paths, job("15_0", "PENDING", "Priority")).reason == "waits: Priority"


def test_what_the_folder_came_to_say_meanwhile_holds(paths: RunPaths) -> None:
    begin(paths, "12")
    read_before = Folder.read(paths)
    write_status(paths, RunStatus("completed", 10, 10, attempt=1))
    found = status_of(read_before, job("12", "COMPLETED", ended=_LONG_AGO))
    assert found == read_status(paths) and found.state == "completed"


@pytest.mark.fault(33)
def test_where_slurm_is_silent_the_folders_word_is_given_and_that_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    programs = put_programs_first(tmp_path, monkeypatch)
    programs.put("squeue", "echo 'Unable to contact slurm controller' >&2; exit 1")
    runs = [queued_run(tmp_path / "runs", "12", run_id="a"), queued_run(tmp_path, "13", run_id="b")]
    assert [status.state for status in statuses(runs)] == ["pending", "pending"]
    assert capsys.readouterr().err.count("Unable to contact slurm controller") == 1


def test_ended_runs_need_no_slurm(paths: RunPaths, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    programs = put_programs_first(tmp_path, monkeypatch)
    programs.put("squeue", "exit 1")
    write_status(paths, RunStatus("completed", 10, 10, attempt=1))
    assert statuses([paths])[0].state == "completed"
    assert programs.calls("squeue") == []


def test_the_batch_scripts_output_is_found_by_its_job(tmp_path: Path) -> None:
    paths = queued_run(tmp_path / "runs", "12_3")
    assert Submissions().batch_output(paths, "12_3") is None
    for token, job_id in (("t1", "12_3"), ("t2", "12_30")):
        submission = _submission(paths, {"job_id": "12"}, token)
        (submission.folder / f"{job_id}_0_log.out").write_text(job_id)
    found = Submissions().batch_output(paths, "12_3")
    assert found is not None and found.read_text() == "12_3"


def _missed(job_id: str, seconds_ago: float) -> JobState:
    return JobState(job_id, FORGOTTEN, missed_at=time.time() - seconds_ago)


def test_a_missing_job_ends_its_run_at_the_second_look_only(paths: RunPaths) -> None:
    first = _stand(paths, _missed("12", 0))
    assert first.state == "pending" and "Slurm does not list job 12" in str(first.reason)
    assert read_status(paths).state == "pending"
    assert _stand(paths, _missed("12", 61)).state == "cancelled"


def test_a_missing_job_with_heartbeats_is_running(paths: RunPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    begin(paths, "12")
    assert _stand(paths, _missed("12", 3600)).state == "running"
    for silent_s, state in ((119.0, "running"), (121.0, "failed")):
        monkeypatch.setattr(queue_status, "silent_s", lambda paths, record, found=silent_s: found)
        assert _stand(paths, _missed("12", 3600)).state == state


def test_an_attempt_that_has_ended_or_is_of_an_earlier_job_is_no_sign_of_life(tmp_path: Path) -> None:
    """Though its files were written a moment ago."""
    requeued = queued_run(tmp_path / "runs", "12")
    begin(requeued, "12", end=_LONG_AGO, cause="preemption")
    write_status(requeued, RunStatus("requeued", 4, 10, attempt=1))
    assert _stand(requeued, _missed("12", 61)).state == "failed"
    resumed = queued_run(tmp_path / "runs", "13", "def")
    begin(resumed, "13")
    add_job(resumed, "15")
    write_status(resumed, RunStatus("pending", 4, 10, attempt=1))
    assert _stand(resumed, _missed("15", 61)).state == "cancelled"


def test_a_cancelled_run_needs_no_second_look(paths: RunPaths) -> None:
    write_json(paths.cancelled, {"version": 1})
    assert _stand(paths, _missed("12", 0)).state == "cancelled"


def test_an_end_inferred_from_absence_is_taken_back_when_the_job_is_listed(tmp_path: Path) -> None:
    waiting = queued_run(tmp_path / "runs", "12")
    assert _stand(waiting, job("12", FORGOTTEN)).state == "cancelled"
    assert _stand(waiting, job("12", "PENDING", "Priority")).state == "pending"
    assert read_status(waiting).state == "pending"
    running = queued_run(tmp_path / "runs", "13", "def")
    begin(running, "13", step=4)
    assert _stand(running, job("13", FORGOTTEN)).state == "failed"
    assert _stand(running, job("13", "PENDING", restarts=0)).state == "failed", "an answer from before"
    assert _stand(running, job("13", "RUNNING")) == RunStatus("running", 4, 10, attempt=1)
    assert read_status(running).state == "running"
    record = read_record(running.attempt(1))
    assert record is not None and (record.end, record.cause) == (None, None)
    requeued = queued_run(tmp_path / "runs", "14", "ghi")
    begin(requeued, "14", end=_LONG_AGO, cause="preemption", events={"end": _LONG_AGO})
    assert _stand(requeued, job("14", FORGOTTEN)).state == "failed"
    assert _stand(requeued, job("14", "PENDING", "Priority", restarts=1)).state == "requeued"
    resumed = queued_run(tmp_path / "runs", "15", "jkl")
    begin(resumed, "15", end=_LONG_AGO, cause="crash")
    add_job(resumed, "16")
    write_status(resumed, RunStatus("pending", 4, 10, attempt=1))
    assert _stand(resumed, job("16", FORGOTTEN)).state == "cancelled"
    assert _stand(resumed, job("16", "PENDING", "Priority")).state == "pending"


@pytest.mark.parametrize("facts", [{"events": {"end": _LONG_AGO}}, {"exit_codes": [1]}])
def test_an_end_by_the_batch_script_is_final(paths: RunPaths, facts: dict[str, Any]) -> None:
    begin(paths, "12", end=_LONG_AGO, cause="crash", **facts)
    write_status(paths, RunStatus("failed", 4, 10, attempt=1))
    assert _stand(paths, job("12", "RUNNING")).state == "failed"


def test_a_job_that_is_listed_again_is_asked_about_and_silence_is_not_reported(
    paths: RunPaths, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HPC_TRAIN_CACHE", str(tmp_path / "cache"))
    programs = put_programs_first(tmp_path, monkeypatch)
    assert _stand(paths, job("12", FORGOTTEN)).state == "cancelled"
    programs.put("squeue", "exit 1")
    assert statuses([paths])[0].state == "cancelled"
    assert capsys.readouterr().err == ""
    row = "\x1f".join(["12", "PENDING", "Priority", "0", "N/A", "N/A", "0", "", "small", "/x.sh", ""])
    programs.put("squeue", f"echo '{row}'")
    shutil.rmtree(tmp_path / "cache")
    assert statuses([paths])[0].state == "pending"


def test_an_active_job_of_another_cluster_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = queued_run(tmp_path / "runs", None)
    add_job(paths, "12", "a")
    for reached, named in (("b", "a"), ("a", None), (None, None)):
        monkeypatch.setattr(queue_status, "cluster_name", lambda found=reached: found)
        assert other_cluster(paths) == named
    monkeypatch.setattr(queue_status, "cluster_name", lambda: "b")
    write_status(paths, RunStatus("failed", 4, 10))
    assert other_cluster(paths) is None


def test_a_time_limit_that_slurm_has_cut_is_shown(paths: RunPaths) -> None:
    begin(paths, "12", time_limit_s=120.0, requested_limit_s=1800.0)
    words = "Slurm gives the job 2 min, not the 30 min of slurm.time_limit"
    assert _stand(paths, job("12", "RUNNING")).reason == words


@pytest.mark.parametrize(
    ("events", "step", "words"),
    [
        ({}, 0, "before the first step; raise slurm.time_limit; Slurm gives the job 2 min"),
        ({"first_step": "now"}, 0, "raise slurm.signal_lead_s; Slurm gives the job 2 min"),
        ({}, 4, "raise slurm.signal_lead_s; Slurm gives the job 2 min"),
    ],
)
def test_a_job_that_its_time_limit_killed(
    paths: RunPaths, events: dict[str, str], step: int, words: str
) -> None:
    """A longer time from the signal to the limit helps only a job that trains."""
    begin(paths, "12", step=step, events=events, time_limit_s=120.0, requested_limit_s=1800.0)
    assert words in str(_stand(paths, job("12", "TIMEOUT", ended=_LONG_AGO)).reason)


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        (None, "scancel"),
        (f"by {os.getuid()}", "scancel"),
        ("by 54321", "scancel by user 54321"),
        ("DependencyNeverSatisfied", "the job that job 12 waits for failed or was cancelled"),
    ],
)
def test_who_has_cancelled_a_job(tmp_path: Path, reason: str | None, words: str) -> None:
    paths = queued_run(tmp_path / "runs", "12")
    found = _stand(paths, job("12", "CANCELLED", reason, ended=_LONG_AGO))
    assert found.state == "cancelled" and str(found.reason).endswith(words)


@pytest.mark.parametrize("state", ["pending", "running", "failed"])
def test_a_job_that_another_cluster_of_the_federation_has_started_is_not_over(
    paths: RunPaths, state: str
) -> None:
    begin(paths, "12", step=4, cluster="b")
    write_status(paths, RunStatus(state, 4, 10, attempt=1))
    found = _stand(paths, job("12", "REVOKED"))
    assert (found.state, found.step) == (state, 4)
    assert state == "failed" or "another cluster of the federation" in str(found.reason)
    assert read_status(paths) == RunStatus(state, 4, 10, attempt=1)


def test_a_run_of_another_cluster_is_as_its_folder_says(tmp_path: Path) -> None:
    paths = queued_run(tmp_path / "runs", None)
    add_job(paths, "12", "a")
    found = _stand(paths, JobState("12", ELSEWHERE, "b"))
    assert (found.state, found.reason) == ("pending", "job 12 belongs to cluster a, this is b")
    assert read_status(paths).reason is None


def test_equal_job_numbers_of_two_clusters_are_two_jobs(tmp_path: Path) -> None:
    paths = queued_run(tmp_path / "runs", None)
    add_job(paths, "12", "a")
    begin(paths, "12", cluster="a", end=_LONG_AGO, cause="crash")
    add_job(paths, "12", "b")
    write_status(paths, RunStatus("pending", 4, 10, attempt=1))
    assert Folder.read(paths).key == ("12", "b")
    assert _stand(paths, job("12", "RUNNING", nodes="n1")).reason == "starting on n1"


def test_a_job_of_another_script_is_not_its_own(paths: RunPaths, tmp_path: Path) -> None:
    submission = _submission(paths, {"job_id": "12", "runs": ["def"], "state": "released"})
    other = job("12", "RUNNING", script=str(submission.folder / "submission.sh"), name="small")
    assert _stand(paths, other).state == "cancelled"
    assert _stand(queued_run(tmp_path / "runs", "12", "def"), other).state == "pending"
    unknown = queued_run(tmp_path / "runs", "12", "ghi")
    assert _stand(unknown, job("12", "RUNNING", name="other")).state == "cancelled", "by the job's name"


@pytest.mark.parametrize(
    ("run", "state", "facts", "how"),
    [
        ("completed", "PENDING", {}, None),
        ("completed", "RUNNING", {}, None),
        ("completed", "CANCELLED", {"ended": _LONG_AGO}, "CANCELLED"),
        ("failed", "TIMEOUT", {"ended": _LONG_AGO}, "TIMEOUT"),
        ("completed", "FAILED", {"ended": None}, None),
        ("completed", FORGOTTEN, {"missed_at": None}, None),
        ("completed", FORGOTTEN, {"missed_at": 0.0}, "it is no longer in the queue"),
        ("completed", "RUNNING", {"name": "other"}, None),
        ("completed", "COMPLETED", {"name": "other"}, "it is no longer in the queue"),
        ("running", "CANCELLED", {"ended": _LONG_AGO}, None),
    ],
)
def test_an_evaluation_whose_job_has_ended_without_a_result_has_failed(
    paths: RunPaths,
    monkeypatch: pytest.MonkeyPatch,
    run: str,
    state: str,
    facts: dict[str, Any],
    how: str | None,
) -> None:
    """While the run trains, its batch script submits the evaluation again. A time of None is now."""
    write_status(paths, RunStatus(run, 10, 10, attempt=1))
    write_checkpoint(paths, 4, attempt=1)
    evaluation_jobs.request(paths, 4)
    evaluation_jobs.note_job(paths, 4, "31")
    moment = {"ended": datetime.now(UTC).isoformat(), "missed_at": time.time()}
    facts = {key: moment[key] if value is None else value for key, value in facts.items()}
    named = {"name": evaluations.job_name(paths, 4)} | facts
    queued = {"31": JobState("31", state, **named), "12": job("12", "RUNNING")}
    monkeypatch.setattr(queue, "ask", lambda keys, also, max_age_s: {key: queued[key[0]] for key in keys})
    statuses([paths])
    failures = {} if how is None else {4: f"job 31 ended without a result: {how}"}
    assert evaluation_jobs.failures(paths) == failures
