"""The batch job that ``begin`` and ``after`` run in: its name, its run, and how they answer its script."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
from collections.abc import Container, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from hpc_train.errors import BadFileError, UsageError, printable
from hpc_train.launchers.slurm.accounting import seconds
from hpc_train.paths import RunPaths, SubmissionPaths
from hpc_train.recovery import bad_nodes
from hpc_train.recovery.budgets import GpuHours, gpu_hours_of
from hpc_train.recovery.history import records
from hpc_train.run.attempts import AttemptRecord, job_ids, read_record
from hpc_train.run.files import read_json, tail_text
from hpc_train.run.processes import FOLDER_VARIABLE
from hpc_train.run.run_status import GOING_ON, read_status, run_facts

#: Begins an attempt's part of the batch script's output, which all attempts of a job append to.
MARK = "hpc-train: attempt"
#: Variable with the path of the file for the answer to the batch script.
ANSWER_FILE = "HPC_TRAIN_ANSWER"
#: Variable that the batch script sets once it begins another attempt without a requeue.
IN_PLACE = "HPC_TRAIN_IN_PLACE"
#: Variable that is set if the batch script runs in an allocation of the user's own (``--here``).
IN_ALLOCATION = "HPC_TRAIN_ALLOCATION"
#: Variable with the line of ``scontrol show job``; empty if Slurm did not answer.
JOB = "HPC_TRAIN_JOB"
#: Variable with the number of nodes that ranks use, of a job with spare nodes.
NUM_NODES = "HPC_TRAIN_NUM_NODES"
_OUTPUT_BYTES = 1 << 16
#: Parts of a list of nodes, such as ``n[1-2,07],login1``.
_LIST_ITEM = re.compile(r"[^,\[\]]*(?:\[[^\]]*\][^,\[\]]*)*")
_BRACKETS = re.compile(r"([^\[\]]*)\[([\d,-]+)\](.*)")
#: A list of more nodes is not expanded: no cluster has them.
_MAX_NODES = 100_000
#: sinfo is called at a requeue only; if it hangs, the job must start nevertheless.
_SINFO_LIMIT_S = 30.0
#: Not ``power*``: nodes that are switched off to save power are not broken.
_GONE = ("down", "fail")
#: Slurm's words for a time that is not set.
_NEVER = ("None", "Unknown", "N/A", "NONE")


@dataclass(frozen=True)
class BatchJob:
    """The job that this process runs in, and its run."""

    paths: RunPaths
    submission: SubmissionPaths
    #: ``12_3`` of an array, else ``12``: SLURM_JOB_ID of an array's last task means the whole array.
    job: str
    restart: int
    cluster: str | None = None
    #: Whether the job is the user's own, in which a command executes the batch script.
    is_allocation: bool = False
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
        is_own_task = bool(array and task) and IN_ALLOCATION not in environ
        run_ids = _run_ids(submission, int(task or 0) if is_own_task else 0)
        return [
            cls(
                RunPaths(folder.parent.parent / run_id),
                submission,
                job,
                int(environ.get("SLURM_RESTART_COUNT") or 0),
                (environ.get("SLURM_CLUSTER_NAME") or "").lower() or None,
                is_allocation=IN_ALLOCATION in environ,
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
        """Return this job's attempts before attempt ``number``, in order.

        In the user's own allocation, the attempts of the command that started attempt ``number``.
        """
        earlier = [record for record in records(self.paths) if record.attempt < number and self.owns(record)]
        if not self.is_allocation:
            return earlier
        newest = read_record(self.paths.attempt(number))
        script = None if newest is None else newest.launcher_process
        return [record for record in earlier if record.launcher_process == script]

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
    def stop_request(self) -> Path:
        """In the user's own allocation: the signal by which the command that follows the run was stopped."""
        return self.submission.folder / "stop-request"

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
        _, begin, after = tail_text(path, _OUTPUT_BYTES).rpartition(mark)
        if begin:
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

    The batch script passes ``scontrol show job``; without an answer the result is empty. So it is in the
    user's own allocation, which may have begun long before the run.
    """
    limit_s = None if IN_ALLOCATION in environ else time_limit_s(environ)
    if not limit_s:
        return {}
    requested_s = 60 * float(_parameters(submission).get("time") or 0)
    lead_s = warning_s(submission)
    return {
        "time_limit_s": limit_s,
        "requested_limit_s": requested_s if requested_s > limit_s else None,
        # At most half of the time, as without a cut: a job always gets some work done.
        "lead_s": limit_s / 2 if lead_s > limit_s / 2 else None,
    }


def time_limit_s(environ: Mapping[str, str]) -> float | None:
    """Return the job's time limit in seconds; None if it is unknown or unlimited."""
    shown = _fields(environ).get("TimeLimit", "")
    return (seconds(shown) or None) if re.fullmatch(r"[\d:-]+", shown) else None


