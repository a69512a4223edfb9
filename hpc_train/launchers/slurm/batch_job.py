"""The batch job that ``begin`` and ``after`` run in: its name, its run, and how they answer its script."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from hpc_train.errors import BadFileError, UsageError, printable
from hpc_train.launchers.slurm.accounting import seconds
from hpc_train.paths import RunPaths, SubmissionPaths
from hpc_train.recovery import bad_nodes
from hpc_train.recovery.budgets import GpuHours, gpu_hours_of
from hpc_train.recovery.history import records
from hpc_train.run.attempts import AttemptRecord, job_ids
from hpc_train.run.files import read_json, tail_text
from hpc_train.run.processes import FOLDER_VARIABLE
from hpc_train.run.run_status import GOING_ON, read_status, run_facts

#: Begins an attempt's part of the batch script's output, which all attempts of a job append to.
MARK = "hpc-train: attempt"
#: Variable with the path of the file for the answer to the batch script.
ANSWER_FILE = "HPC_TRAIN_ANSWER"
#: Variable that the batch script sets once it begins another attempt without a requeue.
IN_PLACE = "HPC_TRAIN_IN_PLACE"
#: Variable with the line of ``scontrol show job``; empty if Slurm did not answer.
JOB = "HPC_TRAIN_JOB"
_OUTPUT_BYTES = 1 << 16
#: sinfo is called at a requeue only; if it hangs, the job must start nevertheless.
_SINFO_LIMIT_S = 30.0
#: Not ``power*``: nodes that are switched off to save power are not broken.
_GONE = ("down", "fail")


@dataclass(frozen=True)
class BatchJob:
    """The job that this process runs in, and its run."""

    paths: RunPaths
    submission: SubmissionPaths
    #: ``12_3`` of an array, else ``12``: SLURM_JOB_ID of an array's last task means the whole array.
    job: str
    restart: int
    cluster: str | None = None
    #: Whether several runs of the submission belong to this job.
    is_shared: bool = False

    @classmethod
    def of(cls, folder: Path, environ: Mapping[str, str]) -> BatchJob:
        """Return the job with its run; of several runs the one whose folder the environment names.

        Raises UsageError outside of a job, BadFileError if the submission does not contain its task.
        """
        jobs = cls.with_each_run(folder, environ)
        if not jobs[0].is_shared:
            return jobs[0]
        name = Path(environ.get(FOLDER_VARIABLE, "")).name
        for job in jobs:
            if job.paths.folder.name == name:
                return job
        raise UsageError(f"{FOLDER_VARIABLE}: {name!r} is not a run of job {jobs[0].job}")

    @classmethod
    def with_each_run(cls, folder: Path, environ: Mapping[str, str]) -> list[BatchJob]:
        """Return the job with each of its runs, in order; errors as of ``of``."""
        array, task = environ.get("SLURM_ARRAY_JOB_ID"), environ.get("SLURM_ARRAY_TASK_ID")
        job = f"{array}_{task}" if array and task else environ.get("SLURM_JOB_ID")
        if not job:
            raise UsageError("SLURM_JOB_ID: not set; this is called by the batch script that submit makes")
        submission = SubmissionPaths(folder)
        run_ids = _run_ids(submission, int(task) if array and task else 0)
        return [
            cls(
                RunPaths(folder.parent.parent / run_id),
                submission,
                job,
                int(environ.get("SLURM_RESTART_COUNT") or 0),
                (environ.get("SLURM_CLUSTER_NAME") or "").lower() or None,
                is_shared=runs_per_task(read_json(submission.record) or {}) > 1,
            )
            for run_id in run_ids
        ]

    def owns(self, record: AttemptRecord | None) -> bool:
        """Return True if the attempt ran in this job, also before a requeue; False without a record."""
        if record is None or record.job != self.job:
            return False
        return None in {record.cluster, self.cluster} or record.cluster == self.cluster

    def earlier(self, number: int) -> list[AttemptRecord]:
        """Return this job's attempts before attempt ``number``, in order."""
        return [record for record in records(self.paths) if record.attempt < number and self.owns(record)]

    @property
    def slots(self) -> Path:
        """Folder of this start of a shared job: a folder for each run that a slot has claimed."""
        return self.submission.folder / f"slots-{self.job}-{self.restart}"

    def claim(self) -> bool:
        """Claim the run for a slot of this start of the job; False if another slot has claimed it."""
        self.slots.mkdir(exist_ok=True)
        try:
            (self.slots / self.paths.folder.name).mkdir()
        except FileExistsError:
            return False
        return True

    @property
    def is_claimed(self) -> bool:
        """Whether a slot of this start of the job has claimed the run."""
        return (self.slots / self.paths.folder.name).is_dir()

    @property
    def verdict(self) -> str | None:
        """The verdict on the run's last attempt in this start of the job; None before its end."""
        with suppress(OSError):
            return (self.slots / self.paths.folder.name / "verdict").read_text("utf-8").strip()
        return None

    def note_verdict(self, verdict: str) -> None:
        """Record ``requeue CODE [NODES]`` or ``stop CODE``, of which the job's own verdict is composed."""
        with suppress(OSError):
            (self.slots / self.paths.folder.name / "verdict").write_text(f"{verdict}\n", encoding="utf-8")

    @property
    def stopping(self) -> Path:
        """Written after a run was stopped with the whole job: the slots begin no further runs."""
        return self.slots / ".stopping"

    @property
    def is_unfinished(self) -> bool:
        """Whether the run still waits for this job: it was not cancelled, and no later job has it."""
        if self.paths.cancelled.exists() or read_status(self.paths).state not in GOING_ON:
            return False
        return job_ids(run_facts(self.paths))[-1:] == [self.job]

    @property
    def asked(self) -> Path:
        """File with a line per request of the job for other nodes since an attempt began."""
        return self.submission.folder / f"asked-elsewhere-{self.job}"

    @property
    def cannot_start(self) -> Path:
        """Written by the batch script when it requeues the job because no attempt could begin."""
        return self.submission.folder / f"cannot-start-{self.job}"

    @property
    def unrequested(self) -> Path:
        """The starts of this job after the run had failed, one per line: time and step of the checkpoint."""
        return self.submission.folder / f"unrequested-{self.job}"


