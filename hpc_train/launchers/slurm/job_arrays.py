"""Runs as jobs: arrays of runs with the same request, submitted held, recorded, then released.

Imported by ``launcher`` only when runs are planned or started: it reads experiments and writes batch scripts.
"""

from __future__ import annotations

import re
import time
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cache
from pathlib import Path

from hpc_train.console import say, say_text
from hpc_train.errors import BadFileError, ExitCode, NoSchedulerError, UserError, counted
from hpc_train.launchers.base import JobForecast, KeyProblem, StartRequest
from hpc_train.launchers.slurm import commands, job_refusals, options, profiles, queue, sbatch, script
from hpc_train.launchers.slurm import submission as steps
from hpc_train.launchers.slurm.submission import Batch, Sharing, Submission
from hpc_train.paths import ExperimentPaths, RunPaths, SubmissionPaths
from hpc_train.recovery.history import nodes_to_exclude
from hpc_train.run import stage_order
from hpc_train.run.attempts import job_ids, newest_number
from hpc_train.run.code import snapshot
from hpc_train.run.create import effective_experiment
from hpc_train.run.files import remove_folder, write_text
from hpc_train.run.find import run_name
from hpc_train.run.run_status import run_facts

#: Measured: with four idle nodes Slurm takes 1.4 s to evaluate a job after its release; a busy site longer.
_REASON_LOOKS = 2
_REASON_PAUSE_S = 1.5
#: Reasons of the first moment; then Slurm names the limit.
_UNDECIDED = {"None", "PartitionConfig"}
_FINISH = (
    "what is made stays: submit the file again, or resume a run of it, to finish this; to train on this "
    "machine instead, submit with --local --new"
)
#: ``sbatch: Job 1 to start at 2026-11-25T01:42:26 using 1 processors on nodes n1 in partition low``.
_STARTS = re.compile(r"to start at (\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)\b.*? on (?:nodes? )?(\S+)")
#: Jobs of a sweep whose start is queried: each query takes a fraction of a second.
_JOBS_ASKED = 20
#: Placeholders, in scripts that are only shown, for names that a submission sets.
_SHOWN_TOKEN, _SHOWN_SNAPSHOT = "TOKEN", "SNAPSHOT"


@dataclass
class _Job:
    paths: SubmissionPaths
    record: Submission
    runs: list[StartRequest]


def scripts(folder: ExperimentPaths, runs: Sequence[StartRequest]) -> list[str]:
    """Return the batch scripts; the arrays' sizes are not bounded, since Slurm is not queried."""
    return [script.script_text(batch, len(group)) for batch, group in shown_batches(folder, runs, len(runs))]


def forecast(folder: ExperimentPaths, runs: Sequence[StartRequest]) -> list[JobForecast]:
    """Return the forecast for each job of the runs; empty if Slurm is not installed, as for plans elsewhere.

    Raises NoSchedulerError if Slurm does not answer, BadFileError if no script can be made.
    """
    try:
        sbatch.check_programs()
    except NoSchedulerError:
        return []
    batches = shown_batches(folder, runs, array_limit())
    return [_forecast(batch, group) for batch, group in batches[:_JOBS_ASKED]]


def _forecast(batch: Batch, runs: Sequence[StartRequest]) -> JobForecast:
    paths, experiment = [run.paths for run in runs], runs[0].experiment
    try:
        output = sbatch.tested(batch, len(runs))
    except commands.RefusedError as error:
        problems = job_refusals.refused_in_test(error.words, experiment, len(runs))
        return JobForecast(paths, note=job_refusals.without_prefix(error.words), problems=problems)
    problems = job_refusals.time_limit_problems(experiment)
    match = _STARTS.search(output)
    if match is None:
        return JobForecast(paths, problems=problems)
    start = datetime.fromisoformat(match[1]).replace(tzinfo=UTC)
    return JobForecast(paths, start.isoformat(), match[2], problems=problems)


