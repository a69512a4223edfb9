"""An attempt's ranks as processes of this machine: started, signalled, ended."""

from __future__ import annotations

import ctypes
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from hpc_train.launchers.entry import ATTEMPT_VARIABLE, FOLDER_VARIABLE, TOKEN_VARIABLE
from hpc_train.package_path import path_variables
from hpc_train.paths import RunPaths
from hpc_train.rank import signals
from hpc_train.rank.env import THREADS_BY_SHARE
from hpc_train.run.code.snapshot import check_owner, check_whole, linked, search_path
from hpc_train.run.files import open_regular
from hpc_train.run.processes import Process, descendants, end_program, exit_code, start_in_own_session
from hpc_train.run.resource_limits import usable_cpus
from hpc_train.run.storage_errors import named_errors

_PR_SET_PDEATHSIG = 1
#: Set by a job, an agent or another rank inside which this launcher runs.
_STALE_PREFIXES = ("SLURM_", "TORCHELASTIC_", "PMI_", "ROLE_")
_STALE = {
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "MASTER_ADDR",
    "MASTER_PORT",
}  # fmt: skip


@dataclass
class RankProcess:
    """One rank. ``exit_code`` is negative if a signal ended it; None while it runs."""

    rank: int
    popen: subprocess.Popen[bytes]
    exit_code: int | None = None
    #: It was still running when the launcher signalled it to stop.
    was_asked: bool = False


class RankProcesses:
    """All ranks of an attempt. ``ended`` lists them in the order in which they were seen to end."""

    def __init__(
        self,
        paths: RunPaths,
        attempt: int,
        num_ranks: int,
        command: Sequence[str],
        variables: Mapping[str, str] | None = None,
        *,
        has_terminal: bool = False,
    ) -> None:
        self._run, self._attempt = paths.folder, attempt
        self.ended: list[RankProcess] = []
        self._all: list[RankProcess] = []
        if (code := linked(paths)) is not None:
            check_owner(code)
            check_whole(code)
        environment = {**common_environment(os.environ, paths, attempt, num_ranks), **(variables or {})}
        try:
            for rank in range(num_ranks):
                variables_of_rank = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                log = paths.attempt(attempt).log(rank)
                popen = _start(command, environment | variables_of_rank, log, has_terminal=has_terminal)
                self._all.append(RankProcess(rank, popen))
        except BaseException:
            self.kill()
            raise

    def identities(self) -> list[Process]:
        """Return the processes of the running ranks."""
        return [process for rank in self._all if (process := Process.of(rank.popen.pid))]

    @property
    def are_running(self) -> bool:
        """Whether a rank had not ended at the last ``collect``."""
        return len(self.ended) < len(self._all)

    def collect(self) -> None:
        """Note which ranks have ended since the last call."""
        for rank in self._running():
            rank.exit_code = exit_code(rank.popen)
            if rank.exit_code is not None:
                self.ended.append(rank)

    def exit_codes(self) -> list[int]:
        """Return them by rank; all must have ended."""
        codes = [rank.exit_code for rank in self._all]
        assert all(code is not None for code in codes), "ranks are still running"
        return [code for code in codes if code is not None]

    def terminate(self) -> None:
        """Signal the running ranks to stop."""
        for rank in self._running():
            rank.popen.terminate()  # not sent if it has ended
            rank.was_asked = rank.popen.returncode is None

    def kill(self) -> None:
        """Kill the running ranks and the processes below them; return once the ranks have ended."""
        running = self._running()
        below = [pid for rank in running for pid in descendants(rank.popen.pid)]  # torchrun's lead own groups
        for rank in running:
            with suppress(ProcessLookupError):
                os.killpg(rank.popen.pid, signal.SIGKILL)
        for pid in below:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        for rank in self._running():
            exit_code(rank.popen, block=True)
        self.collect()
        end_program(self._run, self._attempt)  # of a rank that was killed alone

    def _running(self) -> list[RankProcess]:
        return [rank for rank in self._all if rank.exit_code is None]


def common_environment(
    environ: Mapping[str, str], paths: RunPaths, attempt: int, num_ranks: int
) -> dict[str, str]:
    """Return the environment common to all ranks; RANK and LOCAL_RANK are added."""
    names = [name for name in environ if name not in _STALE and not name.startswith(_STALE_PREFIXES)]
    environment = {name: environ[name] for name in names}
    threads = {"OMP_NUM_THREADS": str(max(1, len(usable_cpus()) // num_ranks)), THREADS_BY_SHARE: "1"}
    defaults = {
        "TORCHINDUCTOR_CACHE_DIR": str(paths.cache / "inductor"),
        "TRITON_CACHE_DIR": str(paths.cache / "triton"),
    }
    return (
        defaults
        | ({} if "OMP_NUM_THREADS" in environment else threads)
        | environment
        | _import_places(environ, paths)
        | {
            "WORLD_SIZE": str(num_ranks),
            "LOCAL_WORLD_SIZE": str(num_ranks),
            ATTEMPT_VARIABLE: str(attempt),
            FOLDER_VARIABLE: str(paths.folder.absolute()),
            TOKEN_VARIABLE: secrets.token_hex(16),
            "PYTHONUNBUFFERED": "1",
        }
    )


def _import_places(environ: Mapping[str, str], paths: RunPaths) -> dict[str, str]:
    """Return the variables with which ranks import the run's snapshot of the code, else the current folder.
    With a snapshot the current folder is excluded, since its changes are not part of the run.
    """
    here, code = Path.cwd(), search_path(paths)
    inherited = [place for place in environ.get("PYTHONPATH", "").split(os.pathsep) if place]
    if not code:
        return _before(path_variables([str(here)]), inherited)
    return _before(
        path_variables(code), [place for place in inherited if Path(place).resolve() != here.resolve()]
    )


def _before(variables: Mapping[str, str], inherited: Sequence[str]) -> dict[str, str]:
    """Return the variables with the inherited entries of ``PYTHONPATH`` after their own."""
    places = filter(None, (variables["PYTHONPATH"], *inherited))
    return {**variables, "PYTHONPATH": os.pathsep.join(places)}


def _start(
    command: Sequence[str], environment: Mapping[str, str], log: Path, *, has_terminal: bool
) -> subprocess.Popen[bytes]:
    with named_errors(log):
        output = open_regular(log, "ab")
    with output:
        return start_in_own_session(  # a terminal's Ctrl-C reaches the launcher only
            command,
            env=environment,
            stdin=None if has_terminal else subprocess.DEVNULL,
            stdout=None if has_terminal else output,
            stderr=output,
            preexec_fn=_die_with(os.getpid()),
        )


def _die_with(launcher: int) -> Callable[[], None]:
    """Return a function for a rank between fork and exec: it ends with the launcher, signals blocked."""
    libc = ctypes.CDLL(None)  # loaded before the fork: afterwards a lock may be held forever

    def prepare() -> None:
        signals.block()
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != launcher:  # it died before prctl
            os._exit(1)

    return prepare


def default_command(paths: RunPaths) -> list[str]:
    """Return the command that starts a rank of the run."""
    return [sys.executable, "-m", "hpc_train.launchers.entry", str(paths.folder)]
