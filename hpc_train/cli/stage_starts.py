"""Stages of a file: starts each after the former one; `resume` of a stage lets the later ones follow."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from hpc_train.console import say
from hpc_train.errors import ExitCode
from hpc_train.experiment.plan.staged_file import StagedFile
from hpc_train.experiment.validate.loading import Loaded
from hpc_train.launchers.base import Launcher
from hpc_train.launchers.lookup import launcher_of, statuses
from hpc_train.paths import RunPaths
from hpc_train.run import stage_order
from hpc_train.run.find import run_name
from hpc_train.run.run_status import CANCELLED, GOING_ON, read_status, run_facts


class Submission(Protocol):
    """The submission of one stage."""

    def create(self) -> RunPaths:
        """Create the run, unless it exists."""

    def start_all(self) -> tuple[ExitCode, list[RunPaths]]:
        """Create the run, if it does not exist, and start it."""


def start_stages(
    launcher: Launcher, file: StagedFile, count: int, submission: Callable[[int, Loaded], Submission]
) -> tuple[ExitCode, list[RunPaths]]:
    """Start the stages: in a queue each waits for the former one, elsewhere each is followed to its end.

    Elsewhere all runs are created before the first one starts. Stops at a stage that does not complete.
    ``submission``: of the stage of this index. Return the worst exit code, and the runs.
    """
    runs: list[RunPaths] = []
    codes = [ExitCode.DONE]
    after = weights = None
    created: list[Submission] = []
    for index in range(count):
        loaded = file.load(index, after, weights)  # with --new, a run has another id than planned
        created.append(submission(index, loaded))
        if launcher.is_queue:
            say(f"stage {index + 1} of {count}:")
            code, (paths,) = created[-1].start_all()
            codes.append(code)
        else:
            paths = created[-1].create()
        runs.append(paths)
        after = f"{paths.siblings.folder.name}/{paths.folder.name}"
        weights = after if loaded.experiment.workload == "training" else weights
        if launcher.is_queue and not _leads_on(paths, is_queue=True, left=count - index - 1):
            return max(codes), runs
    for index, paths in enumerate(runs if not launcher.is_queue else ()):
        say(f"stage {index + 1} of {count}: {run_name(paths)}")
        if read_status(paths).state != CANCELLED or stage_order.has_begun(paths):
            codes.append(created[index].start_all()[0])
        if not _leads_on(paths, is_queue=False, left=count - index - 1):
            break
    return max(codes), runs


def _leads_on(paths: RunPaths, *, is_queue: bool, left: int) -> bool:
    """Return True if the next stage may be submitted; else print how the ``left`` later ones continue."""
    (status,) = statuses([paths])
    if status.state == "completed" or (is_queue and status.state in GOING_ON):
        return True
    if left:
        name = run_name(paths)
        say(f"{name}: {status.state}; `hpc-train resume {name}` lets the {left} later stages follow")
    return False


def is_created_only(paths: RunPaths, launcher: Launcher, name: str) -> bool:
    """Return True for a stage that a command has created for the launcher of this name, and not started."""
    facts = run_facts(paths)
    is_of_launcher = not launcher.is_queue and facts.get("launcher") == name
    return is_of_launcher and bool(facts.get("stage")) and not stage_order.has_begun(paths)


def waiting(runs: Sequence[RunPaths]) -> list[RunPaths]:
    """Return the runs that are stages which wait for another run."""
    return [paths for paths in runs if stage_order.waiting_words(paths) is not None]


def say_waiting(paths: RunPaths, resumed: Sequence[RunPaths]) -> ExitCode:
    """Print why a stage is not resumed by itself, unless a run that is ``resumed`` lets it follow."""
    if any(paths in stage_order.later(run) for run in resumed):
        return ExitCode.DONE
    before = stage_order.former(paths)
    assert before is not None
    say(f"{run_name(paths)}: {stage_order.waiting_words(paths)}; nothing started")
    return ExitCode.DONE if read_status(before).state in GOING_ON else ExitCode.FAILED


def follow(
    resumed: Sequence[RunPaths],
    before: Sequence[str],
    start: Callable[[RunPaths], list[ExitCode]],
    is_queued: Callable[[RunPaths], bool],
) -> list[ExitCode]:
    """Start the stages after runs that were resumed: a waiting job is replaced, since it waits for a job that
    has ended. Elsewhere than in a queue they start once the former one has completed.

    ``before``: the runs' states before; a cancelled stage follows only a run that was cancelled, too.
    ``start`` starts a run that has no job, ``is_queued`` returns True if it does so in a queue.
    """
    codes: list[ExitCode] = []
    for run, state in zip(resumed, before, strict=True):
        later = [] if state in {*GOING_ON, "completed"} else stage_order.later(run)
        if not later or statuses([run])[0].state not in {*GOING_ON, "completed"}:
            continue
        for paths in later:
            is_cancelled = read_status(paths).state == CANCELLED
            if is_cancelled and state != CANCELLED:
                break
            if not is_queued(paths) and stage_order.waiting_words(paths) is not None:
                break
            if not is_cancelled:
                launcher_of(paths).cancel([paths])
            codes += start(paths)
    return codes
