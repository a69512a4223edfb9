"""Launchers that end at once: commands are tested without ranks."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path

from hpc_train.errors import BadFileError, ExitCode
from hpc_train.experiment.config.schema import Experiment
from hpc_train.launchers.base import KeyProblem, LaunchRequest, Ranks, StartRequest
from hpc_train.launchers.local import LocalLauncher
from hpc_train.launchers.slurm.job_arrays import prepared
from hpc_train.paths import ExperimentPaths, RunPaths
from hpc_train.run.attempts import write_record
from hpc_train.run.run_status import RunStatus, read_status, write_status
from tests.run.runs import record_of
from tests.run.test_checkpoints import write_checkpoint

COMPLETING = "tests.cli.launchers:Completing"
FAILING = "tests.cli.launchers:Failing"
PICKY = "tests.cli.launchers:Picky"
INTERRUPTED = "tests.cli.launchers:Interrupted"
SAVING = "tests.cli.launchers:Saving"
QUEUEING = "tests.cli.launchers:Queueing"
QUEUE = "tests.cli.launchers:Queue"
SIZED_QUEUE = "tests.cli.launchers:SizedQueue"
BROKEN = "tests.cli.launchers:Broken"
RAISING = "tests.cli.launchers:Raising"
LEAVING = "tests.cli.launchers:Leaving"
LEAVING_AT_ONCE = "tests.cli.launchers:LeavingAtOnce"
CTRL_C = "tests.cli.launchers:CtrlC"
SCRIPTED = "tests.cli.launchers:Scripted"
REFUSING = "tests.cli.launchers:Refusing"

#: What was asked for, newest last; tests clear it.
requests: list[LaunchRequest] = []
#: What went into the queue, a list each time; and why it takes nothing.
queued: list[list[StartRequest]] = []
refusals: list[str] = []


class Completing:
    """The run does all its steps."""

    name, state, reason, exit_code = COMPLETING, "completed", None, ExitCode.DONE

    def launch(self, request: LaunchRequest, poll: Callable[[], None]) -> ExitCode:
        requests.append(request)
        status = RunStatus(state="running", step=5, total_steps=9, attempt=request.attempt)
        write_status(request.paths, status)
        row = {"attempt": request.attempt, "split": "val", "step": 5, "loss": 0.5, "accuracy": 0.75}
        with request.paths.metrics.open("a") as file:
            file.write(json.dumps(row) + "\n")
        poll()
        attempt = request.paths.attempt(request.attempt)
        record = record_of(attempt)
        record = replace(record, launcher=self.name, devices=request.devices)
        write_record(attempt, record.ended([int(self.exit_code)], self.reason))
        write_status(request.paths, replace(status, state=self.state, reason=self.reason))
        return self.exit_code


class Failing(Completing):
    """The run breaks."""

    name, state, reason, exit_code = FAILING, "failed", "rank 0: it broke", ExitCode.FAILED


class Picky:
    """Runs with an even seed break."""

    def launch(self, request: LaunchRequest, poll: Callable[[], None]) -> ExitCode:
        kind = Completing if request.experiment.seed % 2 else Failing
        return kind().launch(request, poll)


class Interrupted(Completing):
    """Somebody presses Ctrl-C."""

    name, state, reason, exit_code = INTERRUPTED, "interrupted", None, ExitCode.INTERRUPTED


class Saving(Interrupted):
    """Somebody presses Ctrl-C once; the ranks save."""

    name = SAVING

    def launch(self, request: LaunchRequest, poll: Callable[[], None]) -> ExitCode:
        write_checkpoint(request.paths, 5 + request.attempt, request.attempt)
        return super().launch(request, poll)


class Queueing:
    """Hands the attempt to somebody else, who begins with it later."""

    def launch(self, request: LaunchRequest, poll: Callable[[], None]) -> ExitCode:
        requests.append(request)
        return ExitCode.DONE


class Queue:
    """A scheduler that takes all and starts nothing; tests read ``queued``, and may have it refuse."""

    title, is_queue = "a queue", True

    def problems(self, experiment: Experiment) -> list[KeyProblem]:
        return []

    def choose_devices(self, experiment: Experiment, devices: int | None) -> int | None:
        return devices

    def ranks(self, experiment: Experiment, devices: int | None) -> Ranks:
        return Ranks(devices, devices, devices)

    def scripts(self, folder: ExperimentPaths, runs: Sequence[StartRequest]) -> list[str]:
        return [f"#!/bin/bash\n# {len(runs)} runs\n"]

    def submitting(self, folder: ExperimentPaths) -> AbstractContextManager[None]:
        return nullcontext()

    def is_unsubmitted(self, paths: RunPaths) -> bool:
        return (paths.folder / "unsubmitted").exists()

    def start(self, folder: ExperimentPaths, runs: Sequence[StartRequest]) -> ExitCode:
        with prepared(runs):
            if refusals:
                raise BadFileError(refusals)
            queued.append(list(runs))
            for run in runs:
                write_status(run.paths, replace(read_status(run.paths), state="pending", reason=None))
        return ExitCode.DONE

    def status(self, runs: Sequence[RunPaths], *, is_fresh: bool = False) -> list[RunStatus]:
        return [read_status(paths) for paths in runs]

    def cancel(self, runs: Sequence[RunPaths]) -> list[RunPaths]:
        for paths in runs:
            write_status(paths, replace(read_status(paths), state="cancelled"))
        return []

    def output(self, paths: RunPaths) -> Path | None:
        return None


class SizedQueue(Queue):
    """Its jobs have 3 ranks on each of up to 2 nodes."""

    def ranks(self, experiment: Experiment, devices: int | None) -> Ranks:
        return Ranks(6, 3, 3, gpu_hours=1.5)


class Broken:
    """Says that it went wrong, and writes nothing."""

    def launch(self, request: LaunchRequest, poll: Callable[[], None]) -> ExitCode:
        return ExitCode.FAILED


class Raising:
    """Can't be constructed."""

    def __init__(self) -> None:
        raise KeyError("site")


