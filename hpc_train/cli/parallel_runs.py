"""Concurrent runs of a sweep, each with its own launcher process: ``submit --local --jobs N``, and
``submit --here`` with several runs per job.

That process runs ``python -m hpc_train.cli.parallel_runs`` with the arguments of ``_main``.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from hpc_train.errors import ExitCode
from hpc_train.launchers.local import noted_signals
from hpc_train.package_path import PACKAGE_PARENT, with_package
from hpc_train.paths import RunPaths
from hpc_train.rank.env import THREADS_BY_SHARE, gpu_names
from hpc_train.run.processes import die_with, exit_code, start_in_own_session
from hpc_train.run.resource_limits import usable_cpus

_POLL_S = 0.1


def slot_environment(
    environ: Mapping[str, str], slot: int, jobs: int, devices: int, device: str
) -> dict[str, str]:
    """Return the environment of the run in a slot of ``jobs``: its own GPUs and its part of the cores."""
    threads = max(1, len(usable_cpus()) // (jobs * devices))
    share = {"OMP_NUM_THREADS": str(threads), THREADS_BY_SHARE: "1"}
    environment = ({} if "OMP_NUM_THREADS" in environ else share) | dict(environ)
    if names := [] if device == "cpu" else gpu_names(environ):
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(names[slot * devices : (slot + 1) * devices])
    return environment


class Slots:
    """Active runs, each in a slot; a stop signal reaches all of them and ends the queue."""

    def __init__(self, environments: Sequence[Mapping[str, str]], launcher: str, devices: int | None) -> None:
        self._environments, self._launcher, self._devices = environments, launcher, devices
        self._slots: list[subprocess.Popen[bytes] | None] = [None] * len(environments)
        self._noted: list[int] = []
        self._sent = 0
        self.codes: list[ExitCode] = []

    @property
    def is_stopped(self) -> bool:
        """Whether a stop signal came within ``taking_signals``."""
        return bool(self._noted)

    @contextmanager
    def taking_signals(self) -> Iterator[None]:
        """Forward this process's stop signals to the runs within this context."""
        with noted_signals() as self._noted:
            yield

    def start(self, paths: RunPaths, changes: Sequence[str] | None = None) -> None:
        """Start the run in a free slot. Only after ``wait_for_slot``.

        ``changes``: for a run that ended before it saved anything and starts again; None: a new run.
        """
        slot = self._slots.index(None)
        # One bar can't show several runs: they print lines.
        environment = {**self._environments[slot], "TERM": "dumb"}
        command = [sys.executable, "-m", "hpc_train.cli.parallel_runs"]
        how = ["new"] if changes is None else ["again", *changes]
        arguments = [str(paths.folder), self._launcher, str(self._devices or ""), str(os.getpid()), *how]
        self._slots[slot] = start_in_own_session(  # the terminal's Ctrl-C reaches this process only
            [*command, *arguments],
            env=with_package(environment, (PACKAGE_PARENT, str(Path.cwd()))),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )

    def wait_for_slot(self) -> None:
        """Return once a slot is free, or a stop signal came."""
        while not self.is_stopped and None not in self._slots:
            self._poll()

    def wait_for_all(self) -> None:
        """Return once all runs have ended; ``codes`` then has an exit code for each."""
        while any(self._slots):
            self._poll()

    def _poll(self) -> None:
        time.sleep(_POLL_S)
        for number in self._noted[self._sent :]:
            for running in filter(None, self._slots):
                running.send_signal(number)
            self._sent += 1
        for slot, process in enumerate(self._slots):
            if process is not None and (code := exit_code(process)) is not None:
                self._slots[slot] = None
                is_signal = code not in set(ExitCode)
                self.codes.append(ExitCode.FAILED if is_signal else ExitCode(code))


def _main(folder: str, launcher: str, devices: str, parent: str, how: str, *changes: str) -> None:
    die_with(int(parent))
    from hpc_train.cli.command_line import exit_code_of
    from hpc_train.cli.resume import start_again
    from hpc_train.cli.starting import polling, start
    from hpc_train.launchers.base import StartRequest
    from hpc_train.launchers.lookup import load_launcher
    from hpc_train.run.create import effective_experiment

    def train() -> int:
        paths, ranks = RunPaths(Path(folder)), int(devices) if devices else None
        if how == "again":
            return start_again([paths], changes, launcher, ranks)
        request = StartRequest(paths, effective_experiment(paths, 1), devices=ranks, polling=polling)
        loaded = load_launcher(launcher)
        with loaded.submitting(paths.siblings):
            return start(loaded, [request])

    sys.exit(exit_code_of(train))


if __name__ == "__main__":
    _main(*sys.argv[1:])
