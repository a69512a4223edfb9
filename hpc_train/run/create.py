"""Creates run folders, and the experiment that each attempt runs."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hpc_train.errors import ExitCode, StorageError
from hpc_train.experiment.config.schema import Experiment, Job, as_training
from hpc_train.experiment.plan.input_files import other_inputs
from hpc_train.experiment.plan.sweep import content_hash
from hpc_train.experiment.topology.batch_arithmetic import StepLayout
from hpc_train.experiment.validate.loading import Stage
from hpc_train.experiment.workload import workload_of
from hpc_train.paths import RunPaths
from hpc_train.run import frozen_experiment, weight_source
from hpc_train.run.attempts import exit_codes, newest_number, now, read_record
from hpc_train.run.code import snapshot as snapshots
from hpc_train.run.code.code_files import commit_of
from hpc_train.run.files import create_folder, json_text, read_json, sync_folder, write_json, write_new
from hpc_train.run.processes import Process
from hpc_train.run.run_status import RunStatus
from hpc_train.run.trust import make_experiment_folder
from hpc_train.run.versions import versions


@dataclass(frozen=True)
class Origin:
    """The file that a run was created from, and the command line's overrides."""

    #: Absolute; it may have changed since, or be gone.
    file: str
    #: ``KEY=VALUE`` of the submit.
    overrides: list[str]


@dataclass(frozen=True)
class Surroundings:
    """The code and the versions of a command, the same for all runs that it creates.

    Running git takes longer than creating a run, so a command that creates many runs does it once.
    """

    #: ``code`` of ``run.json``.
    code: dict[str, Any] | None
    versions: dict[str, str]

    @classmethod
    def read(cls, snapshot: Path | None) -> Surroundings:
        """``snapshot``: the code that the runs use; None: ranks use the code in their current folder."""
        return cls(commit_of(Path.cwd()) if snapshot is None else _code_facts(snapshot), versions())


def create_run(
    paths: RunPaths,
    experiment: Job,
    run_id: str,
    total_steps: int | None,
    *,
    launcher: str = "local",
    snapshot: Path | None = None,
    surroundings: Surroundings | None = None,
    origin: Origin | None = None,
    values: Mapping[str, Any] | None = None,
    layout: StepLayout | None = None,
    stage: Stage | None = None,
) -> bool:
    """Create the run's folder atomically. Returns False if it exists.

    Everything except the folder's own entry is then on disk: the caller syncs the experiment's folder once
    for all runs. ``snapshot`` and ``surroundings``: the code that the run uses; None: they are read here.
    ``values``: the swept keys and their values. ``layout``: the planned layout of a step.
    ``stage``: its place among the stages of its file. Raises UntrustedError if another user could replace the
    run.
    """
    if paths.folder.exists():
        return False
    make_experiment_folder(paths.siblings)
    surroundings = surroundings or Surroundings.read(snapshot)

    def fill(folder: Path) -> None:
        temporary = RunPaths(folder)
        frozen_experiment.write(temporary, experiment)
        facts = _run_facts(experiment, run_id, launcher, surroundings, origin) | {
            "values": dict(values or {}),
            "ranks": layout.ranks if layout else None,
            "step": layout.to_json() if layout else None,
            **_input_facts(experiment, stage.weights if stage else None),
        }
        if stage is not None:
            facts["stage"] = asdict(stage)
        write_new(temporary.run, json_text(facts))
        if snapshot is not None:
            snapshots.link(temporary, snapshot)
        write_new(temporary.status, json_text(RunStatus(total_steps=total_steps).to_json()), sync=False)
        sync_folder(folder)

    return create_folder(paths.folder, fill, mode=0o700, syncs_parent=False)


def _input_facts(experiment: Job, stage_weights: str | None) -> dict[str, Any]:
    """Return ``inputs`` and ``init_from`` of ``run.json``. Raises BadFileError if weights are missing.

    ``stage_weights``: the run whose weights ``stage_order.note_weights`` adds once they exist; else None.
    """
    if isinstance(experiment, Experiment) and stage_weights == experiment.model.init_from:
        experiment = weight_source.with_source(experiment, None)
    return workload_of(experiment).input_facts(experiment)


def effective_experiment(paths: RunPaths, attempt: int) -> Job:
    """Return the frozen experiment with the ``noted_changes``. Raises BadFileError if it was changed."""
    changes = noted_changes(paths, attempt)
    if not changes:
        return frozen_experiment.read(paths)
    return frozen_experiment.load_changed(paths, changes).experiment


def training_experiment(paths: RunPaths, attempt: int) -> Experiment:
    """Return the ``effective_experiment`` of a run of our trainer; BadFileError for another one."""
    return as_training(effective_experiment(paths, attempt))


def note_change(paths: RunPaths, attempt: int, overrides: Sequence[str]) -> None:
    """Record in ``run.json`` the changes of ``attempt`` and later ones, one ``KEY=VALUE`` per change."""
    run = run_to_change(paths)
    changes = {str(number): listed for number, listed in _changes(run).items()}
    changes[str(attempt)] = list(overrides)
    write_json(paths.run, run | {"changes": changes}, sync=True)


def noted_changes(paths: RunPaths, attempt: int) -> list[str]:
    """Return the changes recorded for ``attempt`` and those before it, oldest first.

    Changes that the ranks of an earlier attempt rejected before the first step are excluded: they would be
    rejected again.
    """
    noted = _changes(read_json(paths.run) or {})
    numbers = [n for n in sorted(noted) if n <= attempt and not _were_refused(paths, n, attempt)]
    return [override for number in numbers for override in noted[number]]


