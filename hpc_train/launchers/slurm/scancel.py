"""Cancels runs' jobs for good: runs are marked first, so that no batch script requeues a cancelled job."""

from __future__ import annotations

import signal
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from hpc_train.console import say
from hpc_train.errors import HpcTrainError, NoSchedulerError, TryAgainError
from hpc_train.launchers.slurm import commands, evaluations, submission
from hpc_train.launchers.slurm.queue import ELSEWHERE, JobState, ask
from hpc_train.launchers.slurm.queue_status import Folder, end_cancelled, other_cluster
from hpc_train.launchers.slurm.submission import Submissions
from hpc_train.paths import RunPaths
from hpc_train.run.find import run_name
from hpc_train.run.liveness import newest_record
from hpc_train.run.run_status import GOING_ON, mark_cancelled, read_status, write_cancelled
from hpc_train.run.storage_errors import storage_error
from hpc_train.run.trust import UntrustedError

#: Beyond KillWait: for the nodes to be cleared, epilogs included. Assumed.
_CLEAR_LIMIT_S = 120.0
_KILL_WAIT_S = 30.0
_POLLS_S = (0.5, 0.5, 1.0, 1.0, 2.0, 5.0)
#: For ranks to save and end after ``cancel``; after that they are killed. Assumed.
_SAVE_LIMIT_S, _KILL_LIMIT_S = 120.0, 30.0


def cancel(runs: Sequence[RunPaths]) -> list[RunPaths]:
    """End the jobs of active runs; wait, within bounds, until they are gone; record it.

    Returns the runs whose jobs belong to another cluster; they are not changed.

    Runs that have ended are not changed, except for a run whose job was requeued manually. Raises
    NoSchedulerError if Slurm does not answer: the runs are marked then, so that they end when they would
    start. Raises StorageError or TransientStorageError if a run can't be marked; its job is ended
    nevertheless.
    """
    clusters = {paths: cluster for paths in runs if (cluster := other_cluster(paths)) is not None}
    for paths, cluster in clusters.items():
        say(f"{run_name(paths)}: its job belongs to cluster {cluster}; cancel it there; nothing done")
    runs = [paths for paths in runs if paths not in clusters]
    folders, problems = _marked(runs)
    try:
        if not problems and _record_jobs(runs):
            folders, problems = _marked(runs)
        evaluations.cancel(runs)  # first: the end of the others would make room for them
        _end_jobs(folders)
    except NoSchedulerError as error:
        raise NoSchedulerError(f"{error}\n{_left(folders)}") from error
    if problems:
        say("the jobs were ended, but that can't be written:")
        raise problems[0]
    return list(clusters)


def _marked(runs: Sequence[RunPaths]) -> tuple[list[Folder], list[HpcTrainError]]:
    """Mark active runs as cancelled; return all folders' content, and the errors of marking."""
    folders, problems = [Folder.read(paths) for paths in runs], list[HpcTrainError]()
    for folder in folders:
        if folder.status.state in GOING_ON:
            try:
                mark_cancelled(folder.paths)
            except OSError as error:
                problems.append(storage_error(error, folder.paths.cancelled))
    return folders, problems


def _record_jobs(runs: Sequence[RunPaths]) -> bool:
    """Record the runs' held jobs that a command, killed after sbatch, did not record; return True if there
    were such submissions.

    Waits for a command that is submitting them.
    """
    has_recorded = False
    for experiment in dict.fromkeys(paths.siblings for paths in runs):
        ids = {paths.folder.name for paths in runs}
        if not submission.without_job(experiment, ids):
            continue
        from hpc_train.launchers.slurm import sbatch  # and the schema, which few cancels need

        # Runs of another user are skipped.
        with suppress(UntrustedError), submission.locked(experiment):
            for paths, record in submission.without_job(experiment, ids):
                if job_id := sbatch.own_job(paths):
                    submission.place(experiment, paths, replace(record, job_id=job_id))
        has_recorded = True
    return has_recorded


