"""A run on a test cluster: what Slurm is made to do to it, and how it continues."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any

import psutil

from hpc_train.paths import RunPaths
from hpc_train.run.attempts import AttemptRecord, newest_number, read_record
from hpc_train.run.run_status import read_status
from tests.end_to_end.holding import Hold
from tests.end_to_end.runs import Done, hpc_train, write_experiment
from tests.faults.runs import HELD_ROW, wait
from tests.faults.shim import Shim
from tests.slurm.cluster import Cluster
from tests.slurm.experiments import ENVIRONMENT, account, job_of, ranks_of
from tests.slurm.runs import field, preempt


class SlurmRun:
    """Submitted to ``cluster``, under ``runs``, where a submission's snapshot of the code is shared."""

    shim: Shim | None = None

    def __init__(
        self,
        cluster: Cluster,
        folder: Path,
        text: str,
        *overrides: str,
        pace_s: float = 0.0,
        runs: Path | None = None,
        environment: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.cluster = cluster
        self.hold = Hold(folder, 1)
        self.hold.at(1, since_row=HELD_ROW)
        own = {"HPC_TRAIN_RUNS": str(runs or folder / "runs"), "PACED_TRAIN_S": str(pace_s)}
        self._environment = ENVIRONMENT | own | cluster.environment | dict(environment)
        held = self.hold.program_override if "\nprogram:" in text else self.hold.override
        words = (*overrides, held, "--json")
        done = self._command("submit", write_experiment(folder, text), *words)
        assert done.code == 0, done.err
        self.paths = submitted(done)

    def _command(self, *words: str | Path) -> Done:
        return hpc_train(*words, **self._environment)

    def attempt(self) -> int:
        return newest_number(self.paths)

    def record(self) -> AttemptRecord:
        record = read_record(self.paths.attempt(self.attempt()))
        assert record is not None, self.account()
        return record

    def ranks(self) -> dict[int, int]:
        environments = self._rank_environments()
        # A loader process is a fork of its rank, with the same environment.
        own = {pid for pid in environments if psutil.Process(pid).ppid() not in environments}
        return {int(words["SLURM_PROCID"]): pid for pid, words in environments.items() if pid in own}

    def ranks_of_node(self, number: int) -> list[int]:
        """Return the ranks on one of the run's nodes, the first one being 0."""
        host = self.record().hosts[number]
        found = self._rank_environments().values()
        return sorted(int(words["SLURM_PROCID"]) for words in found if words["SLURMD_NODENAME"] == host)

    def is_over(self, attempt: int) -> bool:
        if self.attempt() > attempt:
            return True
        record = read_record(self.paths.attempt(attempt))
        return record is not None and record.end is not None

    def go_on(self, attempt: int, **environment: str) -> None:
        assert not environment, "the job has its environment from its submission"
        wait(lambda: self.attempt() > attempt or self._has_failed(), self.account)
        assert self.attempt() > attempt, self.account()

    def resume(self) -> None:
        """Resume a run that has failed, as its owner does."""
        done = self._command("resume", self.paths.folder)
        assert done.code == 0, done.err

    def standing(self) -> dict[str, Any]:
        """Return the run as ``status --json`` shows it."""
        done = self._command("status", "--json", self.paths.folder)
        assert done.code == 0, done.err
        (run,) = json.loads(done.out)["runs"]
        return dict(run)

    def account(self) -> str:
        return account(self.paths)

    def preempt(self) -> Callable[[], None]:
        """Take the run's nodes; return what gives them back."""
        job = preempt(self.cluster, self.record().hosts)
        return lambda: str(self.cluster.run("scancel", job)) and None

    def requeue(self) -> None:
        """Requeue the job by hand, and spare it the two minutes that Slurm lets it wait."""
        attempt = self.attempt()
        self.cluster.run("scontrol", "requeue", job_of(self.paths))
        self._start_soon(attempt)

    def shorten_time_limit(self) -> Callable[[], None]:
        """Let the job reach its time limit as soon as Slurm can; return what lengthens it again.

        Slurm compares every half a minute, and signals jobs that end within the lead and half a minute.
        """
        job, now = f"JobId={job_of(self.paths)}", datetime.now()
        started = datetime.fromisoformat(field(self.cluster, job_of(self.paths), "StartTime"))
        minutes = 1 + int((now - started).total_seconds() + 35) // 60
        before = field(self.cluster, job_of(self.paths), "TimeLimit")

        def change(limit: str) -> None:
            refusals: list[str] = []

            def is_changed() -> bool:
                try:
                    self.cluster.run("scontrol", "update", job, f"TimeLimit={limit}")
                except RuntimeError as error:
                    refusals.append(str(error))
                    return False
                return True

            # Refused while slurmctld waits for the job's index in the database.
            wait(is_changed, lambda: refusals[-1])

        change(str(minutes))
        return lambda: change(before)

    def kill_node(self, number: int, *, with_ranks: bool, only_slurmd: bool = False) -> Callable[[], None]:
        """Kill a node's daemons and see Slurm give it up; return what brings it back."""
        attempt, host = self.attempt(), self.record().hosts[number]
        if only_slurmd:
            self.cluster.kill(f"slurmd-{host}", by=signal.SIGTERM)
        else:
            self.cluster.kill_node(host, with_jobs=with_ranks)
        if with_ranks:  # the ranks of other nodes are to notice
            self.hold.at(1, since_attempt=attempt + 1, since_row=HELD_ROW)
        try:
            self._start_soon(attempt)
            # Not before the next attempt has begun: Slurm sends the end of this start to the node once it is
            # back (22.05), and it would end the next one there. Ranks that live are held until then.
            wait(lambda: self.attempt() > attempt or self._has_failed(), self.account)
        except AssertionError:
            self.cluster.start_node(host)
            raise
        return lambda: self.cluster.start_node(host)

    def _start_soon(self, attempt: int) -> None:
        def is_pending() -> bool:
            shown = self.cluster.run("squeue", "-h", "-j", job_of(self.paths), "-o", "%T", check=False)
            return shown.strip() == "PENDING" or self.attempt() > attempt or self._has_failed()

        wait(is_pending, self.account)
        # Refused where it runs already, which is as well. Not at once: a job that starts again in the second
        # in which it ended is failed for good by its node.
        job = f"JobId={job_of(self.paths)}"
        self.cluster.run("scontrol", "update", job, "StartTime=now+5", check=False)

    def _has_failed(self) -> bool:
        return read_status(self.paths).state in {"failed", "cancelled"}

    def _rank_environments(self) -> dict[int, dict[str, str]]:
        """Return the environments of the newest attempt's ranks by process."""
        found = {}
        for pid in ranks_of(self.paths, attempt=self.attempt()):
            with suppress(OSError):
                variables = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
                environment = dict(line.split("=", 1) for line in variables if "=" in line)
                if "SLURM_PROCID" in environment:
                    found[pid] = environment
        return found


def submitted(done: Done) -> RunPaths:
    """Return the one run that ``submit --json`` tells of."""
    (run,) = json.loads(done.out)["runs"]
    return RunPaths(Path(run["path"]))
