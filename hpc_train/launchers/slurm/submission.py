"""One submission: a held job whose pickles and ids are in place before it is released.

Every step is recorded before the next one, and every step can be repeated: the next holder of the
experiment's lock finishes the submission of a killed command. Its job is recognized by the script, which is
in the submission's folder; if there is no job, sbatch runs again, without the runs that were cancelled since.
"""

from __future__ import annotations

import os
import re
import secrets
import stat
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from hpc_train.console import say
from hpc_train.errors import NoSchedulerError, StorageError
from hpc_train.launchers.slurm import LAUNCHER, commands
from hpc_train.launchers.slurm.batch_job import runs_per_task
from hpc_train.launchers.slurm.queue import JobState
from hpc_train.paths import ExperimentPaths, RunPaths, SubmissionPaths
from hpc_train.run import files
from hpc_train.run.attempts import add_job, job_ids, now_ms
from hpc_train.run.file_shapes import decoded, encoded
from hpc_train.run.files import read_json, write_json
from hpc_train.run.processes import Process
from hpc_train.run.run_status import read_status, run_facts, write_status
from hpc_train.run.trust import check_holder, make_experiment_folder

#: ``prepared``: the record stands, sbatch may have run. ``submitted``: job id known, pickles placed, ids in
#: each ``run.json``. ``released``: Slurm may start it.
PREPARED, SUBMITTED, RELEASED = "prepared", "submitted", "released"
#: If flock works on one host only, another host's command may be active too. Longer than any command takes.
_UNSEEN_LIMIT_S = 900.0
_TOKEN = re.compile(r"/\.slurm/(\w+)/")
_OUTPUT_BYTES = 1 << 16