def _end_jobs(folders: Sequence[Folder]) -> None:
    states = ended = _ask(folders)
    living = [folder for folder in folders if _is_living(folder, states)]
    # A run that has ended is not changed because the job continues with other runs.
    living = [one for one in living if one.status.state in GOING_ON or not _has_active_neighbors(one)]
    for folder in living:
        with suppress(OSError):  # the disk is full, or can't be written
            mark_cancelled(folder.paths)
    shared = [folder for folder in living if _has_active_neighbors(folder)]
    alone = [folder for folder in living if folder not in shared]
    if alone:
        commands.cancel_jobs(list(dict.fromkeys(str(folder.job) for folder in alone)))
        ended = _wait(alone)
    remaining = _end_steps(shared, states) if shared else []
    for folder in folders:
        if folder.paths.cancelled.exists() and folder not in remaining:
            _write_end(folder.paths, None if folder in shared else ended.get(folder.paths))


def _ask(folders: Sequence[Folder]) -> dict[RunPaths, JobState]:
    states = ask({folder.key for folder in folders if folder.key}, max_age_s=0.0)
    return {folder.paths: states[folder.key] for folder in folders if folder.key in states}


def _is_living(folder: Folder, states: Mapping[RunPaths, JobState]) -> bool:
    """Return True if Slurm still has the run's job, and the job is the run's: numbers are reused."""
    job = states.get(folder.paths)
    if job is None or job.is_over or job.state == ELSEWHERE:
        return False
    if Submissions().made(folder.paths, job):
        return True
    say(f"{run_name(folder.paths)}: job {job.job} is not its own, but {job.name}: it is left alone")
    return False


def _has_active_neighbors(folder: Folder) -> bool:
    """Return True if other runs share the run's job, and at least one of them is not cancelled."""
    neighbors = Submissions().neighbors(folder.paths, str(folder.job))
    active = [one for one in neighbors if read_status(one).state in GOING_ON and not one.cancelled.exists()]
    return any(Folder.read(paths).key == folder.key for paths in active)


def _end_steps(shared: Sequence[Folder], states: Mapping[RunPaths, JobState]) -> list[Folder]:
    """End the steps of runs whose jobs continue with other runs; return those that have not ended in time.

    A step has the name of its run. As at scancel, SIGKILL follows SIGTERM after KillWait.
    """
    began, signalled = time.monotonic(), set[tuple[str, str]]()
    limit_s, pauses, has_looked = _kill_wait_s(), iter(_POLLS_S), False
    remaining = list(shared)
    while remaining:
        steps = []
        with suppress(commands.RefusedError):
            steps = _steps({str(folder.job) for folder in remaining})
        waited_s = time.monotonic() - began
        name = "KILL" if waited_s > limit_s else "TERM"
        for step, run_id in steps:
            if run_id in {folder.paths.folder.name for folder in remaining} and (step, name) not in signalled:
                signalled.add((step, name))
                with suppress(commands.RefusedError):  # it has just ended
                    commands.run(["scancel", f"--signal={name}", step], retry=True)
        running = {run_id for _, run_id in steps}
        # A slot that was beginning the run at the first look has a step, or has given it up, at the second.
        remaining = [
            folder
            for folder in remaining
            if not has_looked
            or folder.paths.folder.name in running
            or not _has_ended(folder.paths, states[folder.paths])
        ]
        if remaining and waited_s > limit_s + _CLEAR_LIMIT_S:
            ids = ", ".join(run_name(folder.paths) for folder in remaining)
            say(f"{ids}: asked to end, not gone yet; `hpc-train status` shows when they are")
            break
        has_looked = True
        time.sleep(next(pauses, _POLLS_S[-1]) if remaining else 0.0)
    return remaining


def _has_ended(paths: RunPaths, job: JobState) -> bool:
    """Return True if no attempt of the run is under way: the batch script has recorded its end."""
    folder = Folder.read(paths)
    if folder.record is None or folder.record.end is not None or folder.is_requeued(job):
        return True
    return folder.status.state not in GOING_ON


def _steps(jobs: Collection[str]) -> list[tuple[str, str]]:
    """Return id and name of the jobs' steps. Raises RefusedError once the jobs have ended."""
    output = commands.run(
        ["squeue", "--steps", "--noheader", f"--jobs={','.join(sorted(jobs))}", "--format=%i|%j"], retry=True
    )
    pairs = (line.strip().partition("|") for line in output.splitlines())
    return [(step, name) for step, _, name in pairs if step]


