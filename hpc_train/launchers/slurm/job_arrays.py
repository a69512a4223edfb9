"""Runs as jobs: arrays of runs with the same request, submitted held, recorded, then released.

Imported by ``launcher`` only when runs are planned or started: it reads experiments and writes batch scripts.
"""

from __future__ import annotations

import re
import time
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING

from hpc_train.console import say, say_text
from hpc_train.errors import BadFileError, ExitCode, NoSchedulerError
from hpc_train.launchers.base import Ranks, StartRequest
from hpc_train.launchers.queue_changes import prepared
from hpc_train.launchers.slurm import (
    commands,
    options,
    pending_reasons,
    profiles,
    save_window,
    sbatch,
    sbatch_errors,
    script,
    unsatisfiable,
)
from hpc_train.launchers.slurm import submission as steps
from hpc_train.launchers.slurm.script import Batch
from hpc_train.launchers.slurm.submission import Submission
from hpc_train.paths import ExperimentPaths, RunPaths, SubmissionPaths
from hpc_train.recovery.history import nodes_to_exclude
from hpc_train.run.attempts import newest_number
from hpc_train.run.code import snapshot
from hpc_train.run.create import effective_experiment
from hpc_train.run.files import remove_folder
from hpc_train.validate.slurm_rules import max_nodes, min_nodes, ranks_on_each_node

if TYPE_CHECKING:
    from hpc_train.config.cluster_sections import SlurmConfig

#: Measured: with four idle nodes Slurm takes 1.4 s to evaluate a job after its release; a busy site longer.
_REASON_LOOKS = 2
_REASON_PAUSE_S = 1.5
_FINISH = (
    "what is made stays: submit the file again, or resume a run of it, to finish this; to train on this "
    "machine instead, submit with --local --new"
)
#: Placeholders, in scripts that are only shown, for names that a submission sets.
_SHOWN_TOKEN, _SHOWN_SNAPSHOT = "TOKEN", "SNAPSHOT"


@dataclass
class _Job:
    """One submission on its way."""

    paths: SubmissionPaths
    record: Submission
    runs: list[StartRequest]


class JobArrays:
    """The jobs of an experiment's runs, as ``Launcher``'s methods of these names describe."""

    def __init__(self) -> None:
        #: Within ``submitting``, before ``start``: the runs that are in a submission, once read.
        self._recorded: set[str] | None = None

    def ranks(self, slurm: SlurmConfig) -> Ranks:
        """Return the ranks of a run with this section."""
        per_node = ranks_on_each_node(slurm)
        nodes = max_nodes(slurm)
        limit_s = None if slurm.time_limit is None else slurm.time_limit * 60
        return Ranks(
            most=nodes * per_node,
            per_node=per_node,
            fewest=min_nodes(slurm) * per_node,
            gpu_hours=_gpu_hours(slurm),
            gpus=nodes * slurm.gpus_per_node,
            cores=nodes * unsatisfiable.needed_cpus(slurm),
            attempt_s=None if limit_s is None else limit_s - options.lead_of(slurm),
        )

    def scripts(self, folder: ExperimentPaths, runs: Sequence[StartRequest]) -> list[str]:
        """Return the batch scripts; the arrays' sizes are not bounded, since Slurm is not queried."""
        return [
            script.script_text(batch, len(group)) for batch, group in shown_batches(folder, runs, len(runs))
        ]

    @contextmanager
    def submitting(self, folder: ExperimentPaths) -> Iterator[None]:
        """Hold the lock; finish the submissions of killed commands."""
        sbatch.check_programs()
        with steps.locked(folder):
            self._recorded = None
            for paths, record in steps.unfinished(folder):
                if steps.is_elsewhere(record):
                    say(f"submission {record.token}: left to cluster {record.cluster}, where it began")
                elif steps.may_be_at_work(record.creator, record.created):
                    assert record.creator is not None
                    say(f"submission {record.token}: left to {record.creator.host}, where it may still run")
                else:
                    _finish(folder, paths, record)
            yield

    def is_unsubmitted(self, paths: RunPaths) -> bool:
        """Return True if no job and no submission has the run; reads submissions once per ``submitting``."""
        if not steps.is_without_job(paths):
            return False
        if self._recorded is None:
            self._recorded = steps.recorded_runs(paths.siblings)
        return paths.folder.name not in self._recorded

    def start(self, folder: ExperimentPaths, runs: Sequence[StartRequest]) -> ExitCode:
        """Submit all, held; release them once all are recorded. TRY_AGAIN if a job can never start."""
        self._recorded = None
        with prepared(runs):
            return self._submit(folder, runs)

    def _submit(self, folder: ExperimentPaths, runs: Sequence[StartRequest]) -> ExitCode:
        try:
            groups = _groups(runs, array_limit())
            jobs = [_prepared(folder, group) for group in groups]
            _send_all(jobs)
            for job in jobs:
                job.record = steps.place(folder, job.paths, job.record)
            for job in jobs:
                steps.release(job.paths, job.record)
        except NoSchedulerError as error:
            raise NoSchedulerError(f"{error}; {_FINISH}") from error
        except KeyboardInterrupt:
            say(f"interrupted; {_FINISH}")
            raise
        return _tell(jobs)


