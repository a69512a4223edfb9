"""Runs handed to a scheduler: what ``submit`` and ``resume`` do with a ``QueueingLauncher``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpc_train.cli.code import code_on_resume, snapshot_for
from hpc_train.cli.creating import Birth, create, create_beside, existing_run
from hpc_train.cli.micro_batch import say_layouts
from hpc_train.cli.next_steps import next_attempt_words
from hpc_train.cli.printing import say
from hpc_train.config.loading import Loaded
from hpc_train.errors import BadFileError, ExitCode
from hpc_train.launchers.base import QueuedRun, QueueingLauncher
from hpc_train.launchers.slurm import LAUNCHER as SLURM
from hpc_train.paths import ExperimentPaths, RunPaths, runs_root
from hpc_train.plan.planning import Plan, PlannedRun
from hpc_train.run_folder.attempts import newest_number
from hpc_train.run_folder.checkpoints import committed
from hpc_train.run_folder.creation import effective_experiment, note_change, note_inputs, note_versions
from hpc_train.run_folder.files import read_json, remove_folder, write_text
from hpc_train.run_folder.finding import run_name

_NO_SECTION = "is missing: the file says nothing of what to ask Slurm for"
_ADD_SECTION = "write `slurm: {}` for one node as the site gives it, or add --local to train on this machine"


@dataclass(frozen=True)
class Queue:
    """A scheduler by its launcher's name."""

    name: str
    launcher: QueueingLauncher


@dataclass(frozen=True)
class Submitted:
    """All runs of a plan, and those of them that were there before the submit."""

    runs: list[RunPaths]
    existing: list[tuple[RunPaths, PlannedRun]]
    #: TRY_AGAIN where the scheduler has accepted a job that it can never start.
    code: ExitCode


def section_problems(name: str, loaded: Loaded) -> list[str]:
    """Return the line that tells of a file without ``slurm:``, where Slurm is to start it."""
    if name != SLURM or loaded.experiment.slurm is not None:
        return []
    return [loaded.problem(SLURM, _NO_SECTION, _ADD_SECTION)]


def batch_scripts(launcher: QueueingLauncher, loaded: Loaded, plan: Plan) -> list[str]:
    """Return the scripts of all runs of the plan. Raises BadFileError where none can be made."""
    folder = ExperimentPaths(runs_root() / plan.name)
    return launcher.scripts(folder, [_queued(folder.folder / run.id, run, loaded) for run in plan.runs])


def _queued(folder: Path, run: PlannedRun, loaded: Loaded) -> QueuedRun:
    return QueuedRun(RunPaths(folder), run.experiment, loaded.problem)


def submit_all(queue: Queue, loaded: Loaded, plan: Plan, *, new: bool) -> Submitted:
    """Put the plan's runs into the queue, except those whose folders exist already."""
    folder = ExperimentPaths(runs_root() / plan.name)
    found: dict[str, RunPaths] = {}
    made: list[QueuedRun] = []
    new_runs: list[PlannedRun] = []
    code = ExitCode.DONE
    with queue.launcher.submitting(folder):
        for run in plan.runs:
            _make_free(queue.launcher, RunPaths(folder.folder / run.id))
        birth = Birth(loaded, queue.name, snapshot_for(folder, plan.runs, anew=new))
        for run in plan.runs:
            paths = RunPaths(folder.folder / run.id)
            is_new = create(paths, run, birth)
            if not is_new and new:
                paths = create_beside(paths, run, birth, lambda other: _make_free(queue.launcher, other))
            elif not is_new:
                paths = existing_run(paths, run)
            found[run.id] = paths
            if is_new or new:
                made.append(_queued(paths.folder, run, loaded))
                new_runs.append(run)
        if made:
            code = queue.launcher.enqueue(folder, made) or code
    _say_queued(plan.name, made)
    say_layouts(new_runs)
    existing = [(found[run.id], run) for run in plan.runs if run not in new_runs]
    return Submitted(list(found.values()), existing, code)


def _make_free(launcher: QueueingLauncher, paths: RunPaths) -> None:
    """Remove a run that was only made: its submitter died before anybody was asked to start it."""
    if paths.run.is_file() and launcher.is_unsubmitted(paths):
        remove_folder(paths.folder)


def _say_queued(name: str, runs: Sequence[QueuedRun]) -> None:
    if not runs:
        return
    first = runs[0].paths
    which = run_name(first) if len(runs) == 1 else name
    say(f"{which}: queued, in {first.folder if len(runs) == 1 else first.folder.parent}")
    say(f"  `hpc-train status {which}` shows where it stands, `hpc-train logs -f {run_name(first)}` follows")
    say(f"  logs in {first.attempts}/<attempt>/rank-<rank>.log")


def resume_all(
    queue: Queue,
    runs: Sequence[tuple[RunPaths, Loaded]],
    overrides: Sequence[str],
    *,
    new_code: bool,
    versions: Mapping[RunPaths, Mapping[str, str] | None],
) -> ExitCode:
    """Put runs that have ended into the queue again. Only within ``submitting``.

    ``versions``: those that their ranks will have, where they are known.
    Raises BadFileError where the scheduler refuses; then all is as it was before.
    """
    before, queued = [], []
    try:
        for paths, loaded in runs:
            code = code_on_resume(paths, loaded.experiment, new=new_code)
            before.append(_Before.of(paths))
            number = newest_number(paths) + 1
            if code is not None:
                code.apply(number)
            _note_changes(paths, number, overrides)
            if (now := versions.get(paths)) is not None:
                note_versions(paths, number, now)
            note_inputs(paths, loaded.experiment, has_saved=bool(committed(paths)))
            paths.cancelled.unlink(missing_ok=True)
            queued.append(QueuedRun(paths, effective_experiment(paths, number), loaded.problem))
            say(f"{run_name(paths)}: {next_attempt_words(paths, overrides)}")
        return queue.launcher.enqueue(runs[0][0].siblings, queued) or ExitCode.DONE
    except BadFileError:
        for each in before:
            each.restore()
        raise


def _note_changes(paths: RunPaths, number: int, overrides: Sequence[str]) -> None:
    """Note them beside those that an attempt of this number, which never began, was to have."""
    if overrides:
        noted = ((read_json(paths.run) or {}).get("changes") or {}).get(str(number)) or []
        note_change(paths, number, [*noted, *overrides])


@dataclass(frozen=True)
class _Before:
    """The small files of a run that resuming changes."""

    texts: dict[Path, str | None]

    @classmethod
    def of(cls, paths: RunPaths) -> _Before:
        files = (paths.run, paths.status, paths.cancelled)
        return cls({path: path.read_text("utf-8") if path.exists() else None for path in files})

    def restore(self) -> None:
        for path, text in self.texts.items():
            if text is None:
                path.unlink(missing_ok=True)
            else:
                write_text(path, text, sync=True)