def shared_jobs(runs: Sequence[StartRequest]) -> list[str]:
    """Return a line on each group of runs that share jobs: how many jobs, and the request of one."""
    lines = []
    for group in _groups([run for run in runs if run.experiment.slurm is not None], len(runs)):
        run, sharing = group[0], _sharing(group)
        slurm = run.experiment.slurm
        assert slurm is not None
        if sharing.runs_per_task == 1:
            continue
        of_job = options.of_slots(_profile(slurm.profile, run.problem).applied(run.experiment), sharing.slots)
        assert of_job.slurm is not None
        size = options.ranks(of_job.slurm)
        parts = [counted(size.most or 0, "rank"), counted(size.cores or 0, "core")]
        parts += [counted(of_job.slurm.gpus_per_node, "GPU")] if size.gpus else []
        parts += [f"{of_job.slurm.mem_gb} GB"] if of_job.slurm.mem_gb else []
        hours = (size.gpu_hours or 0.0) * slurm.runs_per_gpu  # of the job, which has whole GPUs
        parts += [f"at most {hours:g} GPU-hours"] if hours else []
        jobs = counted(-(-len(group) // sharing.runs_per_task), "job")
        on_gpu = f" ({slurm.runs_per_gpu} on each GPU)" if slurm.runs_per_gpu > 1 else ""
        text = f"{len(group)} runs in {jobs}, {sharing.slots} at a time in each{on_gpu}"
        lines.append(f"{text}; a job requests {', '.join(parts)}")
    return lines


@contextmanager
def submitting(folder: ExperimentPaths) -> Iterator[None]:
    """Hold the experiment's lock; first finish the submissions of killed commands."""
    sbatch.check_programs()
    with steps.locked(folder):
        for paths, record in steps.unfinished(folder):
            if steps.is_elsewhere(record):
                say(f"submission {record.token}: left to cluster {record.cluster}, where it began")
            elif steps.may_be_at_work(record.creator, record.created):
                assert record.creator is not None
                say(f"submission {record.token}: left to {record.creator.host}, where it may still run")
            else:
                _finish(folder, paths, record)
        yield


def start(folder: ExperimentPaths, runs: Sequence[StartRequest]) -> ExitCode:
    """Submit all, held; release them once all are recorded; withdraw those that can never start."""
    with prepared(runs):
        jobs = _submit(folder, runs)
        refusals_by_job = _never_starting(jobs)
        for job_id in refusals_by_job:
            _withdraw(jobs[job_id], refusals_by_job[job_id][0])
        lines = list(dict.fromkeys(line for lines in refusals_by_job.values() for line in lines))
        if len(refusals_by_job) == len(jobs):
            raise BadFileError(lines)
    _report([job for job_id, job in jobs.items() if job_id not in refusals_by_job])
    for line in lines:
        say(line)
    return ExitCode.BAD_FILE if lines else ExitCode.DONE


@contextmanager
def prepared(runs: Sequence[StartRequest]) -> Iterator[None]:
    """Prepare the runs' next attempts; undo all changes on a BadFileError."""
    before: dict[Path, str | None] = {}
    try:
        for run in runs:
            paths = run.paths
            for path in (paths.run, paths.status, paths.cancelled):
                before[path] = path.read_text("utf-8") if path.exists() else None
            run.prepare(newest_number(paths) + 1)
            paths.cancelled.unlink(missing_ok=True)
        yield
    except BadFileError:
        for path, text in before.items():
            if not path.parent.exists():
                continue  # a run that was never queued has been removed
            if text is None:
                path.unlink(missing_ok=True)
            else:
                write_text(path, text, sync=True)
        raise


def _submit(folder: ExperimentPaths, runs: Sequence[StartRequest]) -> dict[str, _Job]:
    try:
        jobs = [_prepared(folder, group) for group in _groups(runs, array_limit())]
        _send_all(jobs)
        for job in jobs:
            job.record = steps.place(folder, job.paths, job.record)
        for job in jobs:
            steps.release(job.paths, job.record)
    except NoSchedulerError as error:
        raise NoSchedulerError(f"{error}; {_FINISH}") from error
    except commands.RefusedError as error:  # to release a job, which stays held
        raise UserError(f"{error}; {_FINISH}") from error
    except KeyboardInterrupt:
        say(f"interrupted; {_FINISH}")
        raise
    return {str(job.record.job_id): job for job in jobs}


def shown_batches(
    folder: ExperimentPaths, runs: Sequence[StartRequest], limit: int
) -> list[tuple[Batch, list[StartRequest]]]:
    """Return the script and the runs of each job that these runs would be, at most ``limit`` per array."""
    shown = folder.submission(_SHOWN_TOKEN)
    return [(_batch(shown, group), group) for group in _groups(runs, limit)]


def _groups(runs: Sequence[StartRequest], limit: int) -> list[list[StartRequest]]:
    """Return the runs of each job: equal in all parts of the script, at most ``limit``, in order."""
    alike: dict[Hashable, list[StartRequest]] = {}
    for run in runs:
        slurm = run.experiment.slurm
        assert slurm is not None
        shape = options.shape(run.experiment, _profile(slurm.profile, run.problem))
        excluded = tuple(nodes_to_exclude(run.paths))
        likeness = (shape, snapshot.link_target(run.paths), excluded, _dependency(run.paths))
        alike.setdefault(likeness, []).append(run)
    groups = []
    for group in alike.values():
        size = limit * _sharing(group).runs_per_task
        groups += [group[start : start + size] for start in range(0, len(group), size)]
    return groups


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
    batch, cluster = _possible_batch(paths, runs), commands.cluster_name()
    held, throttle = bool(slurm and slurm.extra.get("hold")), _throttle(runs)
    all_paths = [run.paths for run in runs]
    record = steps.prepare(paths, all_paths, batch, max_parallel=throttle, stays_held=held, cluster=cluster)
    return _Job(paths, record, runs)


def _throttle(runs: Sequence[StartRequest]) -> int | None:
    """Return how many runs may be active at a time. Of shared jobs there are only as many as that needs."""
    return None if _sharing(runs).runs_per_task > 1 else _max_parallel(runs)


def _max_parallel(runs: Sequence[StartRequest]) -> int | None:
    return min((most for run in runs if (most := run.experiment.sweep.max_parallel)), default=None)


def _sharing(runs: Sequence[StartRequest]) -> Sharing:
    slurm = runs[0].experiment.slurm
    assert slurm is not None
    return steps.sharing(len(runs), slurm.runs_per_job, _max_parallel(runs))


def _possible_batch(paths: SubmissionPaths, runs: Sequence[StartRequest]) -> Batch:
    """Return the script without the nodes that the runs exclude, unless they could start only there.

    Slurm accepts a held job with any request; it would wait forever once it is released.
    """
    batch, nodes = _batch(paths, runs), nodes_to_exclude(runs[0].paths)
    if not nodes or sbatch.could_start(batch):
        return batch
    say(f"can't exclude {', '.join(nodes)}: Slurm has too few other nodes for what the file requests")
    return _batch(paths, runs, on_any_node=True)


def _dependency(paths: RunPaths) -> str | None:
    """Return the job whose success the run's job waits for, as ``afterok:12``; None unless it is a stage.

    A requeued job keeps its id. ``resume`` submits the stages after a run again, since its job is new.
    """
    before = stage_order.former(paths)
    if before is None or stage_order.waiting_words(paths) is None:
        return None
    jobs = job_ids(run_facts(before))
    if not jobs:
        raise BadFileError(f"{run_name(paths)}: waits for {run_name(before)}, which has no job of Slurm")
    return f"afterok:{jobs[-1]}"


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
        dependency=_dependency(run.paths),
        sharing=_sharing(runs),
    )


def _send_all(jobs: Sequence[_Job]) -> None:
    """Submit all, held. If Slurm refuses one, all are withdrawn: raises BadFileError."""
    try:
        for job in jobs:
            _send(job)
    except commands.RefusedError as error:
        for sent_job in jobs:
            _withdraw(sent_job, f"Slurm refused it: {error.words}")
        num_runs = sum(len(other.runs) for other in jobs)
        raise BadFileError(_refusal(job.runs[0], error.words, num_runs)) from None


def _send(job: _Job) -> None:
    assert job.record.batch is not None
    job.record = replace(job.record, job_id=sbatch.send(job.paths, job.record.batch, len(job.runs)))


def _withdraw(job: _Job, reason: str) -> None:
    """Cancel the job, if it was submitted, and remove its runs, or mark them as failed."""
    if job.record.job_id is not None:
        commands.cancel_jobs([job.record.job_id])
    for run in job.runs:
        steps.withdraw(run.paths, reason, job.record.job_id)
    remove_folder(job.paths.folder)


def _refusal(run: StartRequest, output: str, num_runs: int) -> list[str]:
    return _lines(run, job_refusals.refused(output, run.experiment, num_runs))


def _lines(run: StartRequest, problems: Sequence[KeyProblem]) -> list[str]:
    render = run.problem or (lambda key, message, remedy: f"{run.paths.folder}: {key}: {message}; {remedy}")
    return [render(*problem) for problem in problems]


def _finish(folder: ExperimentPaths, paths: SubmissionPaths, record: Submission) -> None:
    if record.state == steps.PREPARED:
        placed = _sent_again(folder, paths, record)
        if placed is None:
            return
        record = placed
    steps.release(paths, record)
    say(f"{_description(record)}: finished what another command had begun to submit")


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
        for line in _refusal(job.runs[0], error.words, len(runs)):
            say(line)
    except BadFileError as error:
        say_text(str(error))
    for run in runs:
        steps.withdraw(run, reason)
    remove_folder(paths.folder)
    return None


def _report(jobs: Sequence[_Job]) -> None:
    for job in jobs:
        held = ", held: `scontrol release` lets it start" if job.record.stays_held else ""
        say(f"{_description(job.record)}{held}")
    if len(jobs) > 1 and jobs[0].record.max_parallel is not None:
        say(f"  max_parallel applies to each of the {len(jobs)} jobs separately")
    for warning in dict.fromkeys(text for job in jobs for text in _short_times(job)):
        say(f"  {warning}")


def _short_times(job: _Job) -> list[str]:
    run = job.runs[0]
    assert run.experiment.slurm is not None
    profile = _profile(run.experiment.slurm.profile, run.problem)
    return options.save_warnings(profile.applied(run.experiment), run.paths.siblings)


def _description(record: Submission) -> str:
    count = len(record.runs)
    if count == 1:
        return f"job {record.job_id}: run {record.runs[0]}"
    if record.batch is not None and record.batch.runs_per_task > 1:
        tasks = record.batch.num_tasks(count)
        return f"job {record.job_id}: {count} runs in " + (f"an array of {tasks} jobs" if tasks > 1 else "it")
    throttle = f", {record.max_parallel} at a time" if (record.max_parallel or count) < count else ""
    return f"job {record.job_id}: an array of {count} runs{throttle}"


def _never_starting(jobs: Mapping[str, _Job]) -> dict[str, list[str]]:
    """Return the lines on jobs that Slurm has accepted and will never start, by job.

    Slurm checks a job's limits when it is released. A job of several partitions is judged by one of them
    only, so it is not included.
    """
    ids = [job_id for job_id, job in jobs.items() if not job.record.stays_held]
    lines_by_job = {}
    reasons_by_job = _pending_reasons(ids)
    for job_id in ids:
        reasons = reasons_by_job.get(job_id, set())
        run, batch = jobs[job_id].runs[0], jobs[job_id].record.batch
        assert batch is not None
        if "," in str(batch.parameters.get("partition")):
            continue
        if stage_order.former(run.paths) is not None:  # it may have failed: `resume` submits this again
            reasons = reasons - {"DependencyNeverSatisfied"}
        refusals = [job_refusals.never_starts(reason, run.experiment) for reason in sorted(reasons)]
        problems = [problem for of_reason in refusals for problem in of_reason]
        if problems:
            lines_by_job[job_id] = _lines(run, problems)
        elif shared := sorted(filter(queue.is_shared_limit, reasons)):
            say(f"  job {job_id} waits: {shared[0]}; if it alone exceeds that limit, it never starts")
    return lines_by_job


def _pending_reasons(job_ids: Sequence[str]) -> dict[str, set[str]]:
    reasons_by_job: dict[str, set[str]] = {}
    for look in range(_REASON_LOOKS if job_ids else 0):
        time.sleep(_REASON_PAUSE_S * (look > 0))
        try:
            reasons_by_job = steps.reasons(job_ids)
        except NoSchedulerError:
            return {}  # the jobs are submitted; status queries again
        if not any(reasons & _UNDECIDED for reasons in reasons_by_job.values()):
            break
    return reasons_by_job
