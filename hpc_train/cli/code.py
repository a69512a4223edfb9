"""The code of a run: the snapshot that ``submit`` takes, and its replacement by ``resume``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from hpc_train.console import say
from hpc_train.errors import StorageError, UsageError, UserError, counted, listed
from hpc_train.experiment.config.schema import Job
from hpc_train.experiment.plan.planning import PlannedRun
from hpc_train.experiment.workload import workload_of
from hpc_train.paths import ExperimentPaths, RunPaths, expanded, runs_root
from hpc_train.run.code import snapshot
from hpc_train.run.code.snapshot import Code
from hpc_train.run.create import note_code, was_submitted_here
from hpc_train.run.find import run_name

_NEW = "new"
#: Number of excluded files that are listed.
_NAMED = 5


def is_new(choice: str | None) -> bool:
    """Return True if ``--code`` requests the current code. Raises UsageError for any other value."""
    if choice not in {None, _NEW}:
        raise UsageError(f"--code: unknown value {choice!r}; write --code new, or omit it")
    return choice == _NEW


def snapshot_for(folder: ExperimentPaths, runs: Sequence[PlannedRun], *, always_new: bool) -> Path | None:
    """Return the snapshot of the current code for ``runs`` that will be created; None if all exist.

    All runs of a submit share it; it is taken before the first is created. ``always_new``: an existing run
    gets a second run beside it.
    """
    if not always_new and all((folder.folder / run.id).exists() for run in runs):
        return None
    return _place(folder, _current_code(folder, [run.experiment for run in runs]))


@dataclass(frozen=True)
class CodeChange:
    """A new snapshot for a run, written but not used yet."""

    paths: RunPaths
    snapshot: Path
    description: str

    def apply(self, attempt: int) -> None:
        """Let ``attempt``, which the caller has claimed, and later ones use it."""
        snapshot.link(self.paths, self.snapshot)
        note_code(self.paths, self.snapshot, attempt)
        say(f"{run_name(self.paths)}: code: {self.description}")


def code_on_resume(paths: RunPaths, experiment: Job, *, new: bool) -> CodeChange | None:
    """Report the changes since the run's snapshot was taken; with ``new`` return the change to make.

    A run without a snapshot gets one. Nothing of the run changes before the caller has claimed an attempt and
    applies the returned change. Raises UserError if the current code can't be snapshotted.
    """
    try:
        used = snapshot.linked(paths)
    except StorageError:  # it is gone
        if not new:
            raise
        used = None
    if used is None or new:
        return _new_code(paths, experiment, used)
    if was_submitted_here(paths):
        _say_differences(paths, experiment, used)
    return None


def _new_code(paths: RunPaths, experiment: Job, used: Path | None) -> CodeChange | None:
    code = _current_code(paths.siblings, [experiment])
    taken = _place(paths.siblings, code)
    if used is None:
        text = f"there was no snapshot of it; from now on the run uses that of {Path.cwd()}"
        return CodeChange(paths, taken, text)
    if snapshot.content_of(used) == taken.name:
        say(f"{run_name(paths)}: code: nothing has changed since the snapshot that this run uses")
        return None
    text = snapshot.differences(used, code).words()
    return CodeChange(paths, taken, f"from this attempt on that of {Path.cwd()}: {text}")


def _say_differences(paths: RunPaths, experiment: Job, used: Path) -> None:
    try:
        differences = snapshot.differences(used, _current_code(paths.siblings, [experiment]))
    except UserError:
        return  # code that can't be snapshotted now is not needed by this run
    if differences:
        say(
            f"{run_name(paths)}: code: {differences.words(' from the snapshot that this run uses')}; "
            "resume with --code new takes the current code"
        )


def say_older_code(folder: ExperimentPaths, runs: Mapping[RunPaths, Job]) -> None:
    """Report the runs that use other code than the current one; the submit has started none of them."""
    users: dict[Path, list[RunPaths]] = {}  # a sweep's runs use one snapshot
    for paths in runs:
        with suppress(OSError, ValueError):
            if (target := snapshot.link_target(paths)) is not None:
                users.setdefault(target, []).append(paths)
    from_here = [group for group in users.values() if was_submitted_here(group[0])]
    if not from_here:
        return
    try:
        code = _current_code(folder, runs.values())
        for first, *others in from_here:
            used = snapshot.linked(first)
            if used is None or snapshot.content_of(used) == code.content:
                continue
            text = snapshot.differences(used, code).words(" from the snapshot that it uses")
            more = f" (and {counted(len(others), 'more run')})" if others else ""
            remedy = "submit with --new trains with the current code"
            say(f"{run_name(first)}{more}: code: {text}; {remedy}")
    except UserError:
        return  # like a resume


def _current_code(folder: ExperimentPaths, experiments: Iterable[Job]) -> Code:
    data = {path for job in experiments for path in workload_of(job).data_paths(job)}
    excluded = [runs_root(), folder.snapshots, folder.folder, *map(expanded, data)]
    return snapshot.read(Path.cwd(), excluded)


def _place(folder: ExperimentPaths, code: Code) -> Path:
    """Write the snapshot if there is none yet, and report the files that it excludes."""
    is_known = (folder.snapshots / code.content).exists()
    placed = snapshot.place(folder.snapshots, code)
    if code.left_out and not is_known:
        named = [f"{path} ({why})" for path, why in code.left_out.items()]
        say(f"code: excluded from the snapshot: {listed(named, _NAMED)}")
    return placed
