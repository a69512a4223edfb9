"""``model.init_from``: the file, or the run's checkpoint, whose weights a run starts from.

Resolved once, when a run is created: ``run.json`` has the path and a fingerprint, and ranks read that path. A
file of ``model.pretrained`` is compared likewise; a checkpoint of the run replaces both.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hpc_train.errors import BadFileError, UsageError, shortened
from hpc_train.experiment.config.schema import Experiment
from hpc_train.experiment.config.training_sections import WEIGHT_FILES
from hpc_train.experiment.plan.input_files import WEIGHTS, file_fingerprint, other_inputs
from hpc_train.paths import CheckpointPaths, RunPaths, expanded
from hpc_train.run.checkpoints import find_step
from hpc_train.run.files import read_json
from hpc_train.run.find import find_runs, run_name

KEY = "model.init_from"
_CHANGED = (
    "{}: {} is not what it was when the run was created, or is gone; put it back, or submit the file again "
    "with --new"
)


def find_source(text: str) -> Path:
    """Return the file, or the folder of the run's best or else newest checkpoint, as an absolute path.

    ``text``: the key's value; a folder returned by this function is returned unchanged. Raises BadFileError
    if there is none.
    """
    path = expanded(text).absolute()
    if text.endswith(WEIGHT_FILES):
        if not path.is_file():
            raise BadFileError(f"{KEY}: there is no file {text}; write an existing path, or a run")
        return path
    if path.name.startswith("step-") and CheckpointPaths(path).manifest.is_file():
        return path
    try:
        runs = find_runs([text])
    except UsageError as error:
        extensions = ", ".join(WEIGHT_FILES)
        raise BadFileError(f"{KEY}: {error}; a file of weights ends in {extensions}") from error
    if len(runs) > 1:
        names = ", ".join(run_name(paths) for paths in runs[:5])
        raise BadFileError(f"{KEY}: {shortened(text)} has {len(runs)} runs; write one of {names}")
    try:
        return runs[0].checkpoint(find_step(runs[0])).folder.absolute()
    except UsageError as error:
        raise BadFileError(f"{KEY}: {error}") from error


def described(source: Path) -> str:
    """Return the source as text: a file's path, or a run's id and the step."""
    if source.is_file():
        return str(source)
    return f"run {source.parent.parent.name} at step {CheckpointPaths(source).step}"


def source_facts(text: str | None) -> dict[str, Any]:
    """Return ``init_from`` and ``inputs`` of ``run.json`` for the key's value. Raises BadFileError."""
    if text is None:
        return {"init_from": None, "inputs": {}}
    source = find_source(text)
    return {"init_from": str(source), "inputs": {KEY: fingerprint(source)}}


def fingerprint(source: Path) -> dict[str, str]:
    """Return the fingerprint of a file, or of a checkpoint's manifest, which contains all files' hashes."""
    return file_fingerprint(str(source if source.is_file() else CheckpointPaths(source).manifest))


def pinned(paths: RunPaths, experiment: Experiment) -> Experiment:
    """Return the experiment with ``init_from`` as at its creation.

    Raises BadFileError if that, or the file of ``pretrained``, has changed.
    """
    run = read_json(paths.run) or {}
    source, inputs = run.get("init_from"), run.get("inputs") or {}
    weights = experiment.model.pretrained
    if isinstance(weights, str) and WEIGHTS in inputs:
        now = file_fingerprint(str(expanded(weights)))
        if not now or other_inputs(inputs, {WEIGHTS: now}):
            raise BadFileError(_CHANGED.format(WEIGHTS, weights))
    if experiment.model.init_from is None or not isinstance(source, str):
        return experiment
    if not Path(source).exists() or fingerprint(Path(source)) != inputs.get(KEY):
        raise BadFileError(
            f"{_CHANGED.format(KEY, source)} (checkpoints of a run that still trains are removed: "
            "`hpc-train export` keeps one)"
        )
    return with_source(experiment, source)


def reads_files(experiment: Experiment) -> bool:
    """Return True if the model's initial weights come from ``init_from`` or a file of ``pretrained``."""
    return experiment.model.init_from is not None or isinstance(experiment.model.pretrained, str)


def without_files(experiment: Experiment) -> Experiment:
    """Return a copy that reads no file of weights: a checkpoint replaces them, and they may be gone."""
    if not isinstance(experiment.model.pretrained, str):
        return with_source(experiment, None)
    files = {"init_from": None, "pretrained": False}
    return experiment.model_copy(update={"model": experiment.model.model_copy(update=files)})


def with_source(experiment: Experiment, source: str | None) -> Experiment:
    """Return a copy whose ``init_from`` is ``source``."""
    return experiment.model_copy(update={"model": experiment.model.model_copy(update={"init_from": source})})
