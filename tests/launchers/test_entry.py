"""The seam between a launcher and the worker."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from hpc_train.errors import UsageError
from hpc_train.launchers.entry import Entry, attempt_number


def test_it_is_pickled_with_the_folder_and_nothing_else(tmp_path: Path) -> None:
    entry = Entry(tmp_path)
    assert vars(entry) == {"folder": tmp_path}
    assert pickle.loads(pickle.dumps(entry)) == entry


@pytest.mark.parametrize("text", [None, "", "x", "-1"])
def test_without_an_attempt_it_says_what_is_missing(text: str | None) -> None:
    with pytest.raises(UsageError, match=r"^HPC_TRAIN_ATTEMPT: "):
        attempt_number(text)


def test_importing_launchers_imports_no_torch() -> None:
    script = "import sys, hpc_train.launchers.entry, hpc_train.launchers.local; print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout == "False\n"


def test_a_rank_runs_the_worker_with_its_attempt_and_returns_its_code(tmp_path: Path) -> None:
    script = """
import runpy, sys, types
worker = types.ModuleType("hpc_train.worker")
worker.run = lambda paths, attempt: print(paths.folder, attempt) or 75
import hpc_train
sys.modules["hpc_train.worker"] = hpc_train.worker = worker
runpy.run_module("hpc_train.launchers.entry", run_name="__main__", alter_sys=False)
"""
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)],
        capture_output=True,
        text=True,
        env=os.environ | {"HPC_TRAIN_ATTEMPT": "3"},
        check=False,
        timeout=60,
    )
    assert (done.stdout, done.returncode) == (f"{tmp_path} 3\n", 75), done.stderr