def runs_per_task(record: Mapping[str, Any]) -> int:
    """Return how many runs belong to each job of a submission, or task of its array, by its record."""
    count = (record.get("batch") or {}).get("runs_per_task")
    return count if isinstance(count, int) and count > 0 else 1


def _run_ids(submission: SubmissionPaths, task: int) -> list[str]:
    record = read_json(submission.record) or {}
    runs, count = record.get("runs"), runs_per_task(record)
    run_ids = runs[task * count : (task + 1) * count] if isinstance(runs, list) else []
    if not run_ids or not all(map(_is_plain_name, run_ids)):
        raise BadFileError(
            f"{submission.record}: knows no run of array task {task}; submit the experiment again"
        )
    return run_ids


def _is_plain_name(run_id: object) -> bool:
    """Return False for a name that would lead out of the experiment's folder."""
    return isinstance(run_id, str) and run_id == Path(run_id).name and run_id not in {"", ".", ".."}


def output_of(submission: Path, job: str, attempt: int, run_id: str) -> str:
    """Return the end of the batch script's output since ``begin`` printed the start of this attempt.

    In a job that runs share, each slot has a file, to which its runs print one after the other.
    """
    mark = f"{MARK} {attempt} of run {run_id},"
    for path in submission.glob(f"{job}_slot*_log.out"):
        _, found, after = tail_text(path, _OUTPUT_BYTES).rpartition(mark)
        if found:
            return after.partition(MARK)[0]
    text = ""
    for ending in ("out", "err"):
        with suppress(OSError):
            text += tail_text(submission / f"{job}_0_log.{ending}", _OUTPUT_BYTES)  # by submitit
    # Without the mark, which is then before the part that was read, all of it.
    return text.rpartition(f"{MARK} {attempt} ")[2]


def answer(text: str) -> None:
    """Pass ``text``, one line, to the batch script.

    It goes through a file, since others print to stdout: a site's Python, a container's starter. If the file
    can't be written, or a script of 0.2 names none, it is the last line of stdout.
    """
    path = os.environ.get(ANSWER_FILE)
    if path:
        with suppress(OSError):
            Path(path).write_text(f"{text}\n", encoding="utf-8")
            return
    print(text, flush=True)