def shown_batches(
    folder: ExperimentPaths, runs: Sequence[StartRequest], limit: int
) -> list[tuple[Batch, list[StartRequest]]]:
    """Return the script and the runs of each job that these runs would be, at most ``limit`` per array."""
    shown = folder.submission(_SHOWN_TOKEN)
    return [(_batch(shown, group), group) for group in _groups(runs, limit)]


def _gpu_hours(slurm: SlurmConfig) -> float | None:
    if slurm.gpus_per_node == 0:
        return 0.0
    if slurm.time_limit is None:
        return None
    return max_nodes(slurm) * slurm.gpus_per_node * slurm.time_limit / 60


def _groups(runs: Sequence[StartRequest], limit: int) -> list[list[StartRequest]]:
    """Return the runs of each job: equal in all parts of the script, at most ``limit``, in order."""
    alike: dict[Hashable, list[StartRequest]] = {}
    for run in runs:
        alike.setdefault(_likeness(run), []).append(run)
    return [group[start : start + limit] for group in alike.values() for start in range(0, len(group), limit)]


def _likeness(run: StartRequest) -> Hashable:
    slurm = run.experiment.slurm
    assert slurm is not None
    profile = _profile(slurm.profile, run.problem)
    return (
        options.shape(run.experiment, profile),
        snapshot.link_target(run.paths),
        tuple(nodes_to_exclude(run.paths)),
    )


#: A sweep's runs share theirs.
_profile = cache(profiles.find)


def array_limit() -> int:
    """Return how many runs one array may hold; the maximum index is one less."""
    if not commands.config().get("MaxArraySize", "").isdigit():
        return 1
    at_most = [int(commands.config()["MaxArraySize"])]
    for word in commands.config().get("SchedulerParameters", "").split(","):
        name, _, value = word.partition("=")
        if name == "max_array_tasks" and value.isdigit():
            at_most.append(int(value))
    return max(1, min(at_most))


def _prepared(folder: ExperimentPaths, runs: list[StartRequest]) -> _Job:
    paths = steps.new_paths(folder)
    slurm = runs[0].experiment.slurm
    record = steps.prepare(
        paths,
        [run.paths for run in runs],
        _possible_batch(paths, runs),
        max_parallel=_throttle(runs),
        stays_held=bool(slurm and slurm.extra.get("hold")),
        cluster=commands.cluster_name(),
    )
    return _Job(paths, record, runs)


def _throttle(runs: Sequence[StartRequest]) -> int | None:
    return min((most for run in runs if (most := run.experiment.sweep.max_parallel)), default=None)


def _possible_batch(paths: SubmissionPaths, runs: Sequence[StartRequest]) -> Batch:
    """Return the script without the nodes that the runs exclude, unless they could start only there.

    Slurm accepts a held job with any request; it would wait forever once it is released.
    """
    batch, nodes = _batch(paths, runs), nodes_to_exclude(runs[0].paths)
    if not nodes or sbatch.could_start(batch):
        return batch
    say(f"can't exclude {', '.join(nodes)}: Slurm has too few other nodes for what the file requests")
    return _batch(paths, runs, on_any_node=True)


def _batch(paths: SubmissionPaths, runs: Sequence[StartRequest], *, on_any_node: bool = False) -> Batch:
    """Return the script of the runs' job; runs that do not exist yet have no code."""
    run = runs[0]
    code = snapshot.linked(run.paths)
    shown = run.paths.siblings.snapshots / _SHOWN_SNAPSHOT
    return script.batch(
        paths.folder,
        run.experiment,
        snapshot=code or shown,
        search_path=snapshot.search_path(run.paths) if code else [f"{shown}/package", f"{shown}/tree"],
        max_parallel=_throttle(runs),
        exclude=[] if on_any_node else list(nodes_to_exclude(run.paths)),
        problem=run.problem,
    )


def _send_all(jobs: Sequence[_Job]) -> None:
    """Submit all, held. If Slurm refuses one, all are withdrawn: raises BadFileError."""
    try:
        for job in jobs:
            _send(job)
    except commands.RefusedError as error:
        for sent_job in jobs:
            _take_back(sent_job, [run.paths for run in sent_job.runs], f"Slurm refused it: {error.words}")
        raise BadFileError(_refusal(job.runs[0], error.words)) from None


def _send(job: _Job) -> None:
    assert job.record.batch is not None
    job.record = replace(job.record, job_id=sbatch.send(job.paths, job.record.batch, len(job.runs)))


def _take_back(job: _Job, runs: Sequence[RunPaths], reason: str) -> None:
    if job.record.job_id is not None:
        commands.cancel_jobs([job.record.job_id])
    for run in runs:
        steps.withdraw(run, reason)
    remove_folder(job.paths.folder)


