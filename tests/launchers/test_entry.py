"""The seam between a launcher and the worker."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from hpc_train.errors import ExitCode, UsageError
from hpc_train.launchers.entry import Entry, attempt_number
from hpc_train.paths import RunPaths
from hpc_train.run.attempts import exit_codes
from tests.waiting import HANG_LIMIT_S, came_true


def test_it_is_pickled_with_the_folder_and_nothing_else(tmp_path: Path) -> None:
    entry = Entry(tmp_path)
    assert vars(entry) == {"folder": tmp_path}
    assert pickle.loads(pickle.dumps(entry)) == entry


@pytest.mark.parametrize("text", [None, "", "x", "-1"])
def test_without_an_attempt_it_says_what_is_missing(text: str | None) -> None:
    with pytest.raises(UsageError, match=r"^HPC_TRAIN_ATTEMPT: "):
        attempt_number(text)


@pytest.mark.parametrize(
    ("modules", "libraries"),
    [
        ("launchers.entry, hpc_train.launchers.local", {"torch"}),
        # Each requeue waits for these.
        ("launchers.slurm.begin, hpc_train.launchers.slurm.after", {"torch", "pydantic", "submitit"}),
        # A rank, before it needs them.
        pytest.param("training.main", {"torchvision", "timm", "wandb"}, marks=pytest.mark.slow),
    ],
)
def test_what_is_not_imported(modules: str, libraries: set[str]) -> None:
    script = f"import sys, hpc_train.{modules}; print({libraries} & sys.modules.keys())"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=HANG_LIMIT_S
    )
    assert done.stdout == "set()\n"


WORKER = """
import pickle, sys, types
from pathlib import Path
from hpc_train.launchers.entry import Entry
import hpc_train.training
worker = types.ModuleType("hpc_train.training.main")
def run(paths, attempt):
    print(paths.folder, attempt)
    return {end}
worker.run = run
sys.modules["hpc_train.training.main"] = hpc_train.training.main = worker
pickle.loads(pickle.dumps(Entry(Path(sys.argv[1]))))()
print("never reached")
"""


def run_rank(
    folder: Path, end: str, script: str = WORKER, **variables: str
) -> subprocess.CompletedProcess[str]:
    RunPaths(folder).attempt(3).folder.mkdir(parents=True, exist_ok=True)
    return subprocess.run(
        [sys.executable, "-c", script.replace("{end}", end), str(folder)],
        capture_output=True,
        text=True,
        env=os.environ | {"HPC_TRAIN_ATTEMPT": "3"} | variables,
        check=False,
        timeout=HANG_LIMIT_S,
    )


def test_a_rank_runs_the_worker_with_its_attempt_and_exits_with_its_code(tmp_path: Path) -> None:
    """It never returns: submitit would end with 0 and a pickle of the code."""
    done = run_rank(tmp_path, "75")
    assert (done.stdout, done.returncode) == (f"{tmp_path} 3\n", 75), done.stderr


def test_a_full_disk_that_takes_no_log_changes_no_exit_code(tmp_path: Path) -> None:
    """What Python can't flush as it ends would make 120 of it."""
    full = "import sys\nsys.stdout = sys.stderr = open('/dev/full', 'w')\n"
    assert run_rank(tmp_path, "74", full + WORKER).returncode == 74
    assert run_rank(tmp_path, "74", full + WORKER, HPC_TRAIN_ATTEMPT="x").returncode == ExitCode.USAGE


@pytest.mark.parametrize(
    ("rank", "code", "told"), [(0, 0, None), (0, 75, 75), (1, 75, None), (1, 76, 76), (2, 1, 1)]
)
def test_a_rank_writes_its_exit_code(tmp_path: Path, rank: int, code: int, told: int | None) -> None:
    assert run_rank(tmp_path, str(code), SLURM_PROCID=str(rank)).returncode == code
    attempt = RunPaths(tmp_path).attempt(3)
    assert exit_codes(attempt) == ({} if told is None else {rank: told})


