"""Which code a run uses: the snapshot that ``submit`` takes, and what ``resume`` makes of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from hpc_train.cli.printing import say
from hpc_train.config.schema import Experiment
from hpc_train.errors import StorageError, UsageError, UserError
from hpc_train.paths import ExperimentPaths, RunPaths, runs_root
from hpc_train.plan.planning import PlannedRun
from hpc_train.run_folder import snapshot
from hpc_train.run_folder.creation import note_code, was_submitted_here
from hpc_train.run_folder.finding import run_name
from hpc_train.run_folder.snapshot import Code

_NEW = "new"
#: Of files that were left out, so many are named.
_NAMED = 5


def is_new(choice: str | None) -> bool:
    """Tell whether ``--code`` asks for the current code. Raises UsageError where it says anything else."""
    if choice not in {None, _NEW}:
        raise UsageError(f"--code: {choice!r} is nothing that is known; write --code new, or leave it out")
    return choice == _NEW


def snapshot_for(folder: ExperimentPaths, runs: Sequence[PlannedRun], *, anew: bool) -> Path | None:
    """Return the snapshot of the current code for those of ``runs`` that will be made; None where all are.

    One for all runs of a submit, before the first is made. ``anew``: others will be made beside them.
    """
    if not anew and all((folder.folder / run.id).exists() for run in runs):
        return None
    return _place(folder, _current_code(folder, [run.experiment for run in runs]))


def refresh_on_resume(paths: RunPaths, experiment: Experiment, *, new: bool) -> None:
    """Say what has changed since the run's snapshot was taken; with ``new`` let it use the current code.

    A run without a snapshot gets one. Raises UserError where the current code can't be taken.
    """
    used = _used(paths, may_be_gone=new)
    if used is None or new:
        _take_new(paths, experiment, used)
    elif was_submitted_here(paths):
        _say_differences(paths, experiment, used)


def _used(paths: RunPaths, *, may_be_gone: bool) -> Path | None:
    try:
        return snapshot.linked(paths)
    except StorageError:
        if may_be_gone:
            return None
        raise


def _take_new(paths: RunPaths, experiment: Experiment, used: Path | None) -> None:
    code = _current_code(paths.siblings, [experiment])
    taken = _place(paths.siblings, code)
    run_id = run_name(paths)
    if used is not None and snapshot.content_of(used) == taken.name:
        say(f"{run_id}: code: nothing has changed since the snapshot that this run uses")
        return
    differences = snapshot.differences(used, code) if used is not None else None
    snapshot.link(paths, taken)
    note_code(paths, taken)
    if differences is None:
        say(f"{run_id}: code: there was no snapshot of it; from now on the run uses that of {Path.cwd()}")
    else:
        say(f"{run_id}: code: from this attempt on that of {Path.cwd()}: {differences.words()}")


def _say_differences(paths: RunPaths, experiment: Experiment, used: Path) -> None:
    try:
        differences = snapshot.differences(used, _current_code(paths.siblings, [experiment]))
    except UserError:
        return  # code that can't be taken now is none that this run needs
    if differences:
        say(
            f"{run_name(paths)}: code: {differences.words(' from the snapshot that this run uses')}; "
            "resume with --code new takes the current code"
        )


def _current_code(folder: ExperimentPaths, experiments: Iterable[Experiment]) -> Code:
    data = {root for experiment in experiments if (root := experiment.data.root) is not None}
    excluded = [runs_root(), folder.snapshots, folder.folder, *(Path(root).expanduser() for root in data)]
    return snapshot.read(Path.cwd(), excluded)


def _place(folder: ExperimentPaths, code: Code) -> Path:
    """Write the snapshot where there is none yet, and say what is not in it."""
    is_known = (folder.snapshots / code.content).exists()
    placed = snapshot.place(folder.snapshots, code)
    if code.left_out and not is_known:
        named = [f"{path} ({why})" for path, why in code.left_out.items()]
        more = ", …" if len(named) > _NAMED else ""
        say(f"code: left out of the snapshot: {', '.join(named[:_NAMED])}{more}")
    return placed
