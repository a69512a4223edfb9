"""One rank of a run whose workload is a program: starts the program, follows it, and tells how it ended.

``launchers.entry`` calls ``run`` on each rank. Rank 0 prepares the working folder and publishes the address
at which the programs meet. Each supervisor passes on stop signals, and leaves once the programs of all ranks
have ended, so that none is killed because another one was faster. Imports no torch.
"""

from __future__ import annotations

import math
import os
import shlex
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from hpc_train.errors import ExitCode, HpcTrainError, TryAgainError, UserError, counted
from hpc_train.experiment.config.schema import Program
from hpc_train.paths import AttemptPaths, RunPaths
from hpc_train.rank import network, signals
from hpc_train.rank.env import RankFacts, node_name
from hpc_train.recovery.bad_nodes import lost_a_peer
from hpc_train.run import files, processes, tracebacks
from hpc_train.run.attempts import EventLog, newest_number, tell_error
from hpc_train.run.create import effective_experiment
from hpc_train.run.run_status import RunStatus, read_status, try_status, write_status
from hpc_train.workloads.program_command import ProgramStart, Rendezvous
from hpc_train.workloads.program_metrics import ProgramMetrics, recover_rows
from hpc_train.workloads.working_folder import make_working_folder

_POLL_S = 0.05
#: From the stop signal to SIGKILL, for a program that ignores it, if nothing else ends it.
_STOP_LIMIT_S = 60.0
#: Set by the batch script: the seconds from SIGTERM to Slurm's SIGKILL.
_GRACE_VARIABLE = "HPC_TRAIN_GRACE_S"
#: Before Slurm's SIGKILL, to record the end: at most this, at most half of the grace. Assumed.
_RESERVE_S = 5.0
#: For the program's processes to print their stacks.
_STACKS_S = 10.0
#: For rank 0 to prepare the working folder.
_PREPARE_LIMIT_S = 300.0
_HEARTBEAT_S = 30.0
#: From a signal to the program to the same one to its supervisor. Assumed.
_SIGNAL_S = 1.0
#: The same after the program has handled the signal and exited. Shorter, since it delays each normal end of
#: a program that handles SIGTERM. Assumed.
_HANDLED_SIGNAL_S = 0.25
_STATUS_S = 1.0
_TAIL_BYTES = 1 << 14
#: The beginning of this module's lines in the log.
_OWN_LINE = "hpc-train: "


def run(paths: RunPaths, attempt: int) -> ExitCode:
    """Run one rank of one attempt to its end; return the exit code of this process. Never raises."""
    flag = signals.install()
    facts = RankFacts()
    try:
        facts = RankFacts.from_environment(os.environ)
        job = effective_experiment(paths, attempt)
        assert isinstance(job, Program), "run.json names this workload"
        return _Supervisor(paths, attempt, job, facts, flag).run()
    except TryAgainError:
        return ExitCode.TRY_AGAIN
    except BaseException as error:
        text = str(error) if isinstance(error, HpcTrainError) else traceback.format_exc()
        print(text, file=sys.stderr, flush=True)
        with suppress(OSError):
            tell_error(paths.attempt(attempt), facts.rank, text)
        return error.exit_code if isinstance(error, HpcTrainError) else ExitCode.FAILED


