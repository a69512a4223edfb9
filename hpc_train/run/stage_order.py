"""Stages of a file: which run follows which, by ``stage`` of ``run.json``.

A stage begins once the run that it follows has completed. The weights that it starts from are resolved then:
their checkpoint did not exist when the run was created. ``status`` reads these facts, so nothing here imports
the schema at the top.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hpc_train.errors import TryAgainError
from hpc_train.paths import RunPaths
from hpc_train.run.files import write_json
from hpc_train.run.find import is_run, name_with_experiment, run_name
from hpc_train.run.run_status import GOING_ON, read_status, run_facts


def former(paths: RunPaths) -> RunPaths | None:
    """Return the run whose completion this one waits for; None if it is not a later stage of a file."""
    return _run(paths, "after")


def weights_run(paths: RunPaths) -> RunPaths | None:
    """Return the training stage before this one; None if there is none."""
    return _run(paths, "weights")


def _run(paths: RunPaths, key: str) -> RunPaths | None:
    name, slash, run_id = str((run_facts(paths).get("stage") or {}).get(key) or "").partition("/")
    return RunPaths(paths.siblings.folder.parent / name / run_id) if slash else None


def has_begun(paths: RunPaths) -> bool:
    """Return True if an attempt of the run was ever started."""
    return bool(paths.attempt_folders())


def waiting_words(paths: RunPaths) -> str | None:
    """Return ``waits for RUN``, with the reason if that run does not train; None if the run may begin."""
    before = former(paths)
    if before is None or has_begun(paths):
        return None
    if not is_run(before):
        return f"waits for {name_with_experiment(before)}, whose folder is gone"
    state, name = read_status(before).state, run_name(before)
    if state == "completed":
        return None
    if state in GOING_ON:
        return f"waits for {name}"
    return f"waits for {name}, which is {state}; `hpc-train resume {name}` lets this one follow"


def check_may_begin(paths: RunPaths) -> None:
    """Raise TryAgainError if the run waits for the completion of another one."""
    if (reason := waiting_words(paths)) is not None:
        raise TryAgainError(f"{run_name(paths)}: {reason}")


def note_weights(paths: RunPaths) -> None:
    """Record in ``run.json`` the checkpoint that ``init_from: stage`` means, once.

    Called for a claimed attempt. Raises BadFileError if the training stage has no checkpoint any more.
    """
    source_run = weights_run(paths)
    if source_run is None or (run_facts(paths).get("init_from")) is not None:
        return
    from hpc_train.experiment.config.schema import Experiment
    from hpc_train.run import frozen_experiment, weight_source
    from hpc_train.run.create import run_to_change

    experiment = frozen_experiment.read(paths)
    name = name_with_experiment(source_run)
    if not isinstance(experiment, Experiment) or experiment.model.init_from != name:
        return
    source = weight_source.find_source(str(source_run.folder.absolute()))
    facts = run_to_change(paths)
    inputs: dict[str, Any] = facts.get("inputs") or {}
    inputs = inputs | {weight_source.KEY: weight_source.fingerprint(source)}
    write_json(paths.run, facts | {"init_from": str(source), "inputs": inputs}, sync=True)


def later(paths: RunPaths) -> list[RunPaths]:
    """Return the stages that wait for this run, directly or not, and have not begun, in their order."""
    if not run_facts(paths).get("stage"):
        return []
    root = paths.siblings.folder.parent
    by_former: dict[RunPaths, list[RunPaths]] = {}
    for other in map(RunPaths, _folders(root)):
        if (before := former(other)) is not None:
            by_former.setdefault(before, []).append(other)
    waiting, newest = [], [RunPaths(root / paths.siblings.folder.name / paths.folder.name)]
    while newest:
        newest = [other for run in newest for other in by_former.get(run, []) if not has_begun(other)]
        waiting += newest
    return waiting


def _folders(root: Path) -> list[Path]:
    return sorted(path.parent for path in root.glob("*/*/run.json") if path.parent.name[0] != ".")
