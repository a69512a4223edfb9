"""``FollowingLauncher``: runs that a command starts one by one and follows, here or by a plug-in."""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from hpc_train.console import say
from hpc_train.errors import ExitCode, TryAgainError, UserError
from hpc_train.launchers.base import AttemptLauncher, KeyProblem, LaunchRequest, Ranks, StartRequest
from hpc_train.launchers.notifications import notify_end
from hpc_train.paths import ExperimentPaths, RunPaths
from hpc_train.recovery import budgets
from hpc_train.recovery.diagnosis import one_line, ranks_with_own_errors
from hpc_train.recovery.history import current_status, effective_recovery, records
from hpc_train.registry import refusing_exit
from hpc_train.run import run_status, stage_order
from hpc_train.run.attempts import AttemptRecord, claim_exactly, exit_codes, read_record
from hpc_train.run.files import read_json, write_json
from hpc_train.run.find import run_name
from hpc_train.run.liveness import SILENT_LIMIT_S, lives, minutes, newest_record, silent_s
from hpc_train.run.processes import Process
from hpc_train.run.resource_limits import usable_cpus
from hpc_train.run.run_status import GOING_ON, INTERRUPTED, RunStatus, read_status, write_status
from hpc_train.run.trust import check_run

if TYPE_CHECKING:
    from hpc_train.experiment.config.schema import Job

LOCAL = "local"
#: For ranks of this machine to save and exit; after that they are killed. Assumed.
_SAVE_LIMIT_S = 120.0
_KILL_LIMIT_S = 30.0
_POLL_S = 0.05


@dataclass
class FollowingLauncher:
    """A ``Launcher`` over the ``AttemptLauncher`` of this name; only starting runs needs the plug-in."""

    name: str
    plugin: AttemptLauncher | None = None
    is_queue = False

    @property
    def title(self) -> str:
        """The launcher's name, as in ``--launcher``."""
        return self.name

    def problems(self, experiment: Job) -> list[KeyProblem]:
        """Return []: these launchers need no key of the file."""
        return []

    def choose_devices(self, experiment: Job, devices: int | None) -> int | None:
        """Return the plug-in's choice; ``devices`` if it makes none."""
        choose = getattr(self.plugin, "choose_devices", None)
        return choose(devices, experiment) if choose else devices

    def ranks(self, experiment: Job, devices: int | None) -> Ranks:
        """Return ``devices`` ranks; GPU-hours are unknown on GPUs: nothing limits how long a run takes."""
        if experiment.device == "cpu":
            cores = len(usable_cpus())
            return Ranks(devices, devices, devices, gpu_hours=0.0, gpus=0, cores=cores)
        gpus = devices if experiment.device == "cuda" else None
        return Ranks(devices, devices, devices, gpus=gpus)

    def scripts(self, folder: ExperimentPaths, runs: Sequence[StartRequest]) -> list[str]:
        """Return []: ranks are started without batch scripts."""
        return []

    @contextmanager
    def submitting(self, folder: ExperimentPaths) -> Iterator[None]:
        """Needs no lock: if several commands start a run, only the command that claims its attempt does."""
        yield

    def is_unsubmitted(self, paths: RunPaths) -> bool:
        """Return False: there is no queue."""
        return False

    def start(self, folder: ExperimentPaths, runs: Sequence[StartRequest]) -> ExitCode:
        """Claim the run's next attempt and pass it to the plug-in; return how it ended.

        Changes to the run happen after the claim, so that a command that comes too late changes nothing.
        Raises TryAgainError in that case, or if a stage waits for another run; UntrustedError if another user
        could have written the run's files.
        """
        from hpc_train.run.create import effective_experiment  # the schema, which `status` does without

        (run,) = runs
        paths, number = run.paths, run.after + 1
        assert self.plugin is not None, "loaded to start runs"
        check_run(paths)
        stage_order.check_may_begin(paths)
        if not claim_exactly(paths, number, self.name):
            name = run_name(paths)
            raise TryAgainError(f"{name}: another command has just started it; see `hpc-train status`")
        try:
            run.prepare(number)
            stage_order.note_weights(paths)
            facts = read_json(paths.run)
            if facts is not None and facts.get("launcher") != self.name:
                write_json(paths.run, facts | {"launcher": self.name}, sync=True)
            paths.cancelled.unlink(missing_ok=True)
            code = self._launched(run, number, effective_experiment(paths, number))
            while code != ExitCode.DONE and (again := _restart_words(paths, run.after + 1, number)):
                if not claim_exactly(paths, number + 1, self.name, in_place=True):
                    break
                number += 1
                say(again)
                code = self._launched(run, number, effective_experiment(paths, number))
        except BaseException as error:
            notify_end(paths, say, _write_end(paths, number, *_reason(error)))
            raise
        ended = None
        if code != ExitCode.DONE:
            is_stopped = code in {ExitCode.INTERRUPTED, ExitCode.TRY_AGAIN}
            state = INTERRUPTED if is_stopped else "failed"
            ended = _write_end(paths, number, state, f"launcher {self.name}: exit code {int(code)}")
        notify_end(paths, say, ended)
        return code

    def _launched(self, run: StartRequest, number: int, experiment: Job) -> ExitCode:
        """Pass a claimed attempt to the plug-in; return how it ended."""
        assert self.plugin is not None
        paths = run.paths
        write_status(paths, replace(read_status(paths), state="pending", attempt=number, reason=None))
        request = LaunchRequest(paths, experiment, number, run.devices)
        with refusing_exit(f"--launcher: {self.name!r}: launch()"), run.polling(paths, number) as poll:
            return self.plugin.launch(request, poll=poll)

    def status(self, runs: Sequence[RunPaths], *, is_fresh: bool = False) -> list[RunStatus]:
        """Return the status by folders and processes; nothing is cached, so ``is_fresh`` has no effect."""
        return [current_status(paths) for paths in runs]

    def cancel(self, runs: Sequence[RunPaths]) -> list[RunPaths]:
        """Have ranks save and exit, then kill the rest; return runs that must be cancelled elsewhere."""
        return [paths for paths in runs if not _cancel(paths)]

    def output(self, paths: RunPaths) -> Path | None:
        """Return None: only ranks write output."""
        return None


