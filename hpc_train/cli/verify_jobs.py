"""``verify --replay --submit``: submits jobs that repeat a run's stretches, and joins their results.

Each job calls ``cli.verify`` with the number of its part, and leaves a record in the run's folder
(``run.verification_parts``). A later ``verify RUN`` reads the records.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypedDict

from hpc_train.cli.code import is_new
from hpc_train.cli.replay_options import VerifyOptions
from hpc_train.cli.replayed_run import ReplayedRun
from hpc_train.console import say
from hpc_train.errors import BadFileError, NoSchedulerError, UsageError, counted
from hpc_train.launchers.base import ArrayLauncher, JobArray
from hpc_train.launchers.lookup import DEFAULT, load_launcher
from hpc_train.package_path import PACKAGE_PARENT
from hpc_train.paths import RunPaths
from hpc_train.report.reproduction import VerifiedStretch
from hpc_train.run.code.snapshot import search_path
from hpc_train.run.find import run_name
from hpc_train.run.verification_parts import PartsRequest

#: Jobs of an array, unless ``--slots`` is given: each imports torch and reads the data. Assumed.
_MOST_JOBS = 20


class VerifyingJobs(TypedDict):
    """The array of ``verify --replay --submit``."""

    job: str
    parts: int
    #: Parts whose jobs wait or run.
    unfinished: list[int]
    #: Part → state of its job, which has ended without a result.
    failed: dict[str, str]
    #: The newest step that the jobs repeat.
    last: int


def submit(run: ReplayedRun, options: VerifyOptions, ends: Sequence[int]) -> VerifyingJobs:
    """Submit the array. ``ends``: the last steps of the stretches.

    Raises UsageError if the experiment requests no resources, or jobs still verify the run.
    """
    experiment, paths, launcher = run.experiment, run.paths, load_launcher(DEFAULT)
    assert isinstance(launcher, ArrayLauncher)
    if problems := launcher.problems(experiment):
        raise UsageError(
            f"--submit: {problems[0].key} of {run.name} {problems[0].message}; omit --submit to repeat the "
            "stretches on this machine"
        )
    jobs, _, _ = joined(paths)
    if jobs is not None and jobs["unfinished"]:
        raise UsageError(
            f"{run.name}: job {jobs['job']} of {launcher.title} still verifies it; wait for it, or cancel it"
        )
    places = [PACKAGE_PARENT] if is_new(options.code) else search_path(paths) or [PACKAGE_PARENT]
    parts = min(options.slots or _MOST_JOBS, len(ends))
    request = PartsRequest.new(parts, ends[-1], options.devices, options.tolerance, options.code)
    request.write(paths)
    ranks = options.devices or run.machine()["ranks"] or 1
    array = JobArray(paths, experiment, "cli.verify", parts, ranks, places, paths.verification)
    job = launcher.submit_array(array)
    replace(request, job=job).write(paths)
    say(
        f"job {job}: an array of {counted(parts, 'job')} repeats {counted(len(ends), 'stretch')} of "
        f"{run.name}; `hpc-train verify {run.name}` shows the results"
    )
    return VerifyingJobs(
        job=job, parts=parts, unfinished=list(range(1, parts + 1)), failed={}, last=request.last
    )


def joined(paths: RunPaths) -> tuple[VerifyingJobs | None, list[VerifiedStretch], float]:
    """Return the newest array, the stretches that its jobs have repeated, and the seconds of the longest job.

    None without an array. Jobs whose state is unknown count as unfinished.
    """
    request = PartsRequest.read(paths)
    if request is None or request.job is None:
        return None, [], 0.0
    launcher = load_launcher(DEFAULT)
    assert isinstance(launcher, ArrayLauncher)
    missing = sorted({*range(1, request.parts + 1)} - request.records(paths).keys())
    ended: dict[int, str] = {}
    try:
        ended = launcher.ended_jobs(request.job, missing) if missing else {}
    except NoSchedulerError as error:
        say(f"{run_name(paths)}: the state of job {request.job} is unknown: {error}")
    records = request.records(paths)  # again: a job may have ended meanwhile
    jobs = VerifyingJobs(
        job=request.job,
        parts=request.parts,
        unfinished=[part for part in missing if part not in records and part not in ended],
        failed={str(part): state for part, state in ended.items() if part not in records},
        last=request.last,
    )
    try:
        stretches: list[Any] = [row for record in records.values() for row in record["stretches"]]
        seconds = max((float(record["seconds"]) for record in records.values()), default=0.0)
        stretches.sort(key=lambda stretch: stretch["first"])
    except (KeyError, TypeError, ValueError) as error:
        raise BadFileError(f"{paths.verification}: is damaged: {error!r}; remove it") from error
    return jobs, stretches, seconds


def jobs_lines(jobs: VerifyingJobs, paths: RunPaths, newest: int) -> list[str]:
    """Return a line on each part without a result, and on steps that the jobs have not repeated."""
    name = run_name(paths)
    lines = [
        f"{name}: part {part} of {jobs['parts']}: job {jobs['job']}_{part} has ended without a result "
        f"({state}); its output is in {paths.verification}"
        for part, state in jobs["failed"].items()
    ]
    if unfinished := jobs["unfinished"]:
        lines.append(
            f"{name}: {len(unfinished)} of {counted(jobs['parts'], 'part')} wait or run in job {jobs['job']}"
        )
    if newest > jobs["last"]:
        lines.append(f"{name}: steps {jobs['last'] + 1} to {newest} are newer than job {jobs['job']}")
    return lines
