"""A run as faults see it: its folder, its ranks' processes, and how it continues after an attempt's end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from hpc_train.paths import RunPaths
from hpc_train.run.attempts import AttemptRecord, newest_number, read_record
from tests.end_to_end.holding import Hold
from tests.end_to_end.runs import found_runs, only_run, start, write_experiment
from tests.faults.shim import Shim
from tests.waiting import came_true

LIMIT_S = 400.0
#: Until its first step a rank that is asked to stop leaves at once, and the others lose it.
HELD_ROW = 2


class Run(Protocol):
    """A run that is being disturbed."""

    paths: RunPaths
    #: None where its ranks run without.
    shim: Shim | None
    #: Holds each attempt after its first step, until a fault is to strike it.
    hold: Hold

    def attempt(self) -> int:
        """Return the number of the running attempt, or the one that ended last."""
        ...

    def ranks(self) -> dict[int, int]:
        """Return the processes of the newest attempt's ranks that live, by rank."""
        ...

    def is_over(self, attempt: int) -> bool:
        """Return True if an attempt has ended."""
        ...

    def go_on(self, attempt: int, **environment: str) -> None:
        """See the attempt after ``attempt`` begin, a local run's with more variables."""
        ...

    def account(self) -> str:
        """Return what there is to say of it, for a failed test's message."""
        ...


def wait(condition: Callable[[], bool], what: Callable[[], str] | str, limit_s: float = LIMIT_S) -> None:
    if not came_true(condition, limit_s):
        raise AssertionError(f"not within {limit_s:g} s: {what if isinstance(what, str) else what()}")


def step_of(paths: RunPaths, attempt: int) -> int:
    """Return the newest step that this attempt has written a row of; 0 before its first."""
    with suppress(FileNotFoundError), paths.metrics.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - 4096))
        for line in reversed(file.read().decode(errors="replace").splitlines()):
            with suppress(ValueError, KeyError):
                row = json.loads(line)
                if row["split"] == "train":
                    return int(row["step"]) if row["attempt"] == attempt else 0
    return 0


def living_processes(paths: RunPaths) -> list[int]:
    """Return the processes of this machine that work for the run, as command line or environment say."""
    words = {os.fsencode(paths.folder), f"HPC_TRAIN_RUN_FOLDER={paths.folder}".encode()}
    found = []
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            if entry.name.isdigit() and int(entry.name) != os.getpid():
                said = (entry / "cmdline").read_bytes() + b"\0" + (entry / "environ").read_bytes()
                found += [int(entry.name)] if words & set(said.split(b"\0")) else []
    return found


def signal_to(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


class LocalRun:
    """A run on this machine: ``submit --local``, and ``resume`` after each end."""

    def __init__(
        self,
        folder: Path,
        text: str,
        *overrides: str,
        shim: Shim | None = None,
        **environment: str,
    ) -> None:
        self.shim: Shim | None = shim
        self.hold = Hold(folder, 1)
        self.hold.at(1, since_row=2)
        self._environment = {
            "HPC_TRAIN_RUNS": str(folder / "runs"),
            **(shim.environment() if shim is not None else {}),
            **environment,
        }
        experiment = write_experiment(folder, text)
        where = ("--local", "--devices", "2")
        stays = "recovery.restart=requeue"  # each end is seen, and `resume` follows
        self.process = self._start("submit", experiment, *overrides, stays, self.hold.override, *where)
        self.output = ""
        wait(lambda: bool(found_runs(folder)) or self.process.poll() is not None, "the run's folder")
        assert self.process.poll() is None, self.process.communicate()[1]
        self.paths = only_run(folder)

    def _start(self, *words: str | Path) -> subprocess.Popen[str]:
        return start(*words, **self._environment)

    def attempt(self) -> int:
        return newest_number(self.paths)

    def record(self) -> AttemptRecord | None:
        return read_record(self.paths.attempt(self.attempt()))

    def ranks(self) -> dict[int, int]:
        record = self.record()
        processes = enumerate(record.rank_processes if record else [])
        return {rank: process.pid for rank, process in processes if process.is_alive()}

    def is_over(self, attempt: int) -> bool:
        return self.process.poll() is not None

    def code(self) -> int:
        """Return the exit code of the command, which has ended, and keep what it said."""
        if not self.process.stdout or not self.process.stdout.closed:
            self.output = "\n".join(self.process.communicate(timeout=LIMIT_S))
        assert self.process.returncode is not None
        return self.process.returncode

    def go_on(self, attempt: int, **environment: str) -> None:
        self.code()
        self._environment |= environment
        self.process = self._start("resume", self.paths.folder)
        wait(lambda: self.attempt() > attempt or self.is_over(attempt), "an attempt after resume")
        assert self.attempt() > attempt, self.account()

    def account(self) -> str:
        if self.process.poll() is not None:
            self.code()
        logs = [log for each in self.paths.attempt_folders() for log in logs_of(each.folder)]
        files = [self.paths.status, *logs]
        return "\n".join([self.output, *(f"== {file}\n{file.read_text()[-2000:]}" for file in files)])


def logs_of(folder: Path) -> list[Path]:
    return [path for path in sorted(folder.glob("*")) if path.is_file() and path.stat().st_size]
