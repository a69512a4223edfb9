"""Runs of a script that knows nothing of hpc-train, on this machine: disturbed, they end as documented."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from hpc_train.loggers.wandb import _named
from hpc_train.paths import RunPaths
from hpc_train.run.attempts import read_record
from hpc_train.run.metric_rows import iter_rows
from tests.end_to_end.runs import Done, hpc_train, only_run, resume, start, status, wait_for
from tests.loggers.wandb_files import offline_rows
from tests.waiting import HANG_LIMIT_S
from tests.workloads.programs import result, stopped_at, weight_after, write_program

pytestmark = pytest.mark.slow


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HPC_TRAIN_RUNS", str(tmp_path / "runs"))
    return tmp_path


def submit(folder: Path, *arguments: str, devices: int = 1) -> tuple[Done, RunPaths]:
    file = write_program(folder)
    done = hpc_train("submit", file, *arguments, "--local", "--devices", str(devices), cwd=file.parent)
    return done, only_run(folder)


def assert_each_step_once(paths: RunPaths, steps: int) -> None:
    rows = list(iter_rows(paths.metrics))
    assert [row["step"] for row in rows] == list(range(1, steps + 1))
    assert rows[-1]["loss"] == pytest.approx(weight_after(steps), abs=1e-8)


def test_a_program_runs_on_two_ranks_in_a_folder_of_its_own(folder: Path) -> None:
    done, paths = submit(folder, devices=2)
    assert done.code == 0, done.err
    assert status(paths)["state"] == "completed" and status(paths)["step"] == 20
    assert result(paths) == {"step": 20, "weight": weight_after(20), "starts": 1}
    assert_each_step_once(paths, 20)
    logs = [paths.attempt(1).log(rank).read_text() for rank in (0, 1)]
    assert [f"rank {rank} of 2" in log for rank, log in enumerate(logs)] == [True, True]
    assert not (folder / "code" / "out").exists() and not (folder / "code" / "result.json").exists()


@pytest.mark.parametrize(("behave", "devices"), [("", 2), ("exits", 1)])
def test_it_continues_from_its_own_checkpoint_after_ctrl_c(folder: Path, behave: str, devices: int) -> None:
    """Also if its exit code at the signal is 0, as that of Lightning."""
    words = ("program.args.steps=60", "program.args.sleep=0.1", f"program.args.behave='{behave}'")
    words = ("exp.yaml", *words, "--devices", str(devices))
    paths = stopped_at(12, folder, *words, code=write_program(folder).parent)
    resume(paths)
    assert result(paths) == {"step": 60, "weight": weight_after(60), "starts": 2}
    assert_each_step_once(paths, 60)


def test_the_error_of_a_program_is_the_runs_reason(folder: Path) -> None:
    done, paths = submit(folder, "program.args.behave=raises", devices=2)
    assert done.code == 1
    assert "ValueError: a bad batch" in str(status(paths)["reason"]), done.err
    record = read_record(paths.attempt(1))
    assert record is not None and record.cause == "crash"


def test_a_program_without_metrics_for_long_is_hung_and_shows_its_stacks(folder: Path) -> None:
    done, paths = submit(folder, "program.args.behave=hangs", "recovery.hang_after_min=0.05")
    record = read_record(paths.attempt(1))
    assert record is not None and record.cause == "hang", done.err
    assert "recovery.hang_after_min" in str(status(paths)["reason"])
    log = paths.attempt(1).log(0).read_text()
    assert "Fatal Python error: Aborted" in log and "train.py" in log


def test_a_process_that_a_program_leaves_behind_is_ended(folder: Path) -> None:
    done, paths = submit(folder, "program.args.behave='leaves a child'")
    assert done.code == 0, done.err
    assert processes_in(paths.work) == []


#: As of torchrun: a process of the program's own session.
WORKER_SCRIPT = """
import subprocess
import sys

subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True).wait()
"""


@pytest.mark.parametrize("killed", ["launcher", "rank"])
def test_no_process_of_a_program_outlives_a_launcher_or_rank_that_was_killed(
    folder: Path, killed: str
) -> None:
    file = write_program(folder, "name: prog\nprogram: {command: [python, train.py], per: node}\n")
    (file.parent / "train.py").write_text(WORKER_SCRIPT)
    process = start("submit", file, "--local", "--devices", "2", cwd=file.parent)
    wait_for(lambda: any(folder.glob("runs/*/*/work")), "the working folder")
    paths = only_run(folder)
    wait_for(lambda: len(processes_in(paths.work)) == 2, "the program and its worker")
    record = read_record(paths.attempt(1))
    assert record is not None
    os.kill(process.pid if killed == "launcher" else record.rank_processes[0].pid, signal.SIGKILL)
    wait_for(lambda: not processes_in(paths.work), "the end of the program and its worker")
    process.communicate(timeout=HANG_LIMIT_S)


def test_the_process_of_a_logger_outlives_the_program_and_does_not_delay_a_stop(folder: Path) -> None:
    text = (
        "name: prog\nprogram: {command: [python, train.py], outputs: logs}\nlogging: {wandb: {project: p}}\n"
    )
    file = write_program(folder, text)
    (file.parent / "train.py").write_text(LOGGED_SCRIPT)
    process = start("submit", file, "--local", "--devices", "1", cwd=file.parent, WANDB_MODE="offline")
    wait_for(lambda: any(folder.glob("runs/*/*/metrics.jsonl")), "metrics")
    paths = only_run(folder)
    wait_for(lambda: any(paths.wandb.rglob("run-*.wandb")), "wandb's start")
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=HANG_LIMIT_S)
    log = paths.attempt(1).log(0).read_text()
    assert "its process ended" not in log and "has not ended" not in log and "left" not in log, log
    (stored,) = paths.wandb.rglob("run-*.wandb")
    assert offline_rows(stored) == [_named(row) for row in iter_rows(paths.metrics)]


LOGGED_SCRIPT = """
import time
from hpc_train import session

step, stops = 0, False
while not stops:
    step += 1
    time.sleep(0.1)
    session.log(step, loss=1 / step)
    stops = session.should_stop(step)
with session.checkpoint(step) as folder:
    (folder / "step.txt").write_text(str(step))
"""


def processes_in(work: Path) -> list[Path]:
    return [
        entry
        for entry in Path("/proc").iterdir()
        if entry.name.isdecimal() and os.fsencode(work) in _folder_of(entry)
    ]


def _folder_of(process: Path) -> bytes:
    try:
        return os.fsencode((process / "cwd").readlink())
    except OSError:
        return b""


#: It fails in its first attempt.
WANDB_SCRIPT = """
import json
import os
import wandb

run = wandb.init(project="p", mode="offline", dir="logs")
run.log({"loss": 1.0})
assert os.environ["HPC_TRAIN_ATTEMPT"] == "2"
"""


def test_wandb_of_a_program_is_one_run_over_all_attempts(folder: Path) -> None:
    file = write_program(folder, "name: prog\nprogram: {command: [python, train.py], outputs: logs}\n")
    (file.parent / "train.py").write_text(WANDB_SCRIPT)
    failed = hpc_train("submit", file, "--local", "--devices", "1", cwd=file.parent)
    paths = only_run(folder)
    assert failed.code == 1 and "AssertionError" in str(status(paths)["reason"]), failed.err
    resume(paths)
    wandb_id = json.loads(paths.run.read_text())["wandb_id"]
    runs = sorted(path.name for path in paths.work.glob("logs/wandb/offline-run-*"))
    assert len(runs) == 2 and all(name.endswith(f"-{wandb_id}") for name in runs), runs
