"""One rank of a run whose workload is a program: starts the program, follows it, and tells how it ended.

``launchers.entry`` calls ``run`` on each rank. Rank 0 prepares the working folder and publishes the address
at which the programs meet. Each supervisor passes on stop signals, and leaves once the programs of all ranks
have ended, so that none is killed because another one was faster. Imports no torch.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from hpc_train.errors import ExitCode, HpcTrainError, TryAgainError, UserError
from hpc_train.experiment.config.program_section import ProgramConfig
from hpc_train.experiment.config.schema import Program
from hpc_train.paths import AttemptPaths, RunPaths
from hpc_train.rank import signals
from hpc_train.rank.env import RankFacts, node_name
from hpc_train.rank.network import listen
from hpc_train.run import working_folder
from hpc_train.run.attempts import EventLog, newest_number, tell_error
from hpc_train.run.create import effective_experiment
from hpc_train.run.files import read_json, tail_text, write_json, write_text
from hpc_train.run.processes import ATTEMPT_VARIABLE, FOLDER_VARIABLE, die_with
from hpc_train.run.run_status import RunStatus, read_status, try_status, write_status
from hpc_train.workloads.program_metrics import ProgramMetrics

_POLL_S = 0.05
#: From the stop signal to SIGKILL, for a program that ignores it.
STOP_LIMIT_S = 60.0
#: For rank 0 to prepare the working folder.
_PREPARE_LIMIT_S = 300.0
_HEARTBEAT_S = 30.0
#: From a signal to the program to the same one to its supervisor. Assumed.
_SIGNAL_S = 1.0
_STATUS_S = 1.0
_TAIL_BYTES = 1 << 14
_TRACEBACK = "Traceback (most recent call last):"
#: Variables of the supervisor's own Python.
_OWN_VARIABLES = ("PYTHONSAFEPATH", "PYTHONUNBUFFERED", "HPC_TRAIN_TOKEN", "HPC_TRAIN_THREADS_BY_SHARE")


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


class _Meeting(NamedTuple):
    """Where the programs of an attempt meet, and the folder in which they start."""

    address: str
    port: int
    folder: str


class _Supervisor:
    def __init__(
        self, paths: RunPaths, attempt: int, job: Program, facts: RankFacts, flag: signals.StopFlag
    ) -> None:
        self._paths, self._number, self._job, self._facts, self._flag = paths, attempt, job, facts, flag
        self._attempt: AttemptPaths = paths.attempt(attempt)
        self._events = EventLog(self._attempt) if facts.rank == 0 else None
        self._metrics: ProgramMetrics | None = None
        self._heartbeat_at = self._status_at = 0.0
        self._shown_step = 0
        #: When this rank's program last sent a message or touched its file, and the file's time then.
        self._message_at: float | None = None
        self._message_time = 0.0

    def run(self) -> ExitCode:
        """Return the exit code of this rank."""
        meeting = self._prepare() if self._facts.rank == 0 else self._await_meeting()
        if self._starts_program():
            code = self._follow(meeting)
            if code != ExitCode.DONE:
                return code
        write_text(self._attempt.ended(self._facts.rank), "")
        return self._await_others()

    def _starts_program(self) -> bool:
        per, facts = self._job.program.per, self._facts
        return per == "rank" or (per == "node" and facts.local_rank == 0) or facts.rank == 0

    def _prepare(self) -> _Meeting:
        """Make the working folder and publish the meeting. Rank 0 only."""
        assert self._events is not None
        self._events.note("rank")
        self._write_status("running")
        folder = working_folder.make(self._paths, self._job.program.outputs)
        listener, hosts = listen(os.environ, self._facts.num_nodes, 1)
        with listener:  # the program's first rank takes the port after this
            meeting = _Meeting(hosts[0], listener.getsockname()[1], str(folder))
        write_json(self._attempt.program, {"version": 1, **meeting._asdict()})
        return meeting

    def _await_meeting(self) -> _Meeting:
        deadline = time.monotonic() + _PREPARE_LIMIT_S
        while (published := read_json(self._attempt.program)) is None:
            self._leave_if_stopped()
            if time.monotonic() > deadline:
                raise HpcTrainError(f"rank 0 has not prepared {self._paths.work} in {_PREPARE_LIMIT_S:g} s")
            time.sleep(_POLL_S)
        return _Meeting(published["address"], published["port"], published["folder"])

    def _leave_if_stopped(self) -> None:
        if self._flag:
            self._note_signal()
            raise TryAgainError("a stop was requested before the program started")

    # The program.

    def _follow(self, meeting: _Meeting) -> ExitCode:
        program, folder = self._job.program, Path(meeting.folder)
        values = self._values(meeting)
        resumes = program.resume is not None and any(folder.glob(program.resume.if_exists))
        command = command_of(program, values, resumes=resumes)
        if self._facts.rank == 0:
            self._metrics = ProgramMetrics(program.metrics, self._paths, self._number, folder)
        self._leave_if_stopped()
        print(f"hpc-train: attempt {self._number}: {' '.join(command)}", flush=True)
        try:
            child = self._start(command, folder, meeting, values, resumes=resumes)
        except OSError as error:
            raise UserError(f"program.command: {command[0]}: {error.strerror or error}") from error
        if self._events is not None:
            self._events.note("first_step")  # from here on a stop counts as a preemption of a run that works
        if self._metrics is not None:
            self._metrics.read_output(child)
        return self._judge(self._wait(child))

    def _start(
        self, command: list[str], folder: Path, meeting: _Meeting, values: Mapping[str, str], *, resumes: bool
    ) -> subprocess.Popen[bytes]:
        piped = self._metrics is not None and self._metrics.reads_output
        return subprocess.Popen(
            command,
            cwd=folder,
            env=self._environment(meeting, values, resumes=resumes),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE if piped else None,
            stderr=subprocess.STDOUT if piped else None,
            preexec_fn=_prepare(os.getpid()),  # noqa: PLW1509 (no thread has been started)
        )

    def _values(self, meeting: _Meeting) -> dict[str, str]:
        facts = self._facts
        values = {
            "run": str(self._paths.folder.absolute()),
            "name": self._job.name,
            "seed": self._job.seed,
            "attempt": self._number,
            "nodes": facts.num_nodes,
            "node_rank": facts.node,
            "ranks": facts.world_size,
            "ranks_per_node": facts.local_world_size,
            "master_addr": meeting.address,
            "master_port": meeting.port,
        }
        return {name: str(value) for name, value in values.items()}

    def _environment(self, meeting: _Meeting, values: Mapping[str, str], *, resumes: bool) -> dict[str, str]:
        facts, program = self._facts, self._job.program
        environment = {name: value for name, value in os.environ.items() if name not in _OWN_VARIABLES}
        ranks: dict[str, Any] = {
            "RANK": facts.rank,
            "LOCAL_RANK": facts.local_rank,
            "WORLD_SIZE": facts.world_size,
            "LOCAL_WORLD_SIZE": facts.local_world_size,
        }
        for name in ranks:
            environment.pop(name, None)
        nodes: dict[str, Any] = {
            "GROUP_RANK": facts.node,
            "NODE_RANK": facts.node,
            "GROUP_WORLD_SIZE": facts.num_nodes,
            "MASTER_ADDR": meeting.address,
            "MASTER_PORT": meeting.port,
        }
        wandb_id = (read_json(self._paths.run) or {}).get("wandb_id")
        environment |= {"WANDB_RUN_ID": str(wandb_id), "WANDB_RESUME": "allow"} if wandb_id else {}
        session = {
            FOLDER_VARIABLE: self._paths.folder.absolute(),
            ATTEMPT_VARIABLE: self._number,
            "HPC_TRAIN_RUN": self._paths.folder.absolute(),
            "HPC_TRAIN_RESUME": int(resumes),
            "PYTHONFAULTHANDLER": 1,  # SIGABRT prints the stacks
        }
        shared = session | nodes | (ranks if program.per == "rank" else {})
        environment |= {name: str(value) for name, value in shared.items()}
        environment.setdefault("PYTHONUNBUFFERED", "1")
        return environment | {name: text.format_map(values) for name, text in program.env.items()}

    def _wait(self, child: subprocess.Popen[bytes]) -> int:
        """Return the program's exit code; pass on a stop, and end a program that makes no progress."""
        stopped_at: float | None = None
        while (code := child.poll()) is None:
            self._beat()
            if self._flag and stopped_at is None:
                stopped_at = time.monotonic()
                self._note_signal()
                child.terminate()
            elif stopped_at is not None and time.monotonic() > stopped_at + STOP_LIMIT_S:
                print(f"hpc-train: the program has not ended {STOP_LIMIT_S:g} s after SIGTERM", flush=True)
                child.kill()
                child.wait()
            elif self._is_hung():
                child.send_signal(signal.SIGABRT)
                with suppress(subprocess.TimeoutExpired):
                    child.wait(10)
                child.kill()
                child.wait()
                if self._metrics is not None:
                    self._metrics.finish()  # copies the stacks to the log
                minutes = self._job.recovery.hang_after_min
                limit = f"for {minutes:g} min (recovery.hang_after_min)"
                raise _HungError(f"no progress {limit}; the log has the program's stacks")
            time.sleep(_POLL_S)
        if self._metrics is not None:
            self._metrics.finish()
            self._write_status("running")
        _end_group()
        return code

    def _is_hung(self) -> bool:
        """Return True if the program has shown progress before, and none for longer than the file allows."""
        with suppress(OSError):
            written = self._attempt.session(self._facts.rank).stat().st_mtime
            if written != self._message_time:
                self._message_at, self._message_time = time.monotonic(), written
        shown = [self._message_at, None if self._metrics is None else self._metrics.newest_at]
        newest = max((at for at in shown if at is not None), default=None)
        limit_s = self._job.recovery.hang_after_min * 60
        return newest is not None and time.monotonic() - newest > limit_s and not self._flag

    def _judge(self, code: int) -> ExitCode:
        """Return this rank's exit code for the program's."""
        if code == 0:
            return ExitCode.TRY_AGAIN if self._has_stopped() else ExitCode.DONE
        if -code in signals.STOP_SIGNALS and not self._flag:
            time.sleep(_SIGNAL_S)  # Slurm signals all processes of a job, one after the other
        if self._flag or code == ExitCode.TRY_AGAIN:
            return ExitCode.TRY_AGAIN
        tell_error(self._attempt, self._facts.rank, self._error_text(code))
        return ExitCode.FAILED

    def _has_stopped(self) -> bool:
        """Return True if the program has ended because ``session.should_stop`` was true."""
        logs = self._attempt.files_of_ranks(".session").values()
        return any('"stopping"' in tail_text(path, _TAIL_BYTES) for path in logs)

    def _error_text(self, code: int) -> str:
        text = tail_text(self._attempt.log(self._facts.rank), _TAIL_BYTES)
        if code < 0:
            with suppress(ValueError):
                return f"the program was killed by {signal.Signals(-code).name}"
        if (begin := text.rfind(_TRACEBACK)) >= 0:
            return text[begin:]
        last = next((line for line in reversed(text.splitlines()) if line.strip()), "it printed nothing")
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

    def _beat(self) -> None:
        at = time.monotonic()
        if self._facts.local_rank == 0 and at - self._heartbeat_at >= _HEARTBEAT_S:
            self._heartbeat_at = at
            with suppress(OSError):
                write_json(self._attempt.heartbeat(node_name(os.environ)), {"version": 1, "ranks": {}})
        if self._metrics is not None and at - self._status_at >= _STATUS_S:
            self._status_at = at
            self._metrics.poll()
            if self._metrics.step != self._shown_step:
                self._shown_step = self._metrics.step
                self._write_status("running")

    def _note_signal(self) -> None:
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
        status = replace(status, state=state, attempt=self._number, step=step, total_steps=total, reason=None)
        if state == "completed":
            write_status(self._paths, status)
            return
        with suppress(OSError):
            try_status(self._paths, status)