def refused_changes(paths: RunPaths) -> list[str]:
    """Return the changes of the newest attempt that the next one excludes."""
    newest = newest_number(paths)
    remaining = noted_changes(paths, newest + 1)
    return [override for override in noted_changes(paths, newest) if override not in remaining]


def _were_refused(paths: RunPaths, number: int, before: int) -> bool:
    """Return True if an attempt from ``number`` on ended because of its file, before any completed a step."""
    for attempt in paths.attempt_folders():
        if number <= attempt.number < before:
            record = read_record(attempt)
            if record is not None and "first_step" in record.events:
                return False
            if ExitCode.BAD_FILE in exit_codes(attempt).values():
                return True
    return False


def note_code(paths: RunPaths, snapshot: Path, attempt: int) -> None:
    """Record in ``run.json`` that ``attempt`` and later ones use another snapshot than earlier attempts."""
    run = run_to_change(paths)
    before = run.get("code") or {}
    earlier = [*before.pop("earlier", []), before | {"until_attempt": attempt - 1}]
    write_json(paths.run, run | {"code": _code_facts(snapshot) | {"earlier": earlier}}, sync=True)


def note_versions(paths: RunPaths, attempt: int, now: Mapping[str, str]) -> None:
    """Record in ``run.json`` the versions that ``attempt`` and later ones run with, if they differ."""
    run = run_to_change(paths)
    if dict(now) != newest_versions(run):
        by_attempt = (run.get("versions_by_attempt") or {}) | {str(attempt): dict(now)}
        write_json(paths.run, run | {"versions_by_attempt": by_attempt}, sync=True)


def note_inputs(paths: RunPaths, experiment: Job, *, has_saved: bool) -> None:
    """Record in ``run.json`` the data of the next attempt; the earlier data remain recorded."""
    run = run_to_change(paths)
    if has_saved:
        now = workload_of(experiment).inputs_now(experiment, None)
        facts: dict[str, Any] = {"inputs": {**now, **(run.get("inputs") or {})}}
    else:
        stage_weights = (run.get("stage") or {}).get("weights")
        facts = _input_facts(experiment, stage_weights)
        if stage_weights is not None and run.get("init_from") is not None:  # noted at its first start
            facts = {"inputs": {**(run.get("inputs") or {}), **facts["inputs"]}}
    if any(run.get(key) != value for key, value in facts.items()):
        write_json(paths.run, run | facts, sync=True)


def noted_versions(paths: RunPaths) -> dict[str, str]:
    """Return the versions recorded last: at the run's creation, or with a later attempt."""
    return newest_versions(read_json(paths.run) or {})


def inputs_differ(paths: RunPaths, experiment: Job) -> list[str]:
    """Return the keys of ``experiment`` whose files differ from those at the run's creation."""
    recorded = (read_json(paths.run) or {}).get("inputs")
    return other_inputs(recorded, workload_of(experiment).inputs_now(experiment, recorded))


def origin_of(paths: RunPaths) -> Origin | None:
    """Return the source that the run was created from, None if it was not recorded."""
    source = (read_json(paths.run) or {}).get("source")
    try:
        return Origin(**source) if isinstance(source, dict) else None
    except TypeError:  # of a later version
        return None


def was_submitted_here(paths: RunPaths) -> bool:
    """Return True if the run's code is that of the current folder."""
    code = (read_json(paths.run) or {}).get("code") or {}
    return code.get("folder") == str(Path.cwd())


def run_to_change(paths: RunPaths) -> dict[str, Any]:
    """Return the content of ``run.json``, to be replaced. Raises StorageError if it can't be read."""
    run = read_json(paths.run)
    if run is None:
        raise StorageError(
            f"{paths.run}: missing or not written by hpc-train; the run can't be changed; "
            "start a new one with --new"
        )
    return run


def _changes(run: dict[str, Any]) -> dict[int, list[str]]:
    noted = run.get("changes") or {}
    return {int(number): [str(override) for override in overrides] for number, overrides in noted.items()}


def newest_versions(run: Mapping[str, Any]) -> dict[str, str]:
    """Return the versions that a run used last, by the content of its ``run.json``."""
    by_attempt = run.get("versions_by_attempt") or {}
    latest = by_attempt[max(by_attempt, key=int)] if by_attempt else run.get("versions") or {}
    return {str(package): str(version) for package, version in latest.items()}


def _run_facts(
    experiment: Job, run_id: str, launcher: str, surroundings: Surroundings, origin: Origin | None
) -> dict[str, Any]:
    return {
        "version": 1,
        **new_identity(run_id, content_hash(experiment)),
        "name": experiment.name,
        "source": asdict(origin) if origin else None,
        "workload": experiment.workload,
        "versions": surroundings.versions,
        "code": surroundings.code,
        "launcher": launcher,
    }


def new_identity(run_id: str, digest: str) -> dict[str, Any]:
    """Return the part of ``run.json`` that no two runs share; ``digest``: ``content_hash``."""
    return {
        "id": run_id,
        "content_hash": digest,
        "created": now(),
        "creator": Process.current().to_json(),
        "slurm_job_ids": [],
        "slurm_clusters": [],
        "wandb_id": secrets.token_hex(8),
        "changes": {},
    }


def _code_facts(snapshot: Path) -> dict[str, Any]:
    folder = Path.cwd()
    commit = commit_of(folder) or {"commit": None, "dirty": None}
    return commit | {"snapshot": snapshot.name, "folder": str(folder)}