class _Supervisor:
    def __init__(
        self, paths: RunPaths, attempt: int, job: Program, facts: RankFacts, flag: signals.StopFlag
    ) -> None:
        self._paths, self._number, self._job, self._facts, self._flag = paths, attempt, job, facts, flag
        self._attempt: AttemptPaths = paths.attempt(attempt)
        self._events = EventLog(self._attempt) if facts.rank == 0 else None
        self._metrics: ProgramMetrics | None = None
        self._heartbeat_at = self._status_at = self._looked_at = self._awake_at = 0.0
        self._shown_step = 0
        #: When this rank's program last sent a message or touched its file, and the file's time then.
        self._message_at: float | None = None
        self._message_time = 0.0
        #: The program, and processes of loggers.
        self._children: set[int] = set()
        self._catches_stop = False
        #: The launcher with which this process would have died, without ending the program's processes.
        self._launcher = processes.outlive_parent()

    def run(self) -> ExitCode:
        """Return the exit code of this rank."""
        meeting = self._prepare() if self._facts.rank == 0 else self._await_meeting()
        per, facts = self._job.program.per, self._facts
        if per == "rank" or (per == "node" and facts.local_rank == 0) or facts.rank == 0:
            code = self._follow(meeting)
            if code != ExitCode.DONE:
                return code
        files.write_text(self._attempt.ended(self._facts.rank), "")
        return self._await_others()

    def _prepare(self) -> Rendezvous:
        """Make the working folder and publish the meeting. Rank 0 only."""
        assert self._events is not None
        self._events.note("rank")
        self._write_status("running")
        folder = make_working_folder(self._paths, self._job.program)
        listener, hosts = network.listen(os.environ, self._facts.num_nodes, 1)
        with listener:  # the program's first rank takes the port after this
            meeting = Rendezvous(hosts[0], listener.getsockname()[1], str(folder))
        files.write_json(self._attempt.program, {"version": 1, **meeting._asdict()})
        return meeting

    def _await_meeting(self) -> Rendezvous:
        deadline = time.monotonic() + _PREPARE_LIMIT_S
        while (published := files.read_json(self._attempt.program)) is None:
            self._leave_if_stopped()
            if time.monotonic() > deadline:
                raise HpcTrainError(f"rank 0 has not prepared {self._paths.work} in {_PREPARE_LIMIT_S:g} s")
            time.sleep(_POLL_S)
        return Rendezvous(published["address"], published["port"], published["folder"])

    def _leave_if_stopped(self) -> None:
        self._die_with_launcher()
        if self._flag:
            self._note_signal()
            raise TryAgainError("a stop was requested before the program started")

    # The program.

    def _follow(self, meeting: Rendezvous) -> ExitCode:
        folder, resume = Path(meeting.folder), self._job.program.resume
        resumes = resume is not None and any(folder.glob(resume.if_exists))
        start = ProgramStart(self._job, self._paths, self._number, self._facts, meeting, resumes)
        command = start.command()
        if self._facts.rank == 0:
            recover_rows(self._job, self._paths, self._number, folder)
            self._metrics = ProgramMetrics(self._job, self._paths, self._number, folder)
        self._leave_if_stopped()
        print(f"{_OWN_LINE}attempt {self._number}: {shlex.join(command)}", flush=True)
        processes.adopt_orphans()
        try:
            child = self._start(command, folder, start.environment())
        except OSError as error:
            raise UserError(f"program.command: {command[0]}: {error.strerror or error}") from error
        if self._events is not None:
            self._events.note("first_step")  # from here on a stop counts as a preemption of a run that works
        if self._metrics is not None:
            self._metrics.read_output(child)
            self._metrics.start_loggers()
        self._children = {child.pid, *processes.logger_processes()}
        state = "failed"
        try:
            code = self._judge(self._wait(child))
            state = {ExitCode.DONE: "completed", ExitCode.TRY_AGAIN: "requeued"}.get(code, state)
        finally:
            if self._metrics is not None:
                self._metrics.close(state)
        return code

    def _start(
        self, command: Sequence[str], folder: Path, environment: Mapping[str, str]
    ) -> subprocess.Popen[bytes]:
        piped = self._metrics is not None and self._metrics.reads_output
        return subprocess.Popen(
            command,
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE if piped else None,
            stderr=subprocess.STDOUT if piped else None,
            preexec_fn=_prepare(os.getpid()),  # noqa: PLW1509 (no thread has been started)
        )

    def _wait(self, child: subprocess.Popen[bytes]) -> int:
        """Return the program's exit code; pass on a stop, and end a program that makes no progress.

        After a stop the processes below a shell may still save when it has ended.
        """
        kill_at: float | None = None
        while not _has_ended(child) or (kill_at is not None and processes.program_processes()):
            self._beat()
            processes.reap_orphans(self._children)
            if self._flag and kill_at is None:
                limit_s = self._stop_limit_s()
                kill_at = time.monotonic() + limit_s
                self._note_signal()
                self._stop(child)
            elif kill_at is not None and time.monotonic() > kill_at:
                print(f"hpc-train: the program has not ended {limit_s:g} s after SIGTERM: killed", flush=True)
                child.kill()
                child.wait()
                break
            elif self._is_hung():
                self._end_hung(child)
            time.sleep(_POLL_S)
        handles_stop = processes.handles(child.pid, signal.SIGTERM)  # also of an ended one until child.wait()
        code = child.wait()
        if kill_at is None:
            self._judge_stop(code, handles_stop=handles_stop)
        self._finish()
        return code

    def _judge_stop(self, code: int, *, handles_stop: bool) -> None:
        """Find out whether a stop signal that this process has not passed on has ended the program.

        Slurm signals all processes of a job, one after the other: the signal to this process may follow.
        """
        is_killed = _signal_of(code) in signals.STOP_SIGNALS
        may_have_handled = handles_stop and not (code == 0 and self._attempt.files_of_ranks(".session"))
        if not is_killed and not may_have_handled:
            return
        deadline = time.monotonic() + (_SIGNAL_S if is_killed else _HANDLED_SIGNAL_S)
        while not self._flag and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        if self._flag:
            self._catches_stop = handles_stop
            self._note_signal()

    def _stop(self, child: subprocess.Popen[bytes]) -> None:
        """Send SIGTERM to the program; of a shell, to the commands that handle it, and not to ``tee``."""
        commands = processes.awaited_commands(child.pid)
        handling = [pid for pid in commands if processes.handles(pid, signal.SIGTERM)]
        self._catches_stop = bool(handling) or processes.handles(child.pid, signal.SIGTERM)
        for pid in handling or commands or [child.pid]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)

    def _finish(self) -> None:
        """End the processes that the program has left behind, then read its last rows."""
        if left := processes.end_program_processes(self._children):
            print(f"hpc-train: the program has left {counted(left, 'process')} behind: ended", flush=True)
        if self._metrics is not None:
            self._metrics.finish()  # without those processes its output has an end
            self._write_status("running")

    def _stop_limit_s(self) -> float:
        """Return the seconds from SIGTERM to SIGKILL: a bit less than the launcher grants."""
        if (limit_s := self._job.program.kill_after_s) is not None:
            return limit_s
        if "SLURM_JOB_ID" not in os.environ:
            return _STOP_LIMIT_S
        granted_s = _number(_GRACE_VARIABLE)
        if self._flag.first == signal.SIGUSR2:
            end = _number("SLURM_JOB_END_TIME")
            granted_s = None if end is None else end - time.time()
        # Without a known time, Slurm ends the program.
        return math.inf if granted_s is None else granted_s - min(_RESERVE_S, granted_s / 2)

    def _end_hung(self, child: subprocess.Popen[bytes]) -> NoReturn:
        """Have all processes of the program print their stacks, and end them. Raises _HungError."""
        for pid in processes.program_processes():
            with suppress(OSError):
                os.kill(pid, signal.SIGABRT)
        deadline = time.monotonic() + _STACKS_S
        while child.poll() is None and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        self._finish()
        minutes = self._job.recovery.hang_after_min
        limit = f"for {minutes:g} min (recovery.hang_after_min)"
        raise _HungError(f"no progress {limit}; the log has the program's stacks")

    def _is_hung(self) -> bool:
        """Return True if the program has shown progress before, and none for longer than the file allows."""
        at = time.monotonic()
        if at - self._looked_at > _HEARTBEAT_S:  # this process was not running: its job was suspended
            self._awake_at = at
        self._looked_at = at
        logs = [self._attempt.session(self._facts.rank)]
        if self._job.program.per != "rank":  # it numbers the ranks that it starts by itself
            logs = list(self._attempt.files_of_ranks(".session").values())
        with suppress(OSError):
            written = max((log.stat().st_mtime for log in logs), default=self._message_time)
            if written != self._message_time:
                self._message_at, self._message_time = at, written
        shown = [self._message_at, None if self._metrics is None else self._metrics.newest_at]
        newest = max((at for at in shown if at is not None), default=None)
        quiet_s = 0.0 if newest is None else at - max(newest, self._awake_at)
        return quiet_s > self._job.recovery.hang_after_min * 60 and not self._flag

    def _judge(self, code: int) -> ExitCode:
        """Return this rank's exit code for the program's."""
        if code == 0:
            return ExitCode.TRY_AGAIN if self._has_stopped() else ExitCode.DONE
        if self._flag:
            return ExitCode.TRY_AGAIN
        tell_error(self._attempt, self._facts.rank, self._error_text(code))
        return ExitCode.FAILED

    def _has_stopped(self) -> bool:
        """Return True if the program has ended early with exit code 0, because it was asked to.

        Either ``session.should_stop`` was true, or a program without a session has handled SIGTERM by itself.
        """
        if self._attempt.files_of_ranks(".session"):
            return has_stopped(self._attempt)
        return self._catches_stop

    def _error_text(self, code: int) -> str:
        if number := _signal_of(code):
            how = "was" if code < 0 else f"ended with exit code {code}:"
            return f"the program {how} killed by {number.name}"
        text = tracebacks.RANK_PREFIX.sub(
            "", files.tail_text(self._attempt.log(self._facts.rank), _TAIL_BYTES)
        )
        if error := tracebacks.printed_error(text, self._paths.work, lost_a_peer):
            return error
        printed = [line for line in text.splitlines() if line.strip() and not line.startswith(_OWN_LINE)]
        last = printed[-1] if printed else "it printed nothing"
        return f"the program ended with exit code {code}: {last}"

    # The other ranks, the run's files.

    def _await_others(self) -> ExitCode:
        """Wait until the programs of all ranks have ended; a launcher ends this process if one fails."""
        missing = set(range(self._facts.world_size))
        while missing := {rank for rank in missing if not self._attempt.ended(rank).exists()}:
            self._beat()
            if self._flag:
                self._note_signal()
                return ExitCode.TRY_AGAIN
            time.sleep(_POLL_S)
        if self._facts.rank == 0:
            self._write_status("completed")
        return ExitCode.DONE

    def _die_with_launcher(self) -> None:
        """End the program and this process as if the kernel had killed both with the launcher."""
        if self._launcher is not None and os.getppid() != self._launcher:
            processes.end_program_processes(self._children)
            os.kill(os.getpid(), signal.SIGKILL)

    def _beat(self) -> None:
        self._die_with_launcher()
        at = time.monotonic()
        if self._facts.local_rank == 0 and at - self._heartbeat_at >= _HEARTBEAT_S:
            self._heartbeat_at = at
            with suppress(OSError):
                files.write_json(self._attempt.heartbeat(node_name(os.environ)), {"version": 1, "ranks": {}})
        if self._metrics is not None and at - self._status_at >= _STATUS_S:
            self._status_at = at
            self._metrics.poll()
            if self._metrics.step != self._shown_step:
                self._shown_step = self._metrics.step
                self._write_status("running")

    def _note_signal(self) -> None:
        """Record the request to stop; srun sends the same signal to all ranks after one has failed."""
        if self._attempt.files_of_ranks(".error"):
            return
        if self._events is not None and self._flag.first is not None and self._flag.first_at is not None:
            self._events.signalled(self._flag.first.name, self._flag.first_at)
            self._events.note("agreed")

    def _write_status(self, state: str) -> None:
        if newest_number(self._paths) != self._number or (self._paths.cancelled.exists()):
            return
        status: RunStatus = read_status(self._paths)
        step, total = status.step, status.total_steps
        if self._metrics is not None:
            step, total = self._metrics.step or step, self._metrics.total_steps or total
        best, reason = status.best, None
        if self._metrics is not None:
            best = self._metrics.best or best
            if state == "completed":
                reason = self._metrics.end_reason
                if reason is None and self._metrics.is_short:
                    reason = f"exit code 0, but its last progress was step {step} of {total}"
        status = RunStatus(state, step, total, status.epoch, self._number, reason, best=best)
        if state == "completed":
            write_status(self._paths, status)
            return
        with suppress(OSError):
            try_status(self._paths, status)


