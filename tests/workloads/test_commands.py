"""Every command on runs of a program: it works, or says why not and what to do instead."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpc_train.cli.starting import has_saved, next_steps
from hpc_train.paths import RunPaths
from hpc_train.run.metric_rows import iter_rows
from hpc_train.run.run_status import read_status
from tests.cli.commands import hpc_train
from tests.end_to_end.runs import found_runs
from tests.end_to_end.runs import hpc_train as as_a_process
from tests.terminals import Terminal
from tests.workloads.programs import SCRIPT, write_program

pytestmark = pytest.mark.slow

TEXT = """
name: prog
program:
  command: [python, train.py]
  args: {lr: 0.1}
"""
GRID = "sweep={grid: {program.args.lr: [1, 2, 3, 4, 5, 6]}}"
ONLY_OUR_TRAINER = "only hpc-train's own trainer can do that"
#: A command's words (DONE and FAILED: runs; SWEEP: all of them), its exit code, a part of what it prints.
COMMANDS = [
    ("validate exp.yaml", 0, "1 run of prog"),
    ("validate exp.yaml --json", 0, '"version"'),
    ("plan exp.yaml --local", 0, ""),
    ("plan exp.yaml --local --json", 0, '"version"'),
    ("prepare exp.yaml", 0, ""),
    ("submit exp.yaml --local --dry-run", 0, ""),
    ("submit exp.yaml --local --dry-run --json", 0, '"version"'),
    ("doctor exp.yaml --local --json", 0, '"version"'),
    ("status", 0, "completed"),
    ("status DONE", 0, "4/4"),
    ("status FAILED", 0, "a bad learning rate"),
    ("status --json", 0, '"total_steps"'),
    ("status --failed", 0, "failed"),
    ("status SWEEP --sort program.args.lr", 0, "lr"),
    ("logs DONE --json", 0, "hpc-train: attempt 1"),
    ("logs FAILED -n 3 --json", 0, "ValueError: a bad learning rate"),
    ("verify DONE", 0, "step-00000004"),
    ("verify SWEEP --json", 0, '"version"'),
    ("verify FAILED", 0, "no checkpoint"),
    ("compare SWEEP", 0, "lr"),
    ("compare DONE FAILED --json", 0, '"version"'),
    ("report SWEEP -o report.html", 0, ""),
    ("sync DONE", 2, ""),
    ("resume DONE", 0, "completed"),
    ("resume DONE program.args.lr=7", 2, "start another run"),
    ("resume DONE optimization.epochs=7", 65, ""),
    ("cancel DONE", 0, "completed already; nothing to cancel"),
    ("cancel FAILED --json", 0, "nothing to cancel"),
    ("export DONE -o w.safetensors", 2, "a program of yours writes its weights itself"),
    ("evaluate DONE", 65, ONLY_OUR_TRAINER),
    ("predict DONE -o p.csv", 65, ONLY_OUR_TRAINER),
    ("replay DONE --step 2", 65, ONLY_OUR_TRAINER),
    ("bisect DONE FAILED", 65, ONLY_OUR_TRAINER),
    ("clean SWEEP -y", 0, ""),
    ("rm FAILED -y", 0, ""),
]


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> dict[str, RunPaths]:
    """Run six programs, of which the third one fails; return them by their argument."""
    folder = tmp_path_factory.mktemp("commands")
    file = write_program(folder, TEXT, SCRIPT.with_name("commands_script.py"))
    words = ("submit", "exp.yaml", GRID, "--local", "--devices", "1", "--jobs", "3")
    done = as_a_process(*words, cwd=file.parent, HPC_TRAIN_RUNS=str(folder / "runs"))
    assert done.code == 1, done.err
    return {
        str(json.loads(paths.resolved.read_text())["program"]["args"]["lr"]): paths
        for paths in found_runs(folder)
    }


@pytest.fixture
def folder(sweep: dict[str, RunPaths], monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    folder = sweep["1"].folder.parents[2]
    monkeypatch.setenv("HPC_TRAIN_RUNS", str(folder / "runs"))
    monkeypatch.chdir(folder / "code")
    yield folder


def test_watch_shows_programs(folder: Path) -> None:
    """Before the commands, the last of which removes a run."""
    environment = os.environ | {"HPC_TRAIN_RUNS": str(folder / "runs"), "NO_COLOR": "1"}
    with Terminal("watch", "prog", cwd=folder, environment=environment, columns=120) as watching:
        watching.until(r"completed .*4/4")
        watching.until(r"failed")
        watching.press("q")
        assert watching.wait() == 0


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(("words", "code", "text"), COMMANDS, ids=[words for words, *_ in COMMANDS])
def test_a_command(words: str, code: int, text: str, sweep: dict[str, RunPaths]) -> None:
    names = {
        "DONE": f"prog/{sweep['1'].folder.name}",
        "FAILED": f"prog/{sweep['3'].folder.name}",
        "SWEEP": "prog",
    }
    done = hpc_train(*(names.get(word, word) for word in words.split()))
    assert (done.code, text in done.out + done.err) == (code, True), done.out + done.err
    if "--json" in words:
        json.loads(done.out)
    else:
        assert "Traceback" not in done.err


@pytest.mark.usefixtures("folder")
def test_no_command_that_needs_our_trainer_is_suggested(sweep: dict[str, RunPaths]) -> None:
    assert has_saved(sweep["1"]) and next_steps(sweep["1"], read_status(sweep["1"])) == []


SEARCH = """
name: searched
program: {command: [python, train.py]}
sweep:
  search:
    trials: 4
    max_concurrent: 2
    metric: loss
    mode: min
    parameters: {program.args.lr: {log_uniform: [0.1, 2]}}
"""


def test_a_search_starts_trials_and_reads_their_metrics(folder: Path, tmp_path: Path) -> None:
    file = write_program(tmp_path, SEARCH, SCRIPT.with_name("commands_script.py"))
    environment = {"HPC_TRAIN_RUNS": str(tmp_path / "runs")}
    done = as_a_process("search", file, "--local", "--devices", "1", cwd=file.parent, **environment)
    assert done.code == 0, done.err
    assert "searched: 2 of 4 trials; best loss " in done.err and "the search is complete" in done.err
    values = {
        json.loads(paths.resolved.read_text())["program"]["args"]["lr"]: list(iter_rows(paths.metrics))[-1][
            "loss"
        ]
        for paths in found_runs(tmp_path)
    }
    assert len(values) == 4 and all(rate == loss for rate, loss in values.items())
