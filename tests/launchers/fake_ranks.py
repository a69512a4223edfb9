"""Runs whose ranks are small scripts: no torch, so that they start at once."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from hpc_train.errors import ExitCode
from hpc_train.launchers.base import LaunchRequest
from hpc_train.launchers.local import LocalLauncher
from hpc_train.paths import AttemptPaths, RunPaths
from hpc_train.run.attempts import AttemptRecord, claim_attempt, read_record
from tests.run.runs import small_experiment, small_run
from tests.waiting import HANG_LIMIT_S

REPOSITORY = Path(__file__).parents[2]
_LIMIT_S = HANG_LIMIT_S
#: What each script begins with: its rank, its run's files, and ways to wait.
PRELUDE = """
import os, signal, sys, time
from pathlib import Path
from hpc_train.paths import RunPaths
from hpc_train.run.run_status import RunStatus, write_status
from hpc_train.rank import signals
rank = int(os.environ["RANK"])
run = RunPaths(Path(sys.argv[1]))
attempt = run.attempt(int(os.environ["HPC_TRAIN_ATTEMPT"]))
def leave(code=0):
    sys.stdout.flush()
    os._exit(code)  # as ranks do: a Python that tears down has given up its signal handlers
sys.exit = leave
def wait_for(condition):
    limit = time.monotonic() + LIMIT_S
    while not condition():
        if time.monotonic() > limit:
            print("waited in vain", file=sys.stderr, flush=True)
            leave(1)
        time.sleep(0.01)
def tell(name):
    (run.folder / f"{name}-{rank}").touch()
def fail(text, code=1):
    attempt.error(rank).write_text(text)
    leave(code)
""".replace("LIMIT_S", str(_LIMIT_S))


def new_request(folder: Path, devices: int = 2, device: str = "cpu") -> LaunchRequest:
    paths = small_run(folder, device=device)
    return LaunchRequest(paths, small_experiment(device=device), claim_attempt(paths), devices)


def launcher(script: str, run: RunPaths) -> LocalLauncher:
    return LocalLauncher([sys.executable, "-c", PRELUDE + script, str(run.folder)])


def launch(request: LaunchRequest, script: str) -> ExitCode:
    return launcher(script, request.paths).launch(request, lambda: None)


def attempt_of(request: LaunchRequest) -> AttemptPaths:
    return request.paths.attempt(request.attempt)


def record_of(request: LaunchRequest) -> AttemptRecord:
    record = read_record(attempt_of(request))
    assert record is not None
    return record


def start_launcher(request: LaunchRequest, script: str) -> subprocess.Popen[str]:
    """Launch in a process of its own, to which signals can be sent."""
    driver = f"""
import sys
from pathlib import Path
from hpc_train.experiment.config.schema import Experiment
from hpc_train.launchers.base import LaunchRequest
from hpc_train.paths import RunPaths
from tests.launchers.fake_ranks import launcher
from tests.run.runs import small_experiment
run = RunPaths(Path({str(request.paths.folder)!r}))
request = LaunchRequest(run, small_experiment(device="cpu"), {request.attempt}, {request.devices})
sys.exit(launcher({script!r}, run).launch(request, lambda: None))
"""
    return subprocess.Popen(
        [sys.executable, "-c", driver], cwd=REPOSITORY, env=os.environ, stderr=subprocess.PIPE, text=True
    )


def wait_for(condition: Callable[[], object]) -> None:
    limit = time.monotonic() + _LIMIT_S
    while not condition():
        assert time.monotonic() < limit, "waited in vain"
        time.sleep(0.01)


def told(request: LaunchRequest, name: str) -> Callable[[], bool]:
    """Return True if all ranks have said ``name``."""
    files = [request.paths.folder / f"{name}-{rank}" for rank in range(request.devices or 1)]
    return lambda: all(file.exists() for file in files)