def has_stopped(attempt: AttemptPaths) -> bool:
    """Return True if a rank's program has ended because ``session.should_stop`` was true."""
    logs = attempt.files_of_ranks(".session").values()
    lines = (line for path in logs for line in files.tail_text(path, _TAIL_BYTES).splitlines())
    return any(line.startswith('["stopping", ') for line in lines)


def _prepare(supervisor: int) -> Callable[[], None]:
    """Return the function that the program's process calls before exec."""

    def prepare() -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, signals.STOP_SIGNALS)
        processes.die_with(supervisor)

    return prepare


def _has_ended(child: subprocess.Popen[bytes]) -> bool:
    """Return True if the program has ended; the kernel keeps its signal handlers until ``child.wait``."""
    return os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


class _HungError(HpcTrainError):
    """The program makes no progress."""

    exit_code = ExitCode.HUNG


def _signal_of(code: int) -> signal.Signals | None:
    """Return the signal that ended a process, or the program of a shell, by the exit code."""
    with suppress(ValueError):
        return signal.Signals(-code if code < 0 else code - 128)
    return None


def _number(variable: str) -> float | None:
    """Return the value of an environment variable that is a positive number, else None."""
    text = os.environ.get(variable, "")
    return float(text) if text.isdecimal() and int(text) else None