def _wait(living: Sequence[Folder]) -> dict[RunPaths, JobState]:
    deadline = time.monotonic() + _kill_wait_s() + _CLEAR_LIMIT_S
    pauses = iter(_POLLS_S)
    while True:
        states = _ask(living)
        remaining = [folder for folder in living if _is_living(folder, states)]
        if not remaining:
            return states
        if time.monotonic() > deadline:
            jobs = ", ".join(str(folder.job) for folder in remaining)
            say(f"jobs {jobs}: asked to end, not gone yet; `hpc-train status` shows when they are")
            return states
        time.sleep(next(pauses, _POLLS_S[-1]))


def _kill_wait_s() -> float:
    kill_wait = commands.config().get("KillWait", "").partition(" ")[0]
    return float(kill_wait) if kill_wait.isdigit() else _KILL_WAIT_S


def _write_end(paths: RunPaths, job: JobState | None) -> None:
    """Write ``cancelled`` once the job is gone; a run that completed before stays so."""
    if job is not None and not job.is_over:
        return
    if read_status(paths).state == "completed":
        paths.cancelled.unlink(missing_ok=True)
    else:
        end_cancelled(Folder.read(paths))


def _left(folders: Sequence[Folder]) -> str:
    marked = [folder for folder in folders if folder.paths.cancelled.exists()]
    ids = " ".join(run_name(folder.paths) for folder in marked)
    # A job that other runs share is not to be cancelled as a whole.
    jobs = " ".join(str(folder.job) for folder in marked if folder.job and not _has_active_neighbors(folder))
    return (
        f"{ids}: marked as cancelled, but what waits or runs was not cancelled; "
        f"`hpc-train cancel {ids}` again ends it once Slurm answers"
        + (f", or `scancel {jobs}`" if jobs else "")
    )


def cancel_in_allocation(paths: RunPaths) -> None:
    """Have the ranks save and end, then kill the rest; the user's job, in which they run, continues."""
    mark_cancelled(paths)  # first, so that the batch script knows why its ranks end
    record = newest_record(paths)
    if record is not None and record.end is None and record.job is not None:
        say(f"{run_name(paths)}: its ranks save a checkpoint and end; job {record.job} continues")
        try:
            if not _end_by(signal.SIGTERM, paths, record.job, _SAVE_LIMIT_S):
                _end_by(signal.SIGKILL, paths, record.job, _KILL_LIMIT_S)
        except commands.RefusedError:
            pass  # the job has ended
    write_cancelled(paths)


def _end_by(number: signal.Signals, paths: RunPaths, job: str, limit_s: float) -> bool:
    """Send the signal to the run's step, once it is there; return whether the attempt ended in time."""
    deadline, is_sent = time.monotonic() + limit_s, False
    while time.monotonic() < deadline:
        record = newest_record(paths)
        if record is None or record.end is not None:
            return True
        is_sent = is_sent or signal_step(job, paths, number)
        time.sleep(_POLLS_S[0])
        if is_sent and not _steps_of(paths, job):
            process = record.launcher_process
            if process is None or process.is_alive() is False:
                return True
    return False


def step_name(paths: RunPaths) -> str:
    """Return the name of the step with the run's ranks, by which Slurm finds it."""
    return f"{paths.folder.parent.name}.{paths.folder.name}"


def _steps_of(paths: RunPaths, job: str) -> list[str]:
    return [step for step, name in _steps({job}) if name == step_name(paths)]


def signal_step(job: str, paths: RunPaths, number: signal.Signals) -> bool:
    """Send the signal to the run's ranks; return whether there were any."""
    ids = _steps_of(paths, job)
    for step in ids:
        with suppress(commands.RefusedError):  # it has ended
            commands.run(["scancel", f"--signal={number.name.removeprefix('SIG')}", step])
    return bool(ids)


def end_step(job: str, paths: RunPaths) -> None:
    """End ranks of the run that outlived the command which followed them."""
    with suppress(commands.RefusedError):
        deadline = time.monotonic() + _KILL_LIMIT_S
        while signal_step(job, paths, signal.SIGKILL):
            if time.monotonic() > deadline:
                raise TryAgainError(f"{run_name(paths)}: ranks of an earlier attempt do not end in job {job}")
            time.sleep(1.0)
