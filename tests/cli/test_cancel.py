"""Runs of this machine, and what can't be reached. On a real Slurm: tests/slurm/test_status.py."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from hpc_train.errors import ExitCode
from hpc_train.launchers import following as module
from hpc_train.launchers.slurm.submission import Batch, prepare
from hpc_train.paths import RunPaths
from hpc_train.run import evaluation_jobs
from hpc_train.run.attempts import claim_attempt, job_ids, read_record
from hpc_train.run.files import read_json, write_json
from hpc_train.run.processes import Process
from hpc_train.run.run_status import RunStatus, read_status, write_status
from tests.cli.commands import hpc_train, ready_runs, stderr_of, submitted, succeeded
from tests.end_to_end.runs import wait_for
from tests.launchers.slurm.programs import Programs, put_programs_first
from tests.launchers.slurm.queued import begin, queued_run
from tests.run.runs import change_record, record_of, small_run
from tests.waiting import HANG_LIMIT_S

_LIMIT_S = HANG_LIMIT_S


def _first(process: subprocess.Popen[str]) -> RunPaths:
    """Return the only run of a submit whose rank is ready."""
    wait_for(lambda: bool(ready_runs()) or process.poll() is not None, "a rank that is ready", _LIMIT_S)
    (paths,) = ready_runs()
    return paths


@pytest.mark.slow
def test_a_run_of_this_machine_saves_and_is_cancelled(file: Path) -> None:
    with submitted(file) as process:
        paths = _first(process)
        done = hpc_train("cancel", paths.folder.name)
        assert (done.code, done.out) == (0, "")
        assert f"{paths.folder.name}: cancelled at step 1" in done.err
        assert (read_status(paths).state, read_status(paths).reason) == ("cancelled", "hpc-train cancel")
        assert (paths.folder / "saved").exists()
        _, said = process.communicate(timeout=_LIMIT_S)
    assert f"{paths.folder.name}: cancelled at step 1/9" in said, "not failed, nor interrupted"
    assert read_status(paths).state == "cancelled", "the launcher's own word did not come after ours"
    assert (record := read_record(paths.attempt(1))) is not None and record.cause == "cancelled"
    assert hpc_train("status", paths.folder.name).out.count("cancelled") >= 1


@pytest.mark.slow
def test_the_other_runs_of_a_local_sweep_go_on(file: Path) -> None:
    file.write_text(file.read_text() + "sweep: {grid: {seed: [0, 1]}}\n")
    with submitted(file) as process:
        first = _first(process)
        assert hpc_train("cancel", first.folder.name).code == 0
        wait_for(lambda: len(ready_runs()) == 2, "the second run", _LIMIT_S)
        (second,) = [paths for paths in ready_runs() if paths.folder != first.folder]
        (second.folder / "go").touch()
        process.communicate(timeout=_LIMIT_S)
    assert (read_status(first).state, read_status(second).state) == ("cancelled", "completed")


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Programs:
    return put_programs_first(tmp_path, monkeypatch)


_DEAF = """
import signal
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
print(flush=True)
signal.pause()
"""


@pytest.mark.slow
def test_ranks_that_do_not_go_are_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_SAVE_LIMIT_S", 0.5)
    paths = small_run(tmp_path / "runs")
    environment = os.environ | {"HPC_TRAIN_ATTEMPT": "1", "HPC_TRAIN_RUN_FOLDER": str(paths.folder)}
    command = [sys.executable, "-c", _DEAF]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as deaf:
        assert deaf.stdout is not None and deaf.stdout.readline()
        rank = Process.of(deaf.pid)
        assert rank is not None
        claim_attempt(paths, "local", rank_processes=[rank])
        # Its launcher ends with it, as the real one does.
        change_record(paths.attempt(1), launcher_process=rank)
        write_status(paths, RunStatus("running", 3, 10, attempt=1))
        assert hpc_train("cancel", "abc").code == 0
        assert deaf.wait(_LIMIT_S) == -signal.SIGKILL
    assert read_status(paths).state == "cancelled"


@pytest.mark.parametrize("state", ["completed", "interrupted", "failed", "cancelled"])
def test_a_run_that_has_ended_stays_as_it_is(tmp_path: Path, state: str) -> None:
    paths = small_run(tmp_path / "runs")
    write_status(paths, RunStatus(state, 3, 10, attempt=1, reason="so"))
    done = hpc_train("cancel", "abc")
    assert (done.code, done.err) == (0, f"abc: {state} already; nothing to cancel\n")
    assert read_status(paths).reason == "so"
    assert not paths.cancelled.exists()


@pytest.mark.parametrize(
    ("launcher", "message"), [("local", "runs on other"), ("theirs", "launcher theirs has it")]
)
def test_a_run_that_can_not_be_cancelled_here_is_named_with_where_it_can(
    tmp_path: Path, launcher: str, message: str
) -> None:
    paths = small_run(tmp_path / "runs")
    claim_attempt(paths, launcher)
    process = record_of(paths.attempt(1)).launcher_process
    assert process is not None
    change_record(paths.attempt(1), launcher_process=replace(process, host="other", boot_id="other"))
    write_status(paths, RunStatus("running", 3, 10, attempt=1))
    done = hpc_train("cancel", "abc")
    assert (done.code, message in done.err) == (1, True), done.err
    assert ("cancel it there" in done.err) == (launcher == "local")
    assert read_status(paths).state == "running"


def test_without_slurm_a_run_is_marked_cancelled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_programs_first(tmp_path, monkeypatch)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    paths = queued_run(tmp_path / "runs", "12_3")
    begin(paths, "12_3")
    done = hpc_train("cancel", "abc")
    assert done.code == ExitCode.NO_SCHEDULER
    assert "squeue: no such program here" in done.err
    assert "abc: marked as cancelled" in done.err and "`scancel 12_3`" in done.err
    assert read_json(paths.cancelled) is not None
    assert read_status(paths).state == "running"


def _runs_until_cancelled(programs: Programs, gone: Path, row: str, answer: str = "") -> None:
    """Have squeue list the job of ``row`` until scancel is called; ``answer``: another branch of it."""
    shown = f"[ -e {gone} ] || printf '%s\\x1f' {row};;"
    programs.put("squeue", f'case "$*" in\n{answer}\n*) {shown}\nesac')
    programs.put("scancel", f"touch {gone}")
    programs.put("scontrol", "echo 'KillWait = 30 sec'")
    programs.put("sacct", "exit 1")


def test_a_half_submitted_run_is_cancelled_with_its_unrecorded_held_job(
    programs: Programs, tmp_path: Path
) -> None:
    """The submit was killed before sbatch, or between it and its next step."""
    programs.put("squeue", "exit 0")
    paths = queued_run(tmp_path / "runs", None)
    assert hpc_train("cancel", "abc").code == 0
    assert (read_status(paths).state, paths.cancelled.exists()) == ("cancelled", True)
    paths = queued_run(tmp_path / "runs", None, "def")
    submission = paths.siblings.submission("feed")
    batch = Batch(submission.folder, "python", {})
    prepare(submission, [paths], batch, max_parallel=None, stays_held=False)
    held = f'*--format=%F*) echo "12|{submission.folder}/12_submission.sh";;'
    row = '12 PENDING JobHeldUser 0 "" "" 0 "" small /x.sh'
    _runs_until_cancelled(programs, tmp_path / "gone", row, held)
    succeeded("cancel", "def")
    assert programs.calls("scancel") == ["12"]
    assert (read_status(paths).state, job_ids(read_json(paths.run) or {})) == ("cancelled", ["12"])


def test_a_job_of_another_experiment_is_left_alone(programs: Programs, tmp_path: Path) -> None:
    """Slurm has begun to count its jobs again."""
    paths = queued_run(tmp_path / "runs", "12")
    words = "12 RUNNING None 0 '' '' 0 n1 other /runs/other/.slurm/feed/12_submission.sh"
    programs.put("squeue", f"printf '%s\\x1f' {words}")
    programs.put("scancel", "true")
    done = hpc_train("cancel", "abc")
    assert "abc: job 12 is not its own, but other: it is left alone" in done.err
    assert not programs.calls("scancel")
    assert paths.cancelled.exists()


def test_cancel_with_a_full_disk(programs: Programs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begin(queued_run(tmp_path / "runs", "12"), "12")
    _runs_until_cancelled(programs, tmp_path / "gone", "12 RUNNING None 0 '' '' 0 n1 small /x.sh")

    def full(path: Path, *_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr("hpc_train.run.run_status.write_json", full)
    done = hpc_train("cancel", "abc")
    assert programs.calls("scancel") == ["12"]
    assert done.code == ExitCode.IO, done.err
    assert "the jobs were ended, but that can't be written:\n" in done.err and "cancelled.json: " in done.err


def test_a_run_that_completes_first_stays_completed(programs: Programs, tmp_path: Path) -> None:
    paths = queued_run(tmp_path / "runs", "12")
    begin(paths, "12")
    completed = tmp_path / "completed.json"
    write_json(completed, RunStatus("completed", 10, 10, attempt=1).to_json())
    programs.put("squeue", f"cp {completed} {paths.status}")
    programs.put("sacct", "exit 0")
    assert "completed before it could be cancelled" in stderr_of(0, "cancel", "abc")
    assert read_status(paths).state == "completed" and not paths.cancelled.exists()


def test_the_evaluations_of_a_completed_run_are_cancelled_before_it_is_removed(
    programs: Programs, tmp_path: Path
) -> None:
    programs.put("squeue", "exit 0")
    programs.put("sacct", "exit 0")
    programs.put("scancel", "true")
    paths = queued_run(tmp_path / "runs", "12")
    write_status(paths, RunStatus("completed", 10, 10, attempt=1))
    for step, jobs in ((4, ["13", "15"]), (8, [])):
        evaluation_jobs.request(paths, step)
        paths.checkpoint(step).folder.mkdir(parents=True)
        paths.checkpoint(step).manifest.touch()
        for job in jobs:
            evaluation_jobs.note_job(paths, step, job)
    done = hpc_train("rm", "abc", "--yes")
    assert done.code != 0 and "abc: jobs of 1 evaluation wait or run" in done.err
    done = hpc_train("cancel", "abc")
    assert (done.code, programs.calls("scancel")) == (0, ["13 15"]), done.err
    assert "abc: cancelled the jobs of 1 evaluation" in done.err
    assert evaluation_jobs.submitted(paths) == []
    assert hpc_train("rm", "abc", "--yes").code == 0