def _prepare(supervisor: int) -> Callable[[], None]:
    """Return the function that the program's process calls before exec."""

    def prepare() -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, signals.STOP_SIGNALS)
        die_with(supervisor)

    return prepare


class _HungError(HpcTrainError):
    """The program makes no progress."""

    exit_code = ExitCode.HUNG


def command_of(program: ProgramConfig, values: Mapping[str, str], *, resumes: bool) -> list[str]:
    """Return the command with its arguments; ``values`` replace the names in braces."""
    command = [word.format_map(values) for word in program.command]
    if command[0] == "python":
        command[0] = sys.executable
    for name, value in program.args.items():
        text = value.format_map(values) if isinstance(value, str) else value
        command += rendered(name, text, program.style)
    if resumes and program.resume is not None:
        command += [word.format_map(values) for word in program.resume.args]
    return command


def rendered(name: str, value: Any, style: str) -> list[str]:
    """Return one argument as words of a command line."""
    if style == "key=value":
        return [f"{name}={_as_hydra(value)}"]
    if value is None or value is False:
        return []
    if value is True:
        return [f"--{name}"]
    items = [_as_text(item) for item in (value if isinstance(value, list) else [value])]
    if style == "--key=value" and not isinstance(value, list):
        return [f"--{name}={items[0]}"]
    return [f"--{name}", *items]


def _as_hydra(value: Any) -> str:
    if isinstance(value, list):
        return f"[{','.join(map(_as_hydra, value))}]"
    return _as_text(value)


def _as_text(value: Any) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return str(value).lower()
        case float():
            return repr(value)
    return str(value)


def _end_group() -> None:
    """Kill processes that the program has left behind, such as a server, if this rank leads its group."""
    group = os.getpgrp()
    if group != os.getpid():
        return
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and int(entry.name) != group:
            with suppress(OSError):
                if os.getpgid(int(entry.name)) == group:
                    os.kill(int(entry.name), signal.SIGKILL)
