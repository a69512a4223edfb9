"""A stop signal takes effect wherever a rank is: while it builds, compiles, waits for data."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest

from hpc_train.paths import RunPaths
from hpc_train.run.attempts import read_record
from hpc_train.run.checkpoints import committed
from tests.end_to_end.holding import held_compiler
from tests.end_to_end.parts import POISON
from tests.end_to_end.runs import (
    EXPERIMENT,
    assert_equal_to_the_bit,
    found_runs,
    hpc_train,
    last_step,
    only_run,
    rows,
    start,
    status,
    wait_for,
    write_experiment,
)
from tests.quiet import QuietRuns
from tests.waiting import HANG_LIMIT_S

pytestmark = [pytest.mark.slow, pytest.mark.fault(2)]

#: Far beyond what a stop may take on a busy machine, and far below what is being waited for.
SOON_S, LONG_S = HANG_LIMIT_S, 10 * HANG_LIMIT_S
NET = 'model: {name: "tests.end_to_end.parts:net"}'
LOCAL = ("--local", "--devices", "2")
assert NET in EXPERIMENT


def begin(folder: Path, text: str, **environment: str) -> tuple[subprocess.Popen[str], RunPaths]:
    experiment = write_experiment(folder, text)
    process = start("submit", experiment, *LOCAL, HPC_TRAIN_RUNS=str(folder / "runs"), **environment)
    wait_for(lambda: bool(found_runs(folder)) or process.poll() is not None, "the run's folder")
    return process, only_run(folder)


def wait_for_event(paths: RunPaths, name: str, process: subprocess.Popen[str]) -> None:
    def is_told() -> bool:
        record = read_record(paths.attempt(1))
        return process.poll() is not None or (record is not None and name in record.events)

    wait_for(is_told, name)
    assert process.poll() is None, process.communicate()[1]


@pytest.mark.parametrize(
    ("model", "event", "number"),
    [
        (f"parts:slow_build, args: {{seconds: {LONG_S}}}", "joined", signal.SIGTERM),
        (f"parts:slow_once, args: {{seconds: {LONG_S}}}", "loaded", signal.SIGUSR2),
    ],
)
def test_before_the_first_step_a_signal_ends_the_ranks_at_once(
    model: str, event: str, number: signal.Signals, tmp_path: Path
) -> None:
    name, _, args = model.partition(",")
    text = EXPERIMENT.replace(NET, f'model: {{name: "tests.end_to_end.{name}",{args}}}')
    process, paths = begin(tmp_path, text)
    wait_for_event(paths, event, process)
    record = read_record(paths.attempt(1))
    assert record is not None
    for rank in record.rank_processes:
        os.kill(rank.pid, number)
    process.communicate(timeout=SOON_S)
    assert process.returncode == 75
    assert (status(paths)["state"], status(paths)["reason"]) == (
        "interrupted",
        "its ranks were asked to stop",
    )
    record = read_record(paths.attempt(1))
    assert record is not None and "signal" in record.events
    # Rank 1 may notice the end of rank 0 before its own signal: 76, a lost peer.
    assert record.exit_codes in ([75, 75], [75, 76])
    assert json.loads(paths.attempt(1).events.read_text())["signal"] == number.name


@pytest.mark.fault(55)
def test_a_signal_during_compilation_ends_the_ranks_and_a_resume_continues(tmp_path: Path) -> None:
    text = EXPERIMENT.replace(NET, 'model: {name: "tests.end_to_end.parts:layered"}\ncompile: true')
    text = text.replace("steps: 30", "steps: 3").replace("warmup_steps: 20", "warmup_steps: 1")
    with held_compiler(tmp_path) as (compiler, is_called):
        process, paths = begin(tmp_path, text, CXX=str(compiler))
        wait_for(lambda: is_called() or process.poll() is not None, "a rank that compiles")
        record = read_record(paths.attempt(1))
        assert record is not None and "first_step" not in record.events
        assert len(record.rank_processes) == 2
        words = hpc_train("status", paths.folder).out
        assert "compiling graph 1, " in words and " s so far" in words
        for rank in record.rank_processes:
            os.kill(rank.pid, signal.SIGUSR2)
        process.communicate(timeout=SOON_S)
    assert process.returncode == 75
    record = read_record(paths.attempt(1))
    assert record is not None and record.exit_codes == [75, 75] and "first_step" not in record.events
    assert hpc_train("resume", paths.folder, "--local", "--devices", "1").code == 0
    assert status(paths)["state"] == "completed"


def waiting(held: Path, sample: int, *, in_evaluation: bool) -> str:
    """Return an experiment on digits with a sample that can't be read while ``held`` exists."""
    args = f"{{held: {sample}, path: {held}, in_evaluation: {str(in_evaluation).lower()}}}"
    data = f'data: {{name: "tests.end_to_end.parts:waiting", workers: 1, args: {args}}}'
    lines = [data if line.startswith("data:") else line for line in EXPERIMENT.splitlines()]
    text = "\n".join([*lines, ""]).replace("every_steps: 7", "every_steps: 1000")
    return text.replace("every_steps: 20", "every_steps: 10")


def until_the_first_evaluation(text: str) -> str:
    text = text.replace("steps: 30", "steps: 10").replace("warmup_steps: 20", "warmup_steps: 5")
    return text.replace("logging: {every_steps: 1}", "logging: {every_steps: 1, csv: true}")


@pytest.mark.parametrize("where", ["training", "evaluation"])
def test_while_one_rank_waits_for_its_data_all_save_at_the_last_boundary(
    where: str, quiet_runs: QuietRuns, tmp_path: Path
) -> None:
    held, in_evaluation = tmp_path / "held", where == "evaluation"
    text = waiting(held, 7 if in_evaluation else POISON, in_evaluation=in_evaluation)
    quiet_text = waiting(Path("/nonexistent"), 0, in_evaluation=False)
    if in_evaluation:  # the last one, after which nothing is saved
        text, quiet_text = map(until_the_first_evaluation, (text, quiet_text))
    held.touch()
    process, paths = begin(tmp_path, text)
    tried = held.with_suffix(".tried")
    wait_for(lambda: tried.exists() or process.poll() is not None, "a rank that waits for data")
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=SOON_S)
    assert process.returncode == 130, err
    step = last_step(paths)
    assert committed(paths)[0].step == step < 30 and (step == 10) == in_evaluation
    assert not any(row["split"] == "val" for row in rows(paths) if in_evaluation)
    held.unlink()
    assert hpc_train("resume", paths.folder).code == 0
    assert_equal_to_the_bit(quiet_runs.of(text=quiet_text), paths)
    if in_evaluation:
        head, line = (paths.csv / "val.csv").read_text().splitlines()
        assert line.split(",")[head.split(",").index("step")] == "10"