@dataclass(frozen=True)
class Batch:
    """One batch script."""

    #: ``runs/<name>/.slurm/<token>``, with submitit's files and the script's output.
    submission: Path
    #: The command that each rank runs before submitit's arguments.
    command: str
    #: Arguments of ``SlurmExecutor.update_parameters``; valid JSON.
    parameters: dict[str, Any]
    #: How many runs belong to each job, or task of the array; the last one may have fewer.
    runs_per_task: int = 1
    #: The batch script that evaluates a checkpoint, with ``evaluation.as_job``.
    evaluation: str | None = None

    def num_tasks(self, runs: int) -> int:
        """Return the number of jobs, as tasks of one array, of this number of runs."""
        return -(-runs // self.runs_per_task)


@dataclass(frozen=True)
class Sharing:
    """How the runs of a submission share its jobs."""

    #: Runs that train at the same time in a job, and runs that belong to it.
    slots: int = 1
    runs_per_task: int = 1


ALONE = Sharing()


def sharing(runs: int, runs_per_job: int, max_parallel: int | None) -> Sharing:
    """Return how runs share jobs of ``runs_per_job`` slots if ``max_parallel`` of them train at a time."""
    if runs_per_job == 1:
        return ALONE
    at_once = min(runs, max_parallel or runs)
    jobs = -(-at_once // runs_per_job)
    return Sharing(-(-at_once // jobs), -(-runs // jobs))


@dataclass(frozen=True)
class Submission:
    """``submission.json``."""

    token: str
    #: UTC, ISO 8601.
    created: str
    creator: Process | None
    #: Run ids in the order of array tasks.
    runs: list[str]
    max_parallel: int | None = None
    #: Requested in the file by ``slurm.extra.hold``.
    stays_held: bool = False
    state: str = PREPARED
    #: Id of the job or the whole array.
    job_id: str | None = None
    #: The inputs of the batch script, to create the same one again.
    batch: Batch | None = None
    #: The cluster to which it is submitted; None: not recorded (0.2).
    cluster: str | None = None

    def job_of(self, index: int) -> str:
        """Return the job of a run, by its index in ``runs``: ``12_3`` of an array, else ``12``."""
        batch = self.batch or Batch(Path(), "", {})
        task = index // batch.runs_per_task
        return f"{self.job_id}_{task}" if batch.num_tasks(len(self.runs)) > 1 else str(self.job_id)


def read(paths: SubmissionPaths) -> Submission | None:
    """Return the record of a submission, None if there is none."""
    return decoded(Submission, read_json(paths.record))


def write(paths: SubmissionPaths, submission: Submission) -> None:
    """Replace the record of a submission atomically."""
    write_json(paths.record, {"version": 1} | encoded(submission), sync=True)


def is_elsewhere(submission: Submission) -> bool:
    """Return True if the submission belongs to another cluster than the one reached from here."""
    return submission.cluster is not None and commands.cluster_name() not in {submission.cluster, None}


@contextmanager
def locked(folder: ExperimentPaths) -> Iterator[None]:
    """Hold the experiment's submission lock. While waiting, print its holder."""
    from filelock import FileLock, Timeout

    make_experiment_folder(folder)
    make_private(folder.submissions)
    holder = folder.submissions / "holder.json"
    lock = FileLock(folder.submission_lock)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        process = Process.from_json(read_json(holder))
        owner = "another command" if process is None else f"process {process.pid} on {process.host}"
        say(f"{folder.folder.name}: waits for {owner}, which is submitting runs of it")
        lock.acquire()
    try:
        write_json(holder, Process.current().to_json())
        yield
    finally:
        lock.release()


def make_private(folder: Path) -> None:
    """Make a folder that only its owner can enter: its content is executed. Raises UntrustedError."""
    folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)
    check_holder(folder)


def unfinished(folder: ExperimentPaths) -> list[tuple[SubmissionPaths, Submission]]:
    """Return the submissions that are not released, the oldest first."""
    submissions = [(paths, read(paths)) for paths in folder.submission_folders()]
    half_done = [(paths, one) for paths, one in submissions if one is not None and one.state != RELEASED]
    return sorted(half_done, key=lambda pair: (pair[1].created, pair[1].token))


def without_job(
    folder: ExperimentPaths, run_ids: Collection[str]
) -> list[tuple[SubmissionPaths, Submission]]:
    """Return submissions of these runs without a job, except those another host may continue."""
    submissions = []
    for paths in folder.submission_folders():
        submission = read(paths)
        if submission is None or submission.state != PREPARED or set(run_ids).isdisjoint(submission.runs):
            continue
        if not may_be_at_work(submission.creator, submission.created):
            submissions.append((paths, submission))
    return submissions


def may_be_at_work(creator: Process | None, created: str) -> bool:
    """Return True if a command of another host, without this host's lock, may still continue it.

    A command of this host would hold the lock that this process holds.
    """
    if creator is None or creator.is_alive() is not None:
        return False
    with suppress(ValueError):
        return (datetime.now(UTC) - datetime.fromisoformat(created)).total_seconds() < _UNSEEN_LIMIT_S
    return False


def new_paths(folder: ExperimentPaths) -> SubmissionPaths:
    """Return the paths of a new submission with a random token."""
    return folder.submission(secrets.token_hex(6))


def prepare(
    paths: SubmissionPaths,
    runs: Sequence[RunPaths],
    batch: Batch,
    *,
    max_parallel: int | None,
    stays_held: bool,
    cluster: str | None = None,
) -> Submission:
    """Record the runs of a job before it is submitted."""
    make_private(paths.folder)
    run_ids = [run.folder.name for run in runs]
    me, token = Process.current(), paths.token
    submission = Submission(
        token, now_ms(), me, run_ids, max_parallel, stays_held, batch=batch, cluster=cluster
    )
    write(paths, submission)
    files.sync_folder(paths.folder.parent)
    return submission


def place(folder: ExperimentPaths, paths: SubmissionPaths, submission: Submission) -> Submission:
    """Give each task of the held job its pickle and each run its job's id.

    A job that several runs share needs no pickles: its batch script starts the ranks of each run.
    """
    is_shared = submission.batch is not None and submission.batch.runs_per_task > 1

    def place_run(index: int) -> None:
        run, job = RunPaths(folder.folder / submission.runs[index]), submission.job_of(index)
        if not is_shared:
            place_pickle(paths, job, run)
        note_job(run, job, submission.cluster)

    files.in_parallel(place_run, range(len(submission.runs)))
    # Pickles that submitit names by chance and has not moved, since its process died.
    for path in paths.folder.glob("*.pkl"):
        if not path.name.endswith("_submitted.pkl"):
            path.unlink(missing_ok=True)
    files.sync_folder(paths.folder)
    submitted = replace(submission, state=SUBMITTED)
    write(paths, submitted)
    return submitted


def place_pickle(paths: SubmissionPaths, job: str, run: RunPaths) -> None:
    """Write the pickle that submitit runs as the task; submitit writes it only after sbatch has returned."""
    from submitit.core.utils import DelayedSubmission, JobPaths

    from hpc_train.launchers.entry import Entry

    target = JobPaths(paths.folder, job_id=job).submitted_pickle
    temporary = files.hidden_beside(target)
    DelayedSubmission(Entry(run.folder)).dump(temporary)
    _make_private(temporary)
    temporary.replace(target)


def _make_private(path: Path) -> None:
    """Prevent others from writing the executed file, for any umask. Raises StorageError if they can."""
    try:
        path.chmod(0o600)
    except OSError as error:
        if not files.is_unsupported(error):
            raise
        mode = stat.S_IMODE(path.stat().st_mode)
        if mode & 0o022:
            raise StorageError(
                f"{path.parent}: others can write the files of this mount (mode {mode:04o}), and it has no "
                "chmod; set HPC_TRAIN_RUNS to a folder on another file system"
            ) from error


def note_job(run: RunPaths, job: str, cluster: str | None = None) -> None:
    """Record that the run waits as ``job`` of ``cluster``; does nothing if the run's folder is gone."""
    facts = read_json(run.run)
    if facts is None:
        return
    if (noted := add_job(facts, job, cluster)) is not facts:
        write_json(run.run, noted | {"launcher": LAUNCHER}, sync=True)
    status = read_status(run)
    if (status.state, status.reason) != ("pending", None):
        write_status(run, replace(status, state="pending", reason=None))


def release(paths: SubmissionPaths, submission: Submission) -> None:
    """Release the job. It may be gone already, if it was cancelled manually while it was held."""
    assert submission.job_id is not None
    if not submission.stays_held:
        try:
            commands.release(submission.job_id)
        except commands.RefusedError:
            # Slurm refuses for a job that has ended, and for a released job that can't start.
            if "JobHeldUser" in reasons([submission.job_id]).get(submission.job_id, set()):
                raise
    write(paths, replace(submission, state=RELEASED))


def reasons(job_ids: Sequence[str]) -> dict[str, set[str]]:
    """Return why tasks of the jobs wait, by Slurm's reasons; a job without waiting tasks is absent."""
    argv = ["squeue", "--noheader", f"--jobs={','.join(job_ids)}", "--states=PENDING", "--format=%F|%r"]
    try:
        output = commands.run(argv, retry=True)
    except commands.RefusedError:
        return {}  # invalid job id: it has ended, and Slurm has forgotten it
    by_job: dict[str, set[str]] = {}
    for line in output.splitlines():
        job_id, _, reason = line.strip().partition("|")
        by_job.setdefault(job_id, set()).add(reason)
    return by_job


def has_running_jobs() -> bool:
    """Return True if a job of this user has nodes, or if Slurm does not answer."""
    states = "RUNNING,CONFIGURING,COMPLETING,SUSPENDED"
    argv = ["squeue", "--noheader", f"--user={os.getuid()}", f"--states={states}", "--format=%F"]
    try:
        return bool(commands.run(argv).strip())
    except (NoSchedulerError, commands.RefusedError):
        return True


def is_without_job(paths: RunPaths) -> bool:
    """Return True if the run was made for Slurm by a command that has ended, and has no job."""
    facts = read_json(paths.run) or {}
    if facts.get("launcher") != LAUNCHER or job_ids(facts) or paths.attempt_folders():
        return False
    return not may_be_at_work(Process.from_json(facts.get("creator")), str(facts.get("created")))


def recorded_runs(folder: ExperimentPaths) -> set[str]:
    """Return the ids of the experiment's runs that are in a submission."""
    recorded = (read(submission) for submission in folder.submission_folders())
    return {run_id for submission in recorded if submission is not None for run_id in submission.runs}


def withdraw(paths: RunPaths, reason: str, job_id: str | None = None) -> None:
    """Withdraw a run that Slurm has refused, or whose job ``job_id`` it would never start.

    Removes it if it was in no other job, else marks it as failed.
    """
    facts = read_json(paths.run)
    if facts is None:
        return
    other_jobs = [job for job in job_ids(facts) if job.partition("_")[0] != job_id]
    if other_jobs or paths.attempt_folders():
        write_status(paths, replace(read_status(paths), state="failed", reason=reason))
        return
    files.remove_folder(paths.folder)


class Submissions:
    """The submissions of experiments by the number of their job; each record is read once."""

    def __init__(self) -> None:
        self._known: dict[Path, dict[str, list[tuple[SubmissionPaths, dict[str, Any]]]]] = {}
        self._runs: dict[Path, set[str] | None] = {}

    def are_released(self, paths: RunPaths, job: str) -> bool:
        """Return True if the submission that made the job is complete, or unknown."""
        return all(record.get("state") == RELEASED for _, record in self._of(paths, job)[:1])

    def neighbors(self, paths: RunPaths, job: str) -> list[RunPaths]:
        """Return the other runs of a job that several share, including ended ones; else an empty list."""
        for _, record in self._of(paths, job):
            runs, count = record.get("runs"), runs_per_task(record)
            if isinstance(runs, list) and count > 1 and paths.folder.name in runs:
                first = runs.index(paths.folder.name) // count * count
                others = [paths.siblings.folder / str(run_id) for run_id in runs[first : first + count]]
                return [RunPaths(other) for other in others if other != paths.folder]
        return []

    def made(self, paths: RunPaths, job: JobState) -> bool:
        """Return True if the job is the run's own, by its script or else its name: Slurm reuses numbers."""
        if token := _TOKEN.search(job.script or ""):
            submission = paths.siblings.submission(token[1])
            if submission.folder not in self._runs:
                runs = (read_json(submission.record) or {}).get("runs")
                self._runs[submission.folder] = set(runs) if isinstance(runs, list) else None
            if (runs := self._runs[submission.folder]) is not None:
                return paths.folder.name in runs
        return job.name in {run_facts(paths).get("name"), None}

    def batch_output(self, paths: RunPaths, job: str) -> Path | None:
        """Return the file into which the job's batch script prints, if there is one yet."""
        name = f"{job}_0_log.out"  # by submitit
        folders = [submission.folder for submission, _ in self._of(paths, job)]
        # Several if Slurm has restarted its job numbers.
        existing = [folder / name for folder in folders if (folder / name).is_file()]
        # In a job that runs share, a slot's file.
        slots = [path for folder in folders for path in folder.glob(f"{job}_slot*_log.out")]
        existing = [
            path for path in slots if f" of run {paths.folder.name}," in files.tail_text(path, _OUTPUT_BYTES)
        ] or existing
        return max(existing, key=lambda path: path.stat().st_mtime) if existing else None

    def _of(self, paths: RunPaths, job: str) -> list[tuple[SubmissionPaths, dict[str, Any]]]:
        folder = paths.siblings
        if folder.folder not in self._known:
            by_job = self._known.setdefault(folder.folder, {})
            for submission in folder.submission_folders():
                record = read_json(submission.record) or {}
                by_job.setdefault(str(record.get("job_id")), []).append((submission, record))
        return self._known[folder.folder].get(job.partition("_")[0], [])