def granted(submission: SubmissionPaths, environ: Mapping[str, str]) -> dict[str, Any]:
    """Return fields of the attempt's record: the granted time limit, and settings that do not fit it.

    The batch script passes ``scontrol show job``; without an answer the result is empty.
    """
    shown = re.search(r"(?:^|\s)TimeLimit=([\d:-]+)(?:\s|$)", environ.get(JOB, ""))
    if shown is None or not (limit_s := seconds(shown[1])):
        return {}
    requested_s = 60 * float(_parameters(submission).get("time") or 0)
    lead_s = warning_s(submission)
    return {
        "time_limit_s": limit_s,
        "requested_limit_s": requested_s if requested_s > limit_s else None,
        # At most half of the time, as without a cut: a job always gets some work done.
        "lead_s": limit_s / 2 if lead_s > limit_s / 2 else None,
    }


def warning_s(submission: SubmissionPaths) -> float:
    """Return how many seconds before its time limit the job is signalled to stop; 0 if unknown."""
    additional = _parameters(submission).get("additional_parameters") or {}
    signal = re.fullmatch(r"USR2@(\d+)", str(additional.get("signal")))
    return float(signal[1]) if signal else 0.0


def _parameters(submission: SubmissionPaths) -> dict[str, Any]:
    batch = (read_json(submission.record) or {}).get("batch") or {}
    return batch.get("parameters") or {}


def job_time(name: str, environ: Mapping[str, str]) -> float | None:
    """Return a time of the job, such as ``EndTime``, in seconds since 1970; None if unknown or not set."""
    shown = re.search(rf"(?:^|\s){name}=([\d:T-]+)(?:\s|$)", environ.get(JOB, ""))
    with suppress(ValueError):
        return None if shown is None else datetime.fromisoformat(shown[1]).timestamp()
    return None


def gone_nodes(hosts: Sequence[str]) -> list[str]:
    """Return the nodes that Slurm reports as down or does not know; none if it can't be reached."""
    nodes = bad_nodes.names(hosts)
    if not nodes:
        return []
    command = ["sinfo", "--noheader", "--Node", f"--nodes={','.join(nodes)}", "--format=%N %T"]
    clean = {name: value for name, value in os.environ.items() if not name.startswith("SINFO_")}
    with suppress(OSError, subprocess.SubprocessError):  # in a container there is none
        done = subprocess.run(
            command, env=clean, capture_output=True, text=True, check=True, timeout=_SINFO_LIMIT_S
        )
        pairs = (line.split() for line in done.stdout.splitlines())
        states = {pair[0]: pair[1].lower() for pair in pairs if len(pair) == 2}
        return sorted(node for node in nodes if _is_gone(states.get(node, "")))
    return []


def _is_gone(state: str) -> bool:
    """``idle*``: it does not respond."""
    return state.startswith(_GONE) or state.endswith("*")


def used_gpu_hours(paths: RunPaths, final: AttemptRecord) -> GpuHours | None:
    """Return the GPU hours of the run's attempts up to ``final``, whose end is not on disk yet.

    None if the run has no budget, or no GPUs.
    """
    budget, gpus_per_node = _gpu_budget(paths, final.attempt)
    if not budget or not gpus_per_node:
        return None
    earlier = [record for record in records(paths) if record.attempt < final.attempt]
    return GpuHours(gpu_hours_of([*earlier, final], gpus_per_node), budget, "slurm.max_gpu_hours")


def _gpu_budget(paths: RunPaths, attempt: int) -> tuple[float | None, int]:
    """Return the run's budget, which is its share of the file's, and the GPUs of a node."""
    if not run_facts(paths).get("changes"):
        section = (read_json(paths.resolved) or {}).get("slurm")
        if isinstance(section, dict):
            budget, gpus = section.get("max_gpu_hours"), section.get("gpus_per_node")
            if isinstance(budget, int | float) and isinstance(gpus, int) and budget > 0:
                return float(budget), gpus
        return None, 0
    from hpc_train.run.create import effective_experiment  # the schema: 0.2 s, which few runs need

    slurm = effective_experiment(paths, attempt).slurm
    return (None, 0) if slurm is None else (slurm.max_gpu_hours, slurm.gpus_per_node)


def limit_words(record: AttemptRecord) -> str | None:
    """Return the sentence about a time limit that Slurm has cut; None if the job has the requested limit."""
    if record.time_limit_s is None or record.requested_limit_s is None:
        return None
    limit, requested = (f"{s / 60:g} min" for s in (record.time_limit_s, record.requested_limit_s))
    return f"Slurm gives the job {limit}, not the {requested} of slurm.time_limit"


def say(text: str) -> None:
    """Print a line to the batch script's output."""
    print(printable(f"hpc-train: {text}"), file=sys.stderr, flush=True)
