"""Entry point of a rank: executes the run's workload and ends with the exit code that it returns."""

from __future__ import annotations

import ctypes
import gc
import importlib
import os
import select
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from hpc_train.errors import ExitCode, UsageError, UserError
from hpc_train.paths import RunPaths
from hpc_train.rank import signals
from hpc_train.run.attempts import tell_end, tell_error
from hpc_train.run.files import open_regular, read_json
from hpc_train.run.processes import ATTEMPT_VARIABLE, FOLDER_VARIABLE, end_daemons, keep_exit_statuses
from hpc_train.run.resource_limits import explained, prepare_rank
from hpc_train.run.tracebacks import refusal

__all__ = ["ATTEMPT_VARIABLE", "FOLDER_VARIABLE", "TOKEN_VARIABLE", "Entry"]

#: Distinguishes this attempt's rendezvous from an older one; set by the launcher.
TOKEN_VARIABLE = "HPC_TRAIN_TOKEN"
#: Set in a rank that is started before its attempt: the folder in which it reports that it waits.
STANDBY_VARIABLE = "HPC_TRAIN_STANDBY"


#: ``workload`` of ``run.json`` → the module whose ``run(paths, attempt)`` a rank executes. This is the only
#: way from launchers into training, which imports torch.
_MODULES = {"training": "hpc_train.training.main", "program": "hpc_train.workloads.supervisor"}


@dataclass(frozen=True)
class Entry:
    """One rank of the attempt that the environment names; picklable, since submitit calls it."""

    folder: Path

    def __call__(self) -> NoReturn:
        """Run the rank and end the process with its exit code.

        It does not return: submitit would exit with code 0 and pickle the returned value. It skips Python's
        teardown, in which gloo's threads sometimes abort.
        """
        keep_exit_statuses()
        prepare_rank()
        signals.block()  # until the worker handles them; the launcher has already blocked them if it could
        try:
            code = self._run(attempt_number(os.environ.get(ATTEMPT_VARIABLE)))
        except UserError as error:
            with suppress(OSError):
                print(error, file=sys.stderr)
            code = int(error.exit_code)
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError):  # a full disk has no room for the log; the exit code is unaffected
                stream.flush()
        end_daemons()
        os._exit(code)

    def _run(self, number: int) -> int:
        paths, rank = RunPaths(self.folder), rank_number()
        try:
            code = int(_imported(paths).run(paths, number))
        except BaseException as error:  # the worker catches all errors: this environment can't import it
            limited = refusal(error)
            code = int(ExitCode.ENVIRONMENT if limited else ExitCode.FAILED)
            text = limited or explained(traceback.format_exc())
            with suppress(OSError):
                print(text, file=sys.stderr)
            with suppress(OSError):
                tell_error(paths.attempt(number), rank, text)
        if code != ExitCode.TRY_AGAIN or rank == 0:  # if all were asked to stop, one report is enough
            tell_end(paths.attempt(number), rank, code, os.environ.get("SLURMD_NODENAME"))
        return code


def _imported(paths: RunPaths) -> Any:
    facts = read_json(paths.run) or {}
    with _without_collecting():
        return importlib.import_module(_MODULES[facts.get("workload", "training")])


@contextmanager
def _without_collecting() -> Iterator[None]:
    """Disable the cyclic garbage collector while torch is imported, then freeze the objects it allocated."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def rank_number() -> int:
    """Return this process's rank without asking whether all its variables fit together."""
    text = os.environ.get("RANK") or os.environ.get("SLURM_PROCID") or "0"
    return int(text) if text.isdecimal() else 0


def attempt_number(text: str | None) -> int:
    """Parse the environment variable's value. Raises UsageError if it is missing or not a number."""
    if text is None or not text.isdecimal():
        raise UsageError(
            f"{ATTEMPT_VARIABLE}: {text!r} is no attempt's number; start ranks with hpc-train submit"
        )
    return int(text)


def wait_on_standby(paths: RunPaths, folder: Path) -> None:
    """Import the workload and wait for the token of the attempt, a line on standard input; open its log.

    Ends the process at the end of the input, or at a stop signal that comes before the token: ``rank.py`` has
    blocked these signals, so later ones are left to the rank.
    """
    module, number = _imported(paths), attempt_number(os.environ.get(ATTEMPT_VARIABLE))
    if hasattr(module, "import_parts"):
        module.import_parts(paths, number)
    ready = folder / f"rank-{rank_number()}"
    ready.touch()
    mask = sum(1 << (number - 1) for number in signals.STOP_SIGNALS).to_bytes(128, "little")
    stops = ctypes.CDLL(None).signalfd(-1, mask, os.O_CLOEXEC)
    line = b""
    while not line.endswith(b"\n"):
        if 0 not in select.select([0, stops], [], [])[0] or not (part := os.read(0, 1000)):
            os._exit(0)
        line += part
    os.close(stops)
    ready.unlink()
    os.environ[TOKEN_VARIABLE] = line.decode().strip()
    os.environ["HPC_TRAIN_RANK_START"] = repr(time.time())
    del os.environ[STANDBY_VARIABLE]
    _redirect(paths.attempt(number).log(rank_number()))
    print(f"attempt {number} begins in process {os.getpid()}, which was on standby")


def _redirect(path: Path) -> None:
    """Redirect output to the rank's log, if possible, and input from /dev/null, as ``rank.py`` does."""
    try:
        with open_regular(path, "ab") as log, Path(os.devnull).open("rb") as nothing:
            os.fchmod(log.fileno(), 0o600)
            os.dup2(nothing.fileno(), 0)
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
    except (OSError, UserError) as error:
        print(f"no log of its own, continuing without: {error!r}", file=sys.stderr)


if __name__ == "__main__":
    run = RunPaths(Path(sys.argv[1]))
    if STANDBY_VARIABLE in os.environ:
        wait_on_standby(run, Path(os.environ[STANDBY_VARIABLE]))
    Entry(run.folder)()
