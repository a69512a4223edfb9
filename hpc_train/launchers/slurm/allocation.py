"""``AllocationLauncher``: runs on the nodes of a job that the user already has (``--here``).

bash executes the same batch script as a job's, in the foreground of ``salloc`` or of the user's own script:
``begin``, the ranks by srun, ``after``, and restarts in place. Nothing is requeued, and the user's job is not
changed: only the step with the ranks is signalled.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from hpc_train.console import say, say_text
from hpc_train.errors import ExitCode, NoSchedulerError, TryAgainError, UsageError, counted
from hpc_train.launchers.base import KeyProblem, Ranks, StartRequest
from hpc_train.launchers.notifications import notify_end
from hpc_train.launchers.slurm import ALLOCATION, commands, scancel
from hpc_train.launchers.slurm import submission as steps
from hpc_train.launchers.slurm.batch_job import IN_ALLOCATION, MARK, BatchJob, gone_nodes
from hpc_train.launchers.slurm.commands import MAX_AGE_S
from hpc_train.launchers.slurm.queue import ask
from hpc_train.launchers.slurm.queue_status import SlurmBase
from hpc_train.paths import ExperimentPaths, RunPaths, SubmissionPaths
from hpc_train.recovery.diagnosis import LAUNCHER_DIED, Diagnosis, one_line, silent_for
from hpc_train.recovery.history import ended_unseen, nodes_to_exclude, saved_step
from hpc_train.run import run_status
from hpc_train.run.attempts import add_job, newest_number, noted_signal, now_ms, read_record, write_record
from hpc_train.run.files import read_json, tail_text, write_json, write_text
from hpc_train.run.find import run_name
from hpc_train.run.liveness import SILENT_LIMIT_S, newest_record, silent_s
from hpc_train.run.processes import Process, exit_code, start_in_own_session
from hpc_train.run.run_status import CANCELLED, GOING_ON, INTERRUPTED, RunStatus
from hpc_train.run.trust import check_run

if TYPE_CHECKING:
    from hpc_train.experiment.config.schema import Job
    from hpc_train.launchers.slurm.cluster_facts import Allocation
    from hpc_train.launchers.slurm.submission import Batch

_POLL_S = 0.1
#: Between two looks at the run's folder, and at Slurm's steps while the ranks are to receive a signal.
_LOOK_S, _STEP_S = 0.5, 2.0
_OUTPUT_BYTES = 1 << 16
#: From an attempt's last sign of life to its diagnosis by another process. Assumed.
_GRACE_S = 5.0
#: Variable of a command whose run trains beside others: the node of its slot.
_SLOT_NODE = "HPC_TRAIN_SLOT_NODE"
#: Causes after which the allocation, or the user, lets no further run begin.
_ENDS_SERIES = {"preemption", "time limit", "interrupted", "requeue"}


class AllocationLauncher(SlurmBase):
    """A ``Launcher`` of one run at a time, in the job of the command's own shell."""

    title, is_queue = "an allocation", False

    def __init__(self) -> None:
        self._allocation: Allocation | None = None
        self._count: int | None = None

    def use_nodes(self, count: int | None) -> None:
        """Read the allocation. Raises UsageError without one, or if it has fewer nodes."""
        from hpc_train.launchers.slurm.cluster_facts import Allocation

        self._allocation = Allocation.read(os.environ)
        have = len(self._allocation.nodes)
        if count is not None and count > have:
            raise UsageError(
                f"--nodes: {count} exceeds the {counted(have, 'node')} of job {self._allocation.job}; write "
                f"--nodes {have} or less, or omit it to use all"
            )
        self._count = count

    def problems(self, experiment: Job) -> list[KeyProblem]:
        """Return the keys of ``slurm`` that exceed the allocation."""
        from hpc_train.launchers.slurm.profiles import slurm_of

        slurm = slurm_of(experiment)
        if slurm is None:
            remedy = "write `slurm: {}` for one rank per node, or add --local to use this machine alone"
            return [KeyProblem("slurm", "is missing, so the number of ranks per node is unknown", remedy)]
        return [] if self._allocation is None else self._allocation.excesses(slurm, self._count)

    def slots(self, experiment: Job) -> list[dict[str, str]]:
        """Return the slots of ``runs_per_job`` on each node, those of different nodes first."""
        from hpc_train.launchers.slurm.profiles import slurm_of

        slurm = slurm_of(experiment)
        if slurm is None or slurm.runs_per_job == 1 or self._allocation is None:
            return []
        gone = gone_nodes(names := [node.name for node in self._allocation.nodes])
        nodes = [name for name in names if name not in gone][: self._count]
        return [{_SLOT_NODE: node} for _ in range(slurm.runs_per_job) for node in nodes]

    def ranks(self, experiment: Job, devices: int | None) -> Ranks:
        """Return the ranks on the nodes of the allocation; ``devices``: of an attempt that had as many."""
        from hpc_train.experiment.validate.slurm_rules import ranks_on_each_node
        from hpc_train.launchers.slurm import options
        from hpc_train.launchers.slurm.profiles import slurm_of

        slurm = slurm_of(experiment)
        if slurm is None:
            return Ranks(1, 1, 1, gpu_hours=0.0)
        if self._allocation is not None:
            count = self._count or len(self._allocation.nodes)
        else:
            count = max(1, (devices or 1) // ranks_on_each_node(slurm))
        return options.ranks(slurm.model_copy(update={"nodes": count, "time_limit": None}))

    def scripts(self, folder: ExperimentPaths, runs: Sequence[StartRequest]) -> list[str]:
        """Return the batch script that is executed for each run."""
        from hpc_train.launchers.slurm import script

        if self._allocation is None:
            return []
        nodes = [node.name for node in self._allocation.nodes][: self._count]
        shown = folder.submission("TOKEN")
        return [script.script_text(_batch(shown, run, self._allocation, nodes)) for run in runs]

    @contextmanager
    def submitting(self, folder: ExperimentPaths) -> Iterator[None]:
        """Needs no lock: of several commands that start a run, one claims its attempt."""
        if self._allocation is None:
            self.use_nodes(self._count)
        yield

    def is_unsubmitted(self, paths: RunPaths) -> bool:
        """Return False: there is no queue."""
        return False

    def start(self, folder: ExperimentPaths, runs: Sequence[StartRequest]) -> ExitCode:
        """Execute the run's batch script and follow it to its end; return how it ended."""
        from hpc_train.launchers.slurm import job_arrays

        (run,) = runs
        assert self._allocation is not None, "use_nodes or submitting has read it"
        paths, allocation = run.paths, self._allocation
        check_run(paths)
        nodes = self._nodes(paths, allocation)
        with steps.locked(folder):
            if newest_number(paths) != run.after:
                name = run_name(paths)
                raise TryAgainError(f"{name}: another command has just started it; see `hpc-train status`")
            with job_arrays.prepared([run]):
                submission, batch = _prepared(folder, run, allocation, nodes)
        scancel.end_step(allocation.job, paths)
        return _Follower(run, submission, batch, allocation).follow(nodes)

    def _nodes(self, paths: RunPaths, allocation: Allocation) -> list[str]:
        """Return the nodes to use: those that respond, without excluded ones if enough are left."""
        names = [node.name for node in allocation.nodes]
        if slot := os.environ.get(_SLOT_NODE):
            return [slot]
        gone, excluded = gone_nodes(names), nodes_to_exclude(paths)
        healthy = [name for name in names if name not in gone]
        good = [name for name in healthy if name not in excluded]
        count = self._count or len(good) or len(healthy)
        if count > len(healthy) or not healthy:
            raise UsageError(
                f"--nodes: {', '.join(gone)} of job {allocation.job} does not respond, so "
                f"{counted(len(healthy), 'node')} can be used; write --nodes {len(healthy) or 1} or less"
            )
        if left_out := [name for name in names if name in gone or (name in excluded and count <= len(good))]:
            say(f"{run_name(paths)}: without {', '.join(left_out)}, which failed or does not respond")
        return (good if count <= len(good) else healthy)[:count]

    def status(self, runs: Sequence[RunPaths], *, is_fresh: bool = False) -> list[RunStatus]:
        """Return the status by folders, processes and, if those are of another machine, by Slurm."""
        return [_status(paths, 0.0 if is_fresh else MAX_AGE_S) for paths in runs]

    def cancel(self, runs: Sequence[RunPaths]) -> list[RunPaths]:
        """Have ranks save and end, then kill the rest; the user's job continues. Returns []."""
        for paths in runs:
            if run_status.read_status(paths).state in GOING_ON:
                scancel.cancel_in_allocation(paths)
        return []


def _batch(
    submission: SubmissionPaths, run: StartRequest, allocation: Allocation, nodes: Sequence[str]
) -> Batch:
    from hpc_train.experiment.validate.slurm_rules import ranks_on_each_node
    from hpc_train.launchers.slurm import script
    from hpc_train.launchers.slurm.profiles import slurm_of
    from hpc_train.run.code import snapshot

    slurm, code = slurm_of(run.experiment), snapshot.linked(run.paths)
    assert slurm is not None
    left_min = None if allocation.end_s is None else max(2, int(allocation.end_s - time.time()) // 60)
    requested = slurm.model_copy(update={"nodes": len(nodes), "spare_nodes": 0, "time_limit": left_min})
    shown = run.paths.siblings.snapshots / "SNAPSHOT"
    batch = script.batch(
        submission.folder,
        run.experiment.model_copy(update={"slurm": requested}),
        snapshot=code or shown,
        search_path=snapshot.search_path(run.paths) if code else [f"{shown}/package", f"{shown}/tree"],
        held=False,
        problem=run.problem,
    )
    per_node = ranks_on_each_node(slurm)
    share = ["--overlap"]  # a shell that srun started holds the job's cores in a step of its own
    if _SLOT_NODE in os.environ:
        mem_mb = min(node.mem_mb for node in allocation.nodes if node.name in nodes) // slurm.runs_per_job
        share = ["--exact", *([f"--mem={mem_mb}M"] if mem_mb else [])]
    options = [
        *share,
        f"--job-name={scancel.step_name(run.paths)}",
        f"--nodes={len(nodes)}",
        f"--nodelist={','.join(nodes)}",
        f"--ntasks={len(nodes) * per_node}",
        f"--ntasks-per-node={per_node}",
        *([f"--gres=gpu:{slurm.gpus_per_node}"] if slurm.gpus_per_node else []),
    ]
    parameters = batch.parameters | {"srun_args": [*batch.parameters["srun_args"], *options]}
    return replace(batch, parameters=parameters)


def _prepared(
    folder: ExperimentPaths, run: StartRequest, allocation: Allocation, nodes: Sequence[str]
) -> tuple[SubmissionPaths, Batch]:
    """Write the files of a submission that is released already, and note the job in the run's folder."""
    from hpc_train.launchers.slurm import script

    paths = steps.new_paths(folder)
    batch, cluster = _batch(paths, run, allocation, nodes), commands.cluster_name()
    steps.make_private(paths.folder)
    write_text(paths.folder / "batch.sh", script.script_text(batch))
    steps.place_pickle(paths, allocation.job, run.paths)
    record = steps.Submission(
        paths.token, now_ms(), Process.current(), [run.paths.folder.name], state=steps.RELEASED,
        job_id=allocation.job, batch=batch, cluster=cluster,
    )  # fmt: skip
    steps.write(paths, record)
    facts = read_json(run.paths.run) or {}
    write_json(run.paths.run, add_job(facts, allocation.job, cluster) | {"launcher": ALLOCATION}, sync=True)
    run_status.write_status(
        run.paths, replace(run_status.read_status(run.paths), state="pending", reason=None)
    )
    return paths, batch


@dataclass
class _Follower:
    """Executes a run's batch script; passes stop signals and the end of the allocation on to its ranks."""

    run: StartRequest
    submission: SubmissionPaths
    batch: Batch
    allocation: Allocation
    #: The signal to pass on: the user's, or SIGUSR2 before the allocation ends.
    _request: signal.Signals | None = None
    _looked_at: float = 0.0
    _asked_at: float = 0.0
    _attempt: int = 0
    _num_printed: int = 0
    _polling: ExitStack = field(default_factory=ExitStack)
    _poll: Callable[[], None] = lambda: None

    def follow(self, nodes: Sequence[str]) -> ExitCode:
        """Return how the run ended. Ctrl-C has the ranks save and end, a second one kills them."""
        from hpc_train.launchers.local import noted_signals

        log = self.submission.folder / f"{self.allocation.job}_0_log.out"
        with noted_signals() as signals, log.open("ab") as output:
            child = start_in_own_session(
                # bash ignores SIGTERM, which Slurm also sends to the processes of the user's script.
                ["bash", "-c", 'trap "" TERM; SLURM_TASK_PID=$$ exec bash "$0"',
                 str(self.submission.folder / "batch.sh")],
                stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=self._environment(nodes),
            )  # fmt: skip
            try:
                with self._polling:
                    while exit_code(child) is None:
                        time.sleep(_POLL_S)
                        with suppress(OSError):  # showing progress must not end the run
                            self._look(log)
                        self._handle(signals)
            except BaseException:
                child.kill()
                scancel.end_step(self.allocation.job, self.run.paths)
                raise
            with suppress(OSError):
                self._print_output(log)
        return self._end(exit_code(child, block=True) or 0, log)

    def _environment(self, nodes: Sequence[str]) -> dict[str, str]:
        from hpc_train.launchers.slurm import script

        sizes = {name: value for argument in self.batch.parameters["srun_args"]
                 for name, _, value in [argument.removeprefix("--").partition("=")]}  # fmt: skip
        listed, count = ",".join(nodes), str(len(nodes))
        per_node = f"{sizes['ntasks-per-node']}(x{count})"
        return script.environment_within_job(self.batch.parameters, os.environ) | {
            **dict.fromkeys(("SLURM_JOB_NODELIST", "SLURM_NODELIST"), listed),
            **dict.fromkeys(("SLURM_JOB_NUM_NODES", "SLURM_NNODES"), count),
            **dict.fromkeys(("SLURM_NTASKS", "SLURM_NPROCS"), sizes["ntasks"]),
            "SLURM_NTASKS_PER_NODE": sizes["ntasks-per-node"],
            "SLURM_TASKS_PER_NODE": per_node,
            IN_ALLOCATION: "1",
            # Nodes that the run excludes were left out already, if that was possible.
            "HPC_TRAIN_ANY_NODE": "1",
        }

    def _look(self, log: Path) -> None:
        """Show progress of the newest attempt, and what the batch script prints about it."""
        if time.monotonic() - self._looked_at >= _LOOK_S:
            self._looked_at = time.monotonic()
            self._print_output(log)
            if (newest := newest_number(self.run.paths)) > max(self._attempt, self.run.after):
                self._attempt = newest
                self._polling.close()
                self._poll = self._polling.enter_context(self.run.polling(self.run.paths, newest))
        self._poll()

    def _print_output(self, log: Path) -> None:
        lines = tail_text(log, _OUTPUT_BYTES).splitlines()
        printed = [line for line in lines if line.startswith("hpc-train: ") and not line.startswith(MARK)]
        for line in printed[self._num_printed :]:
            say_text(line.removeprefix("hpc-train: "))
        self._num_printed = max(self._num_printed, len(printed))

    def _handle(self, signals: Sequence[int]) -> None:
        """Decide on the signal for the ranks, and send it until rank 0 has received it."""
        request = self._requested(signals)
        if request is None:
            return
        if request != self._request:
            self._request, self._asked_at = request, 0.0
            with suppress(OSError):  # a full disk: the ranks note the signal, if they have room
                job = BatchJob(self.run.paths, self.submission, self.allocation.job, 0, is_allocation=True)
                write_text(job.stop_request, f"{request.name}\n")
            if request not in {signal.SIGKILL, signal.SIGUSR2}:
                say("stopping: the ranks save a checkpoint; Ctrl-C again ends them at once")
        is_received = request != signal.SIGKILL and noted_signal(self.run.paths.attempt(self._attempt))
        if not is_received and time.monotonic() - self._asked_at >= _STEP_S:
            self._asked_at = time.monotonic()
            with suppress(NoSchedulerError, commands.RefusedError):  # asked again soon
                scancel.signal_step(self.allocation.job, self.run.paths, request)

    def _requested(self, signals: Sequence[int]) -> signal.Signals | None:
        if list(signals).count(signal.SIGINT) > 1:
            return signal.SIGKILL
        if signals:
            return signal.SIGINT if signals[0] == signal.SIGINT else signal.SIGTERM
        end_s, lead_s = self.allocation.end_s, self.batch.parameters["signal_delay_s"]
        if self._request is not None or end_s is None or time.time() < end_s - lead_s:
            return self._request
        with suppress(UsageError, NoSchedulerError):  # an administrator may have extended it
            self.allocation = self.allocation.read(os.environ)
        end_s = self.allocation.end_s
        if end_s is None or time.time() < end_s - lead_s:
            return None
        say(f"job {self.allocation.job} ends in {end_s - time.time():.0f} s: the ranks save a checkpoint")
        return signal.SIGUSR2

    def _end(self, code: int, log: Path) -> ExitCode:
        """Return the command's exit code; write how the run ended if the batch script has not."""
        paths = self.run.paths
        status = run_status.read_status(paths)
        if status.state in GOING_ON:
            if paths.cancelled.exists():
                status = replace(status, state=CANCELLED, reason=run_status.CANCELLED_BY)
            else:
                state = INTERRUPTED if status.state == "requeued" else "failed"
                text = status.reason or f"its batch script ended with exit code {code}; its output: {log}"
                status = replace(status, state=state, reason=one_line(text))
            with suppress(OSError):
                run_status.write_status(paths, status)
            notify_end(paths, say, status)
        if status.state == "completed":
            return ExitCode.DONE
        record = read_record(paths.attempt(self._attempt)) if self._attempt else None
        is_stopped = status.state == INTERRUPTED and (record is None or record.cause in _ENDS_SERIES)
        if self._request is not None or is_stopped:
            return ExitCode.INTERRUPTED
        if status.state == INTERRUPTED:
            return ExitCode.TRY_AGAIN
        return ExitCode(code) if code in set(ExitCode) and code else ExitCode.FAILED


def _status(paths: RunPaths, max_age_s: float) -> RunStatus:
    status = run_status.read_status(paths)
    if status.state not in GOING_ON:
        return status
    record, facts = newest_record(paths), read_json(paths.run) or {}
    is_begun = record is not None and record.end is None
    process = record.launcher_process if record is not None and is_begun else _submitter(paths)
    is_alive = False if process is None else process.is_alive()
    latest = run_status.read_status(paths)  # it may have ended meanwhile
    if is_alive or latest.state not in GOING_ON:
        return latest
    jobs = facts.get("slurm_job_ids") or [None]
    if is_alive is None and record is not None and is_begun and silent_s(paths, record) < _GRACE_S:
        return latest  # its batch script may just be writing the end
    reason = _end_of_job(str(jobs[-1]), max_age_s)
    if reason is None and is_alive is None:
        if not is_begun or record is None or silent_s(paths, record) <= SILENT_LIMIT_S:
            return latest
        assert process is not None
        return replace(latest, state="failed", reason=silent_for(process.host, silent_s(paths, record)))
    state, text = (INTERRUPTED, reason) if reason else ("failed", LAUNCHER_DIED)
    if paths.cancelled.exists():
        state, text = CANCELLED, run_status.CANCELLED_BY
    step = max(latest.step, saved_step(paths, newest_number(paths)))
    ended = replace(latest, state=state, step=step, reason=text)
    with suppress(OSError):  # another user's run, or a full disk: still return the status
        run_status.write_status(paths, ended)
        if record is not None and is_begun:
            cause = "lost" if state == "failed" else state if state == CANCELLED else "interrupted"
            diagnosis = Diagnosis(cause, text)
            write_record(paths.attempt(record.attempt), ended_unseen(paths, record, diagnosis))
    return ended


def _submitter(paths: RunPaths) -> Process | None:
    submissions = (steps.read(submission) for submission in paths.siblings.submission_folders())
    of_run = [one for one in submissions if one is not None and one.runs == [paths.folder.name]]
    return max(of_run, key=lambda one: one.created).creator if of_run else None


def _end_of_job(job: str, max_age_s: float) -> str | None:
    """Return how the user's job has ended; None if it runs, or if that is unknown now."""
    try:
        state = ask([(job, None)], max_age_s=max_age_s).get((job, None))
    except NoSchedulerError:
        if max_age_s == 0:
            raise
        return None
    if state is None or not state.is_over:
        return None
    if state.may_reappear:
        return None  # one absent answer proves nothing
    return f"job {job}, in which it ran, has ended ({state.state})"
