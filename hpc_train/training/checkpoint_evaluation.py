"""``hpc-train evaluate`` and ``predict`` on the ranks: one checkpoint of a run, evaluated as training does.

The ranks belong to a separate run folder, which contains ``evaluation.json``: the run and the step of the
checkpoint. They write one row, the only one in that folder's ``metrics.jsonl``; the evaluated run is only
read.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from hpc_train.checkpoint.checkpointer import Checkpointer, Loaded
from hpc_train.datasets.base import DataSource
from hpc_train.datasets.building import build_source
from hpc_train.distributed.consensus import Agreement
from hpc_train.errors import BadFileError, ExitCode
from hpc_train.models.preprocessing import with_preprocessing
from hpc_train.paths import RunPaths
from hpc_train.run.checkpoints import newest_attempt
from hpc_train.run.files import read_json, write_text
from hpc_train.run.metric_rows import Row
from hpc_train.run.weight_source import with_source
from hpc_train.tasks.base import make_task, target_spec
from hpc_train.training import hardware
from hpc_train.training.data_staging import staged, verified
from hpc_train.training.evaluator import Evaluator, make_validation
from hpc_train.training.forward import TrainingForward, make_to_input
from hpc_train.training.meters import row_head, without_non_finite
from hpc_train.training.predicting import write_predictions
from hpc_train.training.rank import Rank, make_bad_samples
from hpc_train.training.train_state import (
    TrainState,
    build,
    context,
    normalized_as_trained,
    refuse_other_classes,
)


def evaluate_checkpoint(rank: Rank) -> ExitCode:
    """Load the checkpoint that ``evaluation.json`` names and evaluate it; rank 0 writes the row. Collective.

    Raises BadFileError if there are no validation data, the checkpoint is of another model, or its classes
    differ; StorageError if it is damaged.
    """
    request = read_json(rank.paths.evaluated_checkpoint) or {}
    run, step = RunPaths(Path(request["run"])), int(request["step"])
    rank = replace(rank, experiment=with_preprocessing(rank.experiment))
    source = verified(rank, build_source(staged(rank)))
    # The checkpoint replaces the weights of ``model.init_from``, which may be gone.
    state = build(with_source(rank.experiment, None), source.info, None, context(rank))
    rank.progress.at("loading")
    loaded = _load(rank, run, step, state, source)
    rank = replace(rank, experiment=normalized_as_trained(rank.experiment, loaded))
    if wanted := request.get("predict"):
        write_predictions(rank, source, state, step, wanted["images"], ema=wanted["ema"])
        return ExitCode.DONE
    metrics = _metrics(rank, source, state, step)
    if metrics is None:
        return ExitCode.TRY_AGAIN
    if rank.is_first:
        row = _row(run, loaded, metrics)
        write_text(rank.paths.metrics, json.dumps(row, allow_nan=False) + "\n", sync=True)
    return ExitCode.DONE


def _load(rank: Rank, run: RunPaths, step: int, state: TrainState, source: DataSource) -> Loaded:
    ranks = rank.facts.rank, rank.facts.world_size, rank.group.control
    checkpointer = Checkpointer(run, newest_attempt(run), state.strategy, *ranks)
    loaded = checkpointer.load(step, state.state)
    refuse_other_classes(loaded, source)
    # As in a resume: the number of threads changes the last bit.
    hardware.take_over(loaded.extra.get("hardware"), step, rank.device, checkpointer.ranks, rank.warn)
    return loaded


def _metrics(rank: Rank, source: DataSource, state: TrainState, step: int) -> dict[str, float] | None:
    config = rank.experiment
    task = make_task(config, source.info)
    validation = make_validation(rank, source, make_bad_samples(rank), target_spec(task))
    if validation is None:
        raise BadFileError(f"data.name: {config.data.name} has no validation data to evaluate")
    to_input = make_to_input(config, source.info, rank.device, rank.precision)
    forward = TrainingForward.of(config, state, task, rank.precision, rank.device, to_input)
    agreement = Agreement(rank.group, rank.flag)
    return Evaluator(state, task, forward, rank.device, agreement, rank.progress).metrics(validation, step)


def _row(run: RunPaths, loaded: Loaded, metrics: dict[str, float]) -> Row:
    """Return the row as training writes it, with the ``attempt`` that saved the checkpoint."""
    attempt = (read_json(run.checkpoint(loaded.step).manifest) or {}).get("attempt")
    head = row_head(attempt, "val", loaded.step, loaded.extra.get("steps_per_epoch"))
    return without_non_finite(head | metrics)
