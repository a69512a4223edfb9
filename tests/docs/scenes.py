"""What a page's ``# once …`` comments say has happened, brought about on the test cluster and waited for."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from hpc_train.paths import RunPaths
from hpc_train.run.run_status import read_status
from tests import warm
from tests.slurm.cluster import Cluster
from tests.slurm.configuration import NODES
from tests.slurm.experiments import account
from tests.slurm.processes import of_jobs
from tests.slurm.runs import preempt
from tests.waiting import HANG_LIMIT_S, came_true

LIMIT_S = HANG_LIMIT_S
_ENDED = {"completed", "failed", "cancelled"}


class Stage:
    """One session's cluster and folder."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self._cluster = cluster
        self._folder = folder
        self._rival: str | None = None
        self._held: list[int] = []

    def wait_until(self, moment: str) -> None:
        """Bring it about, and wait for it. Raises KeyError for a moment that no page has had before."""
        moments: dict[str, Callable[[], None]] = {
            "once it trains": self._train,
            "once a job of higher priority has taken the nodes": self._preempt,
            "once the nodes are free again": self._free,
            "once all runs have ended": lambda: self._wait(lambda run: run["state"] in _ENDED, all),
        }
        moments[moment]()

    def go_on(self) -> None:
        """Let ranks continue that were stopped for the previous command."""
        for pid in self._held:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        self._held = []

    def account(self) -> str:
        """Return what the session's run folders tell: for a failed test's message."""
        return "\n".join(account(paths) for paths in self._folders())

    def _train(self) -> None:
        """Wait for a step, and hold the ranks: a page's run takes seconds, as does a command."""
        assert came_true(self._is_training, LIMIT_S), self.account()
        self._hold()

    def _hold(self) -> None:
        self._held = [pid for pid in of_jobs(self._cluster.conf) if "submitit" in _command(pid)]
        for pid in self._held:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)

    def _preempt(self) -> None:
        """Take all nodes, so that what was preempted waits.

        Ranks are held until Slurm signals them: a page's run would end before.
        """
        self._train()
        self._rival = preempt(self._cluster, NODES)
        assert came_true(lambda: not all(map(_is_stopped, self._held)), LIMIT_S), self.account()
        self.go_on()
        self._wait(lambda run: run["state"] == "requeued")

    def _free(self) -> None:
        assert self._rival is not None, "nobody has taken the nodes"
        self._cluster.run("scancel", self._rival)
        self._wait(lambda run: run["state"] == "running" and run["attempt"] > 1)
        self._hold()

    def _wait(
        self, is_so: Callable[[dict[str, Any]], bool], of: Callable[[Iterable[bool]], bool] = any
    ) -> None:
        """Wait until ``status`` shows it for any (or ``all``) runs; it is asked once the folders say so."""

        def has_come() -> bool:
            for runs_of in (self._files, self._runs):
                if not of(map(is_so, runs := runs_of())):
                    assert any(run["state"] not in _ENDED for run in runs), f"{runs}\n{self.account()}"
                    return False
            return True

        assert came_true(has_come, LIMIT_S), self.account()

    def _files(self) -> list[dict[str, Any]]:
        return [read_status(paths).to_json() for paths in self._folders()]

    def _is_training(self) -> bool:
        """Read the folders: what a command shows is over by the time it ends.

        A rank that is told to stop in the first step, which others may have done, saves nothing.
        """
        for paths in self._folders():
            with suppress(OSError):
                status = json.loads(paths.status.read_text())
                if status["state"] == "running" and status["step"] > 1:
                    return True
        return False

    def _folders(self) -> list[RunPaths]:
        return [RunPaths(path.parent) for path in self._folder.glob("runs/*/[!.]*/run.json")]

    def _runs(self) -> list[dict[str, Any]]:
        process = warm.start(
            [sys.executable, "-m", "hpc_train", "status", "--json"],
            cwd=self._folder,
            env={name: value for name, value in os.environ.items() if name != "HPC_TRAIN_RUNS"},
            stdout=subprocess.PIPE,
            text=True,
        )
        output, _ = process.communicate()
        assert process.returncode == 0, self.account()
        runs: list[dict[str, Any]] = json.loads(output)["runs"]
        return runs


def _is_stopped(pid: int) -> bool:
    """Return True if the process is stopped by SIGSTOP; Slurm sends SIGCONT before SIGTERM."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0] == "T"
    return False


def _command(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace")
    return ""
