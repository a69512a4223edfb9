"""The run folders of a submit: created, or the status of existing ones."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpc_train.cli.changes import changes_on_resume, value_at
from hpc_train.cli.next_steps import has_saved, next_steps
from hpc_train.config.schema import Experiment
from hpc_train.console import say
from hpc_train.errors import BadFileError, ExitCode
from hpc_train.paths import ExperimentPaths, RunPaths
from hpc_train.plan.planning import PlannedRun
from hpc_train.run.attempts import newest_number
from hpc_train.run.create import Origin, Surroundings, create_run, effective_experiment, inputs_differ
from hpc_train.run.files import in_parallel, sync_folder
from hpc_train.run.find import is_run, run_name
from hpc_train.run.run_status import GOING_ON, INTERRUPTED, RunStatus
from hpc_train.validate.loading import Loaded


@dataclass(frozen=True)
class SubmitContext:
    """Facts that all runs of a submit share."""

    loaded: Loaded
    launcher: str
    snapshot: Path | None
    surroundings: Surroundings

    @property
    def origin(self) -> Origin | None:
        """The file, as an absolute path, and the overrides that ``run.json`` records; None for a dict."""
        if not self.loaded.source_name:
            return None
        file = Path(self.loaded.source_name).absolute()
        return Origin(str(file), list(self.loaded.overrides))


def create(paths: RunPaths, run: PlannedRun, context: SubmitContext) -> bool:
    """Create the run's folder; False if it exists."""
    return create_run(
        paths,
        run.experiment,
        paths.folder.name,
        run.total_steps,
        launcher=context.launcher,
        snapshot=context.snapshot,
        surroundings=context.surroundings,
        origin=context.origin,
        values=run.values,
        layout=run.layout,
    )


def create_all(
    folder: ExperimentPaths, runs: Sequence[PlannedRun], context: SubmitContext
) -> list[tuple[RunPaths, bool]]:
    """Create the runs in the experiment's folder; return each one's paths, and False if it existed."""
    paths = [RunPaths(folder.folder / run.id) for run in runs]
    created = in_parallel(lambda pair: create(*pair, context), zip(paths, runs, strict=True))
    if any(created):
        sync_folder(folder.folder)
    return list(zip(paths, created, strict=True))


def create_beside(
    paths: RunPaths,
    run: PlannedRun,
    context: SubmitContext,
    make_free: Callable[[RunPaths], None],
) -> RunPaths:
    """Create the run under the first free name of ``<id>-2``, ``<id>-3``, …

    ``make_free`` may remove the leftovers of a killed command.
    """
    for number in itertools.count(2):
        other = RunPaths(paths.folder.with_name(f"{run.id}-{number}"))
        make_free(other)
        if create(other, run, context):
            sync_folder(other.folder.parent)
            return other
    raise AssertionError("itertools.count ends")


def existing_run(paths: RunPaths, run: PlannedRun) -> RunPaths:
    """Return the run of this id whose data files are the current ones; ``paths`` if there is none."""
    beside = (RunPaths(paths.folder.with_name(f"{run.id}-{number}")) for number in itertools.count(2))
    for existing in itertools.chain([paths], itertools.takewhile(is_run, beside)):
        if not inputs_differ(existing, run.experiment):
            return existing
    return paths


def say_existing(paths: RunPaths, status: RunStatus, wanted: Experiment, *, is_queued: bool) -> ExitCode:
    """Report the status of an existing run, and the commands that would change it to ``wanted``."""
    run_id = run_name(paths)
    if others := inputs_differ(paths, wanted):
        what = " and ".join(
            f"{key} ({value_at(wanted.model_dump(mode='json'), tuple(key.split('.')))})" for key in others
        )
        say(
            f"{run_id}: {status.state}, in {paths.folder}, but of other files than {what} has now; nothing "
            "started: restore the files, or train on the new ones in a new run with --new"
        )
        return ExitCode.FAILED
    if status.state == "completed":
        say(f"{run_id}: completed already, in {paths.folder}; nothing started (--new trains it again)")
        return ExitCode.DONE
    reason = f" ({status.reason})" if status.reason else ""
    if status.state in GOING_ON:
        local = (
            "" if is_queued or status.state != "pending" else " (--new starts another one on this machine)"
        )
        say(f"{run_id}: {status.state} already{reason}, in {paths.folder}; nothing started{local}")
        return ExitCode.DONE
    say(f"{run_id}: {status.state}{reason} at step {status.step}, in {paths.folder}; nothing started")
    for line in next_steps(paths, status, changes_since(paths, wanted, is_queued=is_queued)):
        say(f"  {line}")
    say("  or train it again from step 0 in a new run: add --new")
    return ExitCode.FAILED


def starts_again(paths: RunPaths, status: RunStatus) -> bool:
    """Return True if a submit starts the run again: it failed or was interrupted before it saved anything.

    This loses nothing, and the run uses the current code and file: it can't fail again because of an error
    that has been fixed. A cancelled run is only started by ``resume``.
    """
    return status.state in {"failed", INTERRUPTED} and not has_saved(paths)


def say_starts_again(paths: RunPaths, status: RunStatus) -> None:
    """Report that a submit starts the run again from step 0."""
    reason = f" ({status.reason})" if status.reason else ""
    say(
        f"{run_name(paths)}: {status.state}{reason} before it saved anything; "
        "starts again with the current code and file"
    )


def changes_since(paths: RunPaths, wanted: Experiment, *, is_queued: bool) -> list[str]:
    """Return ``KEY=VALUE`` of the keys that the file has changed since and that a resume may change."""
    try:
        frozen = effective_experiment(paths, newest_number(paths) + 1)
    except BadFileError:
        return []  # the frozen file is broken; resume reports how
    return changes_on_resume(frozen, wanted, is_queued=is_queued)