def warning_s(submission: SubmissionPaths) -> float:
    """Return how many seconds before its time limit the job is signalled to stop; 0 if unknown."""
    additional = _parameters(submission).get("additional_parameters") or {}
    signal = re.fullmatch(r"USR2@(\d+)", str(additional.get("signal")))
    return float(signal[1]) if signal else 0.0


def _parameters(submission: SubmissionPaths) -> dict[str, Any]:
    batch = (read_json(submission.record) or {}).get("batch") or {}
    return batch.get("parameters") or {}


def _fields(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the fields of ``scontrol show job``; without the last one of a line that ends within it."""
    return dict(re.findall(r"(?<!\S)(\w+)=(\S*)\s", environ.get(JOB, "")))


def still_runs(environ: Mapping[str, str], restart: int) -> bool:
    """Return True if Slurm's answer shows this start of the job as running.

    If Slurm considers the node dead, the job may wait or run again elsewhere.
    """
    fields = _fields(environ)
    return fields.get("JobState") == "RUNNING" and fields.get("Restarts", str(restart)) == str(restart)


def job_time(name: str, environ: Mapping[str, str]) -> float | None:
    """Return a time of the job, such as ``EndTime``, in seconds since 1970; None if unknown or not set."""
    time = _time(_fields(environ).get(name, ""), environ)
    return None if time == math.inf else time


def preempted_at(environ: Mapping[str, str]) -> float | None:
    """Return the last preemption of the job in seconds since 1970, 0 for none; None if that is unknown."""
    fields = _fields(environ)
    if "PreemptTime" in fields:
        time = _time(fields["PreemptTime"], environ)
        return 0.0 if time == math.inf else time
    return 0.0 if "SuspendTime" in fields else None  # Slurm omits it in front of this field, if there is none


def ends_at(environ: Mapping[str, str], begun_s: float, limit_s: float | None) -> float | None:
    """Return the end of the job in seconds since 1970, infinity without a limit; None if it is unknown.

    ``begun_s``, ``limit_s``: its begin and granted time, for an answer without its end.
    """
    shown = _fields(environ).get("EndTime")
    if shown is not None:
        return _time(shown, environ)
    return None if limit_s is None else begun_s + limit_s


def _time(text: str, environ: Mapping[str, str]) -> float | None:
    """Return a time of Slurm in seconds since 1970, infinity for a word such as None; None if damaged.

    An older batch script passes times of the node's zone.
    """
    if text in _NEVER:
        return math.inf
    zone = UTC if _fields(environ).get("TimeZone") == "UTC" else None
    with suppress(ValueError):
        return datetime.strptime(text, "%Y-%m-%dT%H:%M:%S").replace(tzinfo=zone).timestamp()
    return None


def gone_nodes(hosts: Sequence[str]) -> list[str]:
    """Return the nodes that Slurm reports as down; a node that it does not list may work."""
    nodes = bad_nodes.names(hosts)
    if not nodes:
        return []
    command = ["sinfo", "--noheader", "--all", "--Node", f"--nodes={','.join(nodes)}", "--format=%N %T"]
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


def allocated_hosts(environ: Mapping[str, str]) -> list[str]:
    """Return the nodes of the job, in Slurm's order; of a job with spare nodes without those that it lost."""
    shown = re.search(r"(?:^|\s)NodeList=(\S+)", environ.get(JOB, ""))
    if NUM_NODES in environ and shown is not None and (hosts := _expanded_list(shown[1])):
        return hosts
    if hosts := environ.get("HPC_TRAIN_HOSTS", "").split():
        return hosts
    listed = environ.get("SLURM_JOB_NODELIST", "")
    return _expanded_list(listed) or [listed] if listed else []


def _expanded_list(listed: str) -> list[str]:
    names = [name for item in _LIST_ITEM.findall(listed) if item for name in _expanded_item(item)]
    return names if len(names) <= _MAX_NODES else []


def _expanded_item(item: str) -> list[str]:
    match = _BRACKETS.fullmatch(item)
    if match is None:
        return [item] if "[" not in item else []
    before, ranges, after = match.groups()
    ends = _expanded_item(after) if after else [""]
    numbers: list[str] = []
    for part in ranges.split(","):
        low, _, high = part.partition("-")
        if not low.isdecimal() or not (high or low).isdecimal() or int(high or low) - int(low) >= _MAX_NODES:
            return []
        numbers += [str(number).zfill(len(low)) for number in range(int(low), int(high or low) + 1)]
    return [f"{before}{number}{end}" for number in numbers for end in ends]


def nodes_of_ranks(
    hosts: Sequence[str], excluded: Container[str], environ: Mapping[str, str]
) -> tuple[list[str], bool]:
    """Return the nodes for the ranks, and whether all of them may be used and respond.

    All of ``hosts``, the job's nodes; of a job with spare nodes the first that may be used.
    """
    count = int(environ.get(NUM_NODES) or len(hosts))
    gone = gone_nodes(hosts)
    best = sorted(hosts, key=lambda host: (host in gone, host in excluded))[:count]
    are_fit = len(best) == count and not any(host in gone or host in excluded for host in best)
    return [host for host in hosts if host in best], are_fit


def used_gpu_hours(paths: RunPaths, final: AttemptRecord) -> GpuHours | None:
    """Return the run's GPU hours up to ``final``, not on disk yet; None without a budget or GPUs."""
    budget, gpus_per_node = _gpu_budget(paths, final.attempt)
    if not budget or not gpus_per_node:
        return None
    earlier = [record for record in records(paths) if record.attempt < final.attempt]
    return GpuHours(gpu_hours_of([*earlier, final], gpus_per_node), budget, "slurm.max_gpu_hours")


def _gpu_budget(paths: RunPaths, attempt: int) -> tuple[float | None, float]:
    """Return the run's budget, which is its share of the file's, and its GPUs of a node."""
    if not run_facts(paths).get("changes"):
        section = (read_json(paths.resolved) or {}).get("slurm")
        if isinstance(section, dict):
            budget, gpus = section.get("max_gpu_hours"), section.get("gpus_per_node")
            if isinstance(budget, int | float) and isinstance(gpus, int) and budget > 0:
                return float(budget), gpus / (section.get("runs_per_gpu") or 1)
        return None, 0
    from hpc_train.run.create import effective_experiment  # the schema: 0.2 s, which few runs need

    slurm = effective_experiment(paths, attempt).slurm
    if slurm is None:
        return None, 0
    return slurm.max_gpu_hours, slurm.gpus_per_node / slurm.runs_per_gpu


def limit_words(record: AttemptRecord) -> str | None:
    """Return the sentence about a time limit that Slurm has cut; None if the job has the requested limit."""
    if record.time_limit_s is None or record.requested_limit_s is None:
        return None
    limit, requested = (f"{s / 60:g} min" for s in (record.time_limit_s, record.requested_limit_s))
    return f"Slurm gives the job {limit}, not the {requested} of slurm.time_limit"


def say(text: str) -> None:
    """Print a line to the batch script's output."""
    print(printable(f"hpc-train: {text}"), file=sys.stderr, flush=True)