def _refusal(run: StartRequest, output: str) -> str:
    advice = sbatch_errors.advice(output, run.experiment)
    problem = run.problem or (lambda key, message, remedy: f"{run.paths.folder}: {key}: {message}; {remedy}")
    text = re.sub(r"sbatch: (error: |fatal: )?", "", output)
    return problem(advice.key, f"Slurm refuses it: {text}", advice.remedy)


def _finish(folder: ExperimentPaths, paths: SubmissionPaths, record: Submission) -> None:
    """Continue an interrupted submission."""
    if record.state == steps.PREPARED:
        placed = _sent_again(folder, paths, record)
        if placed is None:
            return
        record = placed
    steps.release(paths, record)
    say(f"{_job_words(record)}: finished what another command had begun to submit")


def _sent_again(folder: ExperimentPaths, paths: SubmissionPaths, record: Submission) -> Submission | None:
    """Find the job of a prepared record or submit it; None if none of its runs can be submitted."""
    job_id = sbatch.own_job(paths)
    if job_id is not None:
        return steps.place(folder, paths, replace(record, job_id=job_id))
    existing = [run for run_id in record.runs if (run := RunPaths(folder.folder / run_id)).run.is_file()]
    runs = [run for run in existing if not run.cancelled.exists()]
    job = _Job(paths, replace(record, runs=[run.folder.name for run in runs]), [])
    reason = "its submission was cut short, and can't be done again"
    try:
        job.runs = [StartRequest(run, effective_experiment(run, newest_number(run) + 1)) for run in runs]
        if runs and record.batch is not None:
            steps.write(paths, job.record)
            _send(job)
            return steps.place(folder, paths, job.record)
    except commands.RefusedError as error:
        reason = f"Slurm refused it: {error.words}"
        say(_refusal(job.runs[0], error.words))
    except BadFileError as error:
        say_text(str(error))
    _take_back(job, runs, reason)
    return None


def _tell(jobs: Sequence[_Job]) -> ExitCode:
    """Print the jobs; return TRY_AGAIN if one of them can never start."""
    for job in jobs:
        held = ", held: `scontrol release` lets it start" if job.record.stays_held else ""
        say(f"{_job_words(job.record)}{held}")
    if len(jobs) > 1 and jobs[0].record.max_parallel is not None:
        say(f"  max_parallel holds for each of the {len(jobs)} jobs by itself")
    for warning in dict.fromkeys(text for job in jobs for text in _short_times(job)):
        say(f"  {warning}")
    return ExitCode.TRY_AGAIN if _say_stuck(jobs) else ExitCode.DONE


def _short_times(job: _Job) -> list[str]:
    run = job.runs[0]
    assert run.experiment.slurm is not None
    profile = _profile(run.experiment.slurm.profile, run.problem)
    return save_window.warnings(profile.applied(run.experiment), run.paths.siblings)


def _job_words(record: Submission) -> str:
    """Return ``job 12: an array of 6 runs, 2 at a time``."""
    count = len(record.runs)
    if count == 1:
        return f"job {record.job_id}: run {record.runs[0]}"
    throttle = f", {record.max_parallel} at a time" if (record.max_parallel or count) < count else ""
    return f"job {record.job_id}: an array of {count} runs{throttle}"


def _say_stuck(jobs: Sequence[_Job]) -> bool:
    """Print the jobs that Slurm accepted but will never start, and why; return True if there is one.

    Slurm determines this a moment after the submission.
    """
    by_id = {str(job.record.job_id): job for job in jobs if not job.record.stays_held}
    is_stuck = False
    for job_id, reasons in _judged(list(by_id)).items():
        for reason in sorted(reasons):
            if text := pending_reasons.never_starts(reason):
                is_stuck = True
                say(f"  job {job_id} {text}")
                for line in _causes(by_id[job_id], reason):
                    say(f"    {line}")
            elif sbatch_errors.may_never_start(reason):
                say(f"  job {job_id} waits: {reason}; if it alone exceeds that limit, it never starts")
    return is_stuck


def _causes(job: _Job, reason: str) -> list[str]:
    """Return the requests that no node satisfies if Slurm's reason does not name them."""
    if reason != "BadConstraints":
        return []
    run = job.runs[0]
    assert run.experiment.slurm is not None
    slurm = _profile(run.experiment.slurm.profile, run.problem).applied(run.experiment).slurm
    assert slurm is not None
    if causes := unsatisfiable.unsatisfied(slurm):
        return causes
    requests = ", ".join(unsatisfiable.requested(slurm))
    return [f"no node satisfies all of: {requests}; `sinfo -N -o '%N %c %m %G %f'` shows what nodes have"]


def _judged(job_ids: Sequence[str]) -> dict[str, set[str]]:
    """Return why the jobs wait, once Slurm has evaluated them, or after a while."""
    reasons_by_job: dict[str, set[str]] = {}
    for look in range(_REASON_LOOKS if job_ids else 0):
        time.sleep(_REASON_PAUSE_S * (look > 0))
        try:
            reasons_by_job = steps.reasons(job_ids)
        except NoSchedulerError:
            return {}  # the jobs are submitted; status queries again
        if not any("None" in reasons for reasons in reasons_by_job.values()):
            break
    return reasons_by_job
