"""Programs on a real Slurm: sweeps, torchrun, a restart in place, one that ignores SIGTERM.

Faults of whole examples: test_program_examples.py.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hpc_train.loggers.wandb import _named
from hpc_train.paths import RunPaths
from hpc_train.run.metric_rows import iter_rows
from tests.end_to_end.runs import found_runs, hpc_train, start, wait_for
from tests.loggers.wandb_files import offline_rows
from tests.slurm.cluster import Cluster
from tests.slurm.experiments import (
    ENVIRONMENT,
    LIMIT_S,
    account,
    job_of,
    records,
    start_now,
    wait_for_attempt_end,
    wait_for_completion,
    wait_for_step,
)
from tests.slurm.runs import grace, high_job
from tests.workloads import test_misbehaving
from tests.workloads.programs import (
    SCRIPT,
    SESSION_SCRIPT,
    TEXT,
    TORCHRUN,
    TORCHRUN_TEXT,
    forked,
    result,
    weight_after,
    write_program,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SLURM = "slurm: {partition: low, nodes: 2, ranks_per_node: 1, time_limit: 30min}\n"


def submit(folder: Path, *words: str, text: str = TEXT, script: Path = SCRIPT) -> list[RunPaths]:
    file = write_program(folder, text + SLURM, script)
    environment = ENVIRONMENT | {"HPC_TRAIN_RUNS": str(folder / "runs")}
    done = hpc_train("submit", file, *words, cwd=file.parent, **environment)
    assert done.code == 0, done.err
    return found_runs(folder)


def test_a_sweep_of_programs_is_one_array(cluster: Cluster, tmp_path: Path) -> None:
    rates = [0.1, 0.2, 0.3]
    runs = submit(tmp_path, f"sweep={{grid: {{program.args.lr: {rates}}}}}", "slurm.nodes=1")
    (array,) = {job_of(paths).partition("_")[0] for paths in runs}
    assert sorted(job_of(paths) for paths in runs) == [f"{array}_{number}" for number in range(3)]
    for paths in runs:
        wait_for_completion(paths)
        lr = json.loads(paths.resolved.read_text())["program"]["args"]["lr"]
        assert result(paths)["weight"] == weight_after(20, lr)


def test_torchrun_once_per_node_stops_and_resumes(cluster: Cluster, tmp_path: Path) -> None:
    code = write_program(tmp_path, script=SESSION_SCRIPT).parent
    words = ("program.args.sleep=0.3", *forked(code, launch=(*TORCHRUN, "--no-python")))
    (paths,) = submit(tmp_path, *words, text=TORCHRUN_TEXT, script=SESSION_SCRIPT)
    wait_for_step(paths, 5)
    with high_job(cluster, records(paths)[-1].hosts):
        ended = wait_for_attempt_end(paths, 1)
    assert ended.cause == "preemption" and (ended.saved_step or 0) >= 5, account(paths)
    start_now(cluster, paths)
    wait_for_completion(paths)
    assert [row["step"] for row in iter_rows(paths.metrics)] == list(range(1, 31))
    assert sorted(paths.attempt(2).files_of_ranks(".session")) == [0, 1, 2, 3]


#: It needs no torch.
COUNTING_SCRIPT = """
import time
from hpc_train import session

folder = session.latest()
step = int((folder / "step.txt").read_text()) if folder else 0
stops = False
while step < 30 and not stops:
    step += 1
    time.sleep(0.3)
    session.log(step, loss=1 / step)
    stops = session.should_stop(step)
    if stops or step % 5 == 0:
        with session.checkpoint(step) as folder:
            (folder / "step.txt").write_text(str(step))
"""
COUNTING_TEXT = """
name: prog
program: {command: [python, train.py]}
logging: {wandb: {project: programs}}
"""


def test_the_wandb_run_of_a_session_continues_after_a_preemption(cluster: Cluster, tmp_path: Path) -> None:
    """Slurm's SIGTERM reaches wandb's own process, too."""
    script = tmp_path / "counting.py"
    script.write_text(COUNTING_SCRIPT)
    (paths,) = submit(tmp_path, "slurm.nodes=1", text=COUNTING_TEXT, script=script)
    wait_for_step(paths, 6)
    wait_for(lambda: any(paths.wandb.rglob("offline-run-*")), "wandb's start", LIMIT_S)
    with high_job(cluster, records(paths)[-1].hosts):
        ended = wait_for_attempt_end(paths, 1)
    assert ended.cause == "preemption" and (ended.saved_step or 0) >= 6, account(paths)
    start_now(cluster, paths)
    wait_for_completion(paths)
    rows = list(iter_rows(paths.metrics))
    assert [(row["attempt"], row["step"]) for row in rows] == [
        (1 + (step > (ended.saved_step or 0)), step) for step in range(1, 31)
    ]
    wandb_id = json.loads(paths.run.read_text())["wandb_id"]
    files = sorted(paths.wandb.rglob("run-*.wandb"))
    assert [file.stem for file in files] == [f"run-{wandb_id}"] * 2, account(paths)
    assert offline_rows(files[-1]) == [_named(row) for row in rows]


def test_a_program_that_ignores_sigterm_is_ended_before_slurm_does(cluster: Cluster, tmp_path: Path) -> None:
    text = test_misbehaving.TEXT.partition("sweep:")[0].replace("0.05", "5")
    words = ("program.args.behave='ignores SIGTERM'", "program.kill_after_s=null", "slurm.nodes=1")
    with grace(cluster, 12):
        (paths,) = submit(tmp_path, *words, text=text, script=test_misbehaving.MISBEHAVING)
        wait_for_step(paths, 2)
        with high_job(cluster, records(paths)[-1].hosts):
            assert wait_for_attempt_end(paths, 1).cause == "preemption", account(paths)
    log = paths.attempt(1).log(0).read_text()
    assert "the program has not ended" in log, log
    start("cancel", paths.folder).communicate(timeout=LIMIT_S)


#: In the first attempt rank 1 is killed; rank 0 then gets SIGTERM from srun.
DYING_SCRIPT = """
import os, signal, time

if os.environ["HPC_TRAIN_ATTEMPT"] == "1":
    time.sleep(1 if os.environ["RANK"] == "1" else 600)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.fault(16, 60)
def test_a_killed_rank_of_a_program_restarts_in_the_same_job(cluster: Cluster, tmp_path: Path) -> None:
    (script := tmp_path / "dying.py").write_text(DYING_SCRIPT)
    text = "name: prog\nprogram: {command: [python, train.py]}\n"
    (paths,) = submit(tmp_path, text=text, script=script)
    wait_for_completion(paths)
    first, second = records(paths)
    assert first.cause == "crash" and "signal" not in first.events, account(paths)
    assert second.in_place and second.restart == 0, account(paths)