def test_daemons_end_with_their_rank(tmp_path: Path) -> None:
    """Python ends them at its exit, which a rank leaves out."""
    start = "multiprocessing.Process(target=time.sleep, args=(3600,), daemon=True).start()"
    worker = WORKER.replace("print(paths.folder, attempt)", start)
    done = run_rank(tmp_path, "0", f"import multiprocessing, time\n{worker}")
    assert done.returncode == 0, done.stderr  # once no process holds its output any more


def test_a_worker_that_can_not_be_imported_leaves_its_traceback(tmp_path: Path) -> None:
    broken = WORKER.replace("= hpc_train.training.main = worker", "= None")
    done = run_rank(tmp_path, "0", broken, SLURM_PROCID="2")
    assert done.returncode == 1
    attempt = RunPaths(tmp_path).attempt(3)
    for text in (done.stderr, attempt.error(2).read_text()):
        assert "Traceback" in text and "hpc_train.training.main" in text
    assert exit_codes(attempt) == {2: 1}


def test_garbage_is_collected_again_once_the_worker_is_imported(tmp_path: Path) -> None:
    asks = WORKER.replace("print(paths.folder, attempt)", "print(gc.isenabled(), gc.get_freeze_count() > 0)")
    done = run_rank(tmp_path, "0", "import gc\n" + asks)
    assert done.stdout == "True True\n", done.stderr


def test_without_an_attempt_a_rank_ends_with_a_word(tmp_path: Path) -> None:
    done = run_rank(tmp_path, "0", HPC_TRAIN_ATTEMPT="x")
    assert done.returncode == 2
    assert done.stderr.startswith("HPC_TRAIN_ATTEMPT: 'x'")


ON_STANDBY = """
import os, sys
from pathlib import Path
from hpc_train.launchers import entry
from hpc_train.paths import RunPaths
from hpc_train.rank import signals

signals.block()
folder = Path(sys.argv[1])
entry.wait_on_standby(RunPaths(folder), folder)
print(os.environ["HPC_TRAIN_TOKEN"], "HPC_TRAIN_STANDBY" in os.environ, signals.install().count)
"""


@pytest.mark.parametrize(
    ("token", "is_stopped", "log"),
    [(None, False, None), (None, True, None), ("abc", False, "abc False 0"), ("abc", True, "abc False 1")],
)
def test_a_rank_on_standby_begins_with_the_token_of_its_attempt(
    tmp_path: Path, token: str | None, is_stopped: bool, log: str | None
) -> None:
    """Without one it ends; a stop signal that comes with it is left to the rank."""
    attempt = tmp_path / "attempts" / "2"
    attempt.mkdir(parents=True)
    (tmp_path / "run.json").write_text('{"workload": "program"}')  # imports no torch
    own = {
        "HPC_TRAIN_STANDBY": str(tmp_path), "HPC_TRAIN_RUN_FOLDER": str(tmp_path), "HPC_TRAIN_ATTEMPT": "2",
        "SLURM_PROCID": "1",
    }  # fmt: skip
    command = [sys.executable, "-u", "-c", ON_STANDBY, str(tmp_path)]
    with subprocess.Popen(command, env=os.environ | own, stdin=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert came_true((tmp_path / "rank-1").exists, HANG_LIMIT_S)
        process.send_signal(signal.SIGSTOP)  # so that both are there at once
        assert came_true(lambda: psutil.Process(process.pid).status() == psutil.STATUS_STOPPED, HANG_LIMIT_S)
        if is_stopped:
            process.send_signal(signal.SIGTERM)
        if token is not None:
            process.stdin.write(f"{token}\n")
            process.stdin.flush()
        elif not is_stopped:
            process.stdin.close()
        process.send_signal(signal.SIGCONT)
        assert process.wait(HANG_LIMIT_S) == 0
    assert (tmp_path / "rank-1").exists() == (token is None)
    lines = (attempt / "rank-1.log").read_text().splitlines() if log else []
    assert lines[1:] == ([log] if log else [])
