"""All ranks of an attempt on this machine, followed to their end (``submit --local``)."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from types import FrameType

from hpc_train.console import say, say_text
from hpc_train.errors import ExitCode, UsageError
from hpc_train.experiment.config.schema import Job
from hpc_train.launchers.base import LaunchRequest
from hpc_train.launchers.outcome import Outcome, is_failure, judge
from hpc_train.launchers.rank_processes import RankProcess, RankProcesses, default_command
from hpc_train.paths import RunPaths
from hpc_train.rank.env import count_gpus, mig_variables
from hpc_train.recovery.history import step_for_budgets
from hpc_train.run import checkpoints
from hpc_train.run.attempts import AttemptRecord, newest_number, now, read_record, write_record
from hpc_train.run.processes import Process
from hpc_train.run.run_status import RunStatus, read_status, write_status

_POLL_S = 0.05
#: From a rank's failure to the end of all: long enough for the others to write why they end. Assumed.
_FAILURE_GRACE_S = 3.0
#: From the first rank that lost a peer to the diagnosis: how long a rank may take to end after its
#: connections have closed. Assumed.
_CAUSE_GRACE_S = 2.0
#: From the first rank that has finished to the end of all: they left the last step together. Assumed.
_LEAVE_GRACE_S = 120.0
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass
class LocalLauncher:
    """``command`` is executed by each rank; None: the worker. ``variables``: added to its environment.

    ``has_terminal``: the rank, a single one, reads standard input and writes to standard output.
    """

    command: Sequence[str] | None = None
    variables: Mapping[str, str] = field(default_factory=dict)
    has_terminal: bool = False

    def launch(self, request: LaunchRequest, poll: Callable[[], None]) -> ExitCode:
        """Run the attempt to its end. Ctrl-C asks ranks to save and stop, a second one kills them.

        Signals are handled in the main thread only; in other threads it can't be interrupted.
        """
        device = request.experiment.device
        num_ranks = self.choose_devices(request.devices, request.experiment)
        record = _begin(request, num_ranks)
        command = self.command or default_command(request.paths)
        with noted_signals() as interrupts:
            variables = mig_variables(os.environ) if num_ranks > 1 and device != "cpu" else {}
            ranks = RankProcesses(
                request.paths,
                request.attempt,
                num_ranks,
                command,
                {**variables, **self.variables},
                has_terminal=self.has_terminal,
            )
            try:
                record = replace(record, rank_processes=ranks.identities())
                write_record(request.paths.attempt(request.attempt), record)
                ended = _Follower(request, ranks, interrupts).follow(poll)
            finally:
                ranks.kill()
        outcome = judge(
            request.paths.attempt(request.attempt),
            ended,
            num_ranks=num_ranks,
            interrupted_by=interrupts[0] if interrupts else None,
            is_completed=_is_completed(request),
            is_cancelled=request.paths.cancelled.exists(),
        )
        try:
            _finish(request, record, ranks, outcome)
        except OSError as error:
            say(f"{request.paths.folder}: how it ended can't be written down: {error.strerror or error}")
            return outcome.exit_code or ExitCode.IO
        return outcome.exit_code

    def choose_devices(self, devices: int | None, experiment: Job) -> int:
        """Return how many ranks ``launch`` will start. Raises UsageError if there are too few GPUs."""
        return choose_num_ranks(devices, experiment.device)


def choose_num_ranks(num_devices: int | None, device: str) -> int:
    """Return how many ranks to start for ``--devices`` (None: one per GPU, or one) and the file's ``device``.

    Raises UsageError if there are too few GPUs; with ``auto`` and no GPU ranks run on the CPU.
    """
    if num_devices is not None and num_devices < 1:
        raise UsageError(f"--devices: {num_devices} starts nothing; write 1 or more")
    num_gpus = 0 if device == "cpu" else count_gpus(os.environ)
    if num_devices is None and device == "cuda" and not num_gpus:
        raise UsageError(
            "device: cuda needs a GPU, but this machine shows none; write device=cpu or device=auto to train "
            "without, or --devices with `plan` to plan for another machine"
        )
    if num_devices is None:
        return max(1, num_gpus)
    may_share = "HPC_TRAIN_TEST_CUDA_BACKEND" in os.environ  # tests with several ranks on one GPU
    if num_devices > num_gpus and (device == "cuda" or num_gpus > 0) and not may_share:
        ranks = "1 rank needs a GPU" if num_devices == 1 else f"{num_devices} ranks need a GPU each"
        remedy = (
            f"write --devices {num_gpus} or device=cpu" if num_gpus else "write device=cpu to train without"
        )
        raise UsageError(
            f"--devices: {ranks}, but this machine shows {num_gpus or 'none'} (device: {device}); {remedy}"
        )
    return num_devices


class _Follower:
    """Watches the ranks of one attempt and ends ranks that have no reason to continue."""

    def __init__(self, request: LaunchRequest, ranks: RankProcesses, interrupts: list[int]) -> None:
        self._request = request
        self._ranks = ranks
        self._interrupts = interrupts
        self._deadline: float | None = None
        self._has_failed = False
        self._has_asked = False
        self._lost_since: float | None = None

    def follow(self, poll: Callable[[], None]) -> list[RankProcess]:
        """Wait until all ranks have ended; return the ranks that were not killed, in order of their ends."""
        while self._ranks.are_running:
            time.sleep(_POLL_S)
            with suppress(OSError):  # showing progress must not end the run
                poll()
            self._ranks.collect()
            if self._interrupts and not self._has_asked:
                self._has_asked = True
                say("stopping: the ranks save a checkpoint; Ctrl-C again ends them at once")
                self._ranks.terminate()
            self._handle_ends()
            if len(self._interrupts) > 1 or (
                self._deadline is not None and time.monotonic() > self._deadline
            ):
                by_themselves = list(self._ranks.ended)
                self._ranks.kill()
                return by_themselves
        return self._ranks.ended

    def _handle_ends(self) -> None:
        if self._has_failed or not self._ranks.ended or not self._ranks.are_running:
            return
        if all(rank.exit_code == ExitCode.PEER_LOST for rank in self._ranks.ended):
            # The peer's connections close before it has ended: it may be the cause, by its own exit code.
            self._lost_since = self._lost_since or time.monotonic()
            if time.monotonic() < self._lost_since + _CAUSE_GRACE_S:
                return
        is_completed = _is_completed(self._request)
        codes = [rank.exit_code for rank in self._ranks.ended if rank.exit_code is not None]
        self._has_failed = any(is_failure(code, is_completed) for code in codes)
        if self._has_failed:
            self._ranks.terminate()
            self._deadline = time.monotonic() + _FAILURE_GRACE_S
        elif self._deadline is None:
            self._deadline = time.monotonic() + _LEAVE_GRACE_S


@contextmanager
def noted_signals() -> Iterator[list[int]]:
    """Collect the stop signals of this process in a list instead of acting on them."""
    noted: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield noted
        return

    def note(number: int, frame: FrameType | None) -> None:
        # When a terminal closes, kernel and shell both send SIGHUP: the second never means "at once".
        if number != signal.SIGHUP or not noted:
            noted.append(number)

    # Under nohup the terminal may go. SIGINT is handled even in a script's background job, for kill -INT.
    ignores_hangup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    handled = [number for number in _STOP_SIGNALS if not (number == signal.SIGHUP and ignores_hangup)]
    before = [(number, signal.signal(number, note)) for number in handled]
    try:
        yield noted
    finally:
        for number, handler in before:
            signal.signal(number, handler)


def _begin(request: LaunchRequest, num_ranks: int) -> AttemptRecord:
    attempt = request.paths.attempt(request.attempt)
    attempt.folder.mkdir(parents=True, exist_ok=True)
    claimed = read_record(attempt)
    listed = checkpoints.listing(request.paths, request.attempt) if claimed is None else claimed.checkpoints
    record = AttemptRecord(
        attempt=request.attempt,
        start=now(),
        checkpoints=listed,
        launcher_process=Process.current(),
        launcher="local",
        hosts=[socket.gethostname()],
        ranks=num_ranks,
        devices=num_ranks,
        in_place=claimed is not None and claimed.in_place,
    )
    write_record(attempt, record)
    status = read_status(request.paths)
    write_status(request.paths, replace(status, state="pending", attempt=request.attempt, reason=None))
    return record


def _finish(request: LaunchRequest, record: AttemptRecord, ranks: RankProcesses, outcome: Outcome) -> None:
    if outcome.reason is not None:
        say_text(outcome.details)  # first, since the disk may be full for all else
        _write_end(request.paths, request.attempt, outcome)
    saved_step = step_for_budgets(request.paths, request.attempt)
    attempt = request.paths.attempt(request.attempt)
    measured = read_record(attempt) or record  # with rank 0's events
    ended = measured.ended(ranks.exit_codes(), outcome.reason)
    write_record(attempt, replace(ended, cause=outcome.cause, saved_step=saved_step))


def _write_end(paths: RunPaths, attempt: int, outcome: Outcome) -> None:
    """Write the run's state, unless another attempt has begun: this one was given up for dead."""
    if newest_number(paths) > attempt:
        return
    status = read_status(paths)
    # Ranks of a cancelled run no longer write status.json, but save before they end.
    step = max([status.step, *(saved.step for saved in checkpoints.committed(paths, attempt)[:1])])
    ended = replace(status, state=outcome.state, step=step, attempt=attempt, reason=outcome.reason)
    write_status(paths, ended)


def _is_completed(request: LaunchRequest) -> bool:
    status: RunStatus = read_status(request.paths)
    return status.state == "completed" and status.attempt == request.attempt