def _restart_words(paths: RunPaths, first: int, newest: int) -> str | None:
    """Return the message that another attempt follows the crash of the newest one; None if none does.

    ``first``: this command's first attempt. Without ``restart: in_place``, none follows an exception of a
    rank, which may be a mistake in the user's code, nor an attempt that saved no new checkpoint.
    """
    ended = [record for record in records(paths) if first <= record.attempt <= newest]
    if not ended or ended[-1].attempt != newest or paths.cancelled.exists():
        return None
    limits = effective_recovery(paths, newest)
    if not budgets.may_stay(ended, limits):
        return None
    attempt = paths.attempt(newest)
    own_errors = ranks_with_own_errors(attempt.files_of_ranks(".error"), exit_codes(attempt))
    has_raised = ended[-1].cause == "crash" and own_errors
    if limits.restart != "in_place" and (has_raised or not budgets.has_progressed(ended[-1])):
        return None
    decision = budgets.decide(ended, limits)
    return f"{decision.reason}; attempt {newest + 1} follows" if decision.comes_back else None


def _write_end(paths: RunPaths, number: int, state: str, reason: str) -> RunStatus | None:
    """Write how the attempt ended, unless its launcher or its ranks have; return the run's status."""
    status = None
    with suppress(OSError):  # the disk that broke it, maybe; that is reported already
        status = read_status(paths)
        if status.attempt == number and status.state in {"pending", "running"}:
            status = replace(status, state=state, reason=one_line(reason))
            write_status(paths, status)
    return status


def _reason(error: BaseException) -> tuple[str, str]:
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED, run_status.STOPPED_BY_CTRL_C
    return "failed", str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"


def _cancel(paths: RunPaths) -> bool:
    """Cancel a run whose ranks, if any, belong to a process; False if it is on another machine."""
    if read_status(paths).state not in GOING_ON:
        return True
    record = newest_record(paths)
    if record is not None and (elsewhere := _elsewhere(paths, record)):
        say(f"{run_name(paths)}: {elsewhere}")
        return False
    run_status.mark_cancelled(paths)  # first, so that the launcher knows why its ranks end
    if record is not None and record.end is None:
        say(f"{run_name(paths)}: its ranks save a checkpoint and end")
        if not _end_by(signal.SIGTERM, paths, record.attempt, _SAVE_LIMIT_S):
            _end_by(signal.SIGKILL, paths, record.attempt, _KILL_LIMIT_S)
    run_status.write_cancelled(paths)
    return True


def _elsewhere(paths: RunPaths, record: AttemptRecord) -> str | None:
    if record.launcher not in {None, LOCAL}:
        return f"launcher {record.launcher} has it and can't be asked to end it; end it there"
    process = record.launcher_process
    if process is None or lives(paths, record) is not None:
        return None
    seen = f"last sign of life {minutes(silent_s(paths, record))} ago"
    return (
        f"runs on {process.host} ({seen}), which is not this machine ({socket.gethostname()}) or container; "
        f"cancel it there, or here once it has been silent for {minutes(SILENT_LIMIT_S)}"
    )


def _end_by(number: int, paths: RunPaths, attempt: int, limit_s: float) -> bool:
    """Send the signal to each rank, once it is there; return whether the attempt has ended in time."""
    deadline, signalled = time.monotonic() + limit_s, set[Process]()
    while time.monotonic() < deadline:
        record = read_record(paths.attempt(attempt))
        if record is None or lives(paths, record) is False:
            return True
        for rank in set(record.rank_processes) - signalled:
            rank.send(number, paths.folder, attempt)
            signalled.add(rank)
        time.sleep(_POLL_S)
    return False