class Leaving:
    """Ends the process as though all were well."""

    def launch(self, request: LaunchRequest, poll: Callable[[], None]) -> ExitCode:
        sys.exit(0)


class LeavingAtOnce:
    def __init__(self) -> None:
        sys.exit(0)


class CtrlC:
    """Somebody presses Ctrl-C before the launcher heeds it."""

    def launch(self, request: LaunchRequest, poll: Callable[[], None]) -> ExitCode:
        signal.raise_signal(signal.SIGINT)
        return ExitCode.DONE


_SCRIPT = """
import os, sys, time
from pathlib import Path
from hpc_train.paths import RunPaths
from hpc_train.run.run_status import RunStatus, write_status
from hpc_train.rank import signals
flag = signals.install()
run = RunPaths(Path(sys.argv[1]))
attempt = int(os.environ["HPC_TRAIN_ATTEMPT"])
write_status(run, RunStatus("running", 1, 9, attempt=attempt))
(run.folder / "ready").touch()
limit = time.monotonic() + 600
while not flag and not (run.folder / "go").exists() and time.monotonic() < limit:
    time.sleep(0.01)
if not flag:
    write_status(run, RunStatus("completed", 9, 9, attempt=attempt))
(run.folder / "saved").touch()
sys.exit(75 if flag else 0)
"""


class Scripted:
    """The local launcher, its rank a script: no torch, so that it starts at once.

    It is ``ready``, completes once there is ``go``, and saves when asked to stop.
    """

    def launch(self, request: LaunchRequest, poll: Callable[[], None]) -> ExitCode:
        command = [sys.executable, "-c", _SCRIPT, str(request.paths.folder)]
        return LocalLauncher(command).launch(replace(request, devices=1), poll)


_REFUSAL = """
import os, sys
from pathlib import Path
from hpc_train.paths import RunPaths
from hpc_train.run.attempts import tell_end, tell_error
attempt = RunPaths(Path(sys.argv[1])).attempt(int(os.environ["HPC_TRAIN_ATTEMPT"]))
tell_error(attempt, 0, "model.name: this model can't be cut")
tell_end(attempt, 0, 65)
sys.exit(65)
"""


class Refusing:
    """The local launcher, its rank refuses the file before a first step."""

    def launch(self, request: LaunchRequest, poll: Callable[[], None]) -> ExitCode:
        requests.append(request)
        command = [sys.executable, "-c", _REFUSAL, str(request.paths.folder)]
        return LocalLauncher(command).launch(replace(request, devices=1), poll)
