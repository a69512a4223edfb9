from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from hpc_train.paths import RunPaths
from hpc_train.run_folder.attempts import claim_attempt, read_record, write_record
from hpc_train.run_folder.status import RunStatus, write_status
from tests.cli.commands import REPOSITORY, hpc_train
from tests.run_folder.runs import small_run


def _run(tmp_path: Path) -> RunPaths:
    return small_run(tmp_path / "runs")


def test_json_has_the_keys_of_the_contract(tmp_path: Path) -> None:
    paths = _run(tmp_path)
    data = json.loads(hpc_train("status", "abc", "--json").out)
    assert data == {
        "version": 1,
        "runs": [
            {
                "id": "abc",
                "name": "small",
                "state": "pending",
                "step": 0,
                "total_steps": 10,
                "attempt": 0,
                "reason": None,
                "path": str(paths.folder),
            }
        ],
    }


def test_without_runs_there_is_nothing_on_stdout() -> None:
    done = hpc_train("status")
    assert (done.code, done.out) == (0, "")
    assert json.loads(hpc_train("status", "--json").out) == {"version": 1, "runs": []}


def test_columns_are_plain_where_nobody_watches(tmp_path: Path) -> None:
    _run(tmp_path)
    heads, row = hpc_train("status").out.splitlines()
    assert heads.split() == ["run", "experiment", "state", "step", "attempt", "reason"]
    assert row.split() == ["abc", "small", "pending", "0/10", "0"]


def test_a_run_whose_launcher_died_is_corrected(tmp_path: Path) -> None:
    paths = _run(tmp_path)
    claim_attempt(paths)
    record = read_record(paths.attempt(1))
    assert record is not None and record.launcher_process is not None
    dead = replace(record.launcher_process, start_ticks=0)
    write_record(paths.attempt(1), replace(record, launcher="local", launcher_process=dead))
    write_status(paths, RunStatus(state="running", step=4, attempt=1))
    (run,) = json.loads(hpc_train("status", "--json").out)["runs"]
    assert (run["state"], run["reason"], run["step"]) == ("failed", "launcher died", 4)


def test_markup_and_escapes_of_a_reason_are_shown_as_text_on_a_terminal(tmp_path: Path) -> None:
    paths = _run(tmp_path)
    write_status(paths, RunStatus(state="failed", reason="[red]x[/red] \x1b]0;title\x07\nsecond"))
    ours, theirs = pty.openpty()
    subprocess.run(
        [sys.executable, "-m", "hpc_train", "status"],
        env=os.environ | {"PYTHONPATH": str(REPOSITORY), "COLUMNS": "200", "TERM": "xterm"},
        stdout=theirs,
        check=True,
    )
    os.close(theirs)
    shown = os.read(ours, 65536).decode()
    os.close(ours)
    assert r"[red]x[/red] \x1b]0;title\x07\nsecond" in shown
    assert "\x1b]" not in shown
