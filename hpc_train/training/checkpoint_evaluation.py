"""``hpc-train evaluate`` and ``predict`` on the ranks: one checkpoint of a run, evaluated as training does.

The ranks belong to a separate run folder, which contains ``evaluation.json``: the run and the step of the
checkpoint. They write one row, the only one in that folder's ``metrics.jsonl``; the evaluated run is only
read. For ``predict`` each rank writes the predictions for its own samples to ``predictions-<rank>.jsonl``: a
line is a JSON object with the sample's ``index``, and a file is sorted by it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from hpc_train.errors import BadFileError, ExitCode, UsageError, printable
from hpc_train.paths import RunPaths
from hpc_train.run.checkpoints import kept_best, newest_attempt
from hpc_train.run.files import read_json, write_json, write_text
from hpc_train.run.metric_rows import finite
from hpc_train.run.weight_source import with_source
from hpc_train.training.checkpoint.checkpointer import Checkpointer, Loaded
from hpc_train.training.data_staging import staged, verified
from hpc_train.training.datasets.base import AnySplit, DataSource
from hpc_train.training.datasets.batches import evaluation_batches
from hpc_train.training.datasets.building import build_source
from hpc_train.training.datasets.images import sample_path
from hpc_train.training.datasets.notices import data_notices
from hpc_train.training.datasets.sources.image_files import ImageFiles
from hpc_train.training.datasets.types import Batch
from hpc_train.training.distributed.consensus import Agreement
from hpc_train.training.evaluation import Evaluator, make_validation, share_all_buffers
from hpc_train.training.forward import TrainingForward, make_to_input
from hpc_train.training.meters import row_head
from hpc_train.training.models.preprocessing import with_preprocessing
from hpc_train.training.rank import Rank, make_bad_samples
from hpc_train.training.resuming import normalized_as_trained, refuse_other_classes, take_over
from hpc_train.training.tasks.base import Task, make_task, target_spec
from hpc_train.training.train_state import TrainState, build, context


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
        best, ema = kept_best(run), wanted["ema"]
        uses_ema = best is not None and best.is_of_ema if ema is None else ema
        write_predictions(rank, source, state, step, wanted["images"], ema=uses_ema)
        return ExitCode.DONE
    metrics = _metrics(rank, source, state, step)
    if metrics is None:
        return ExitCode.TRY_AGAIN
    if rank.is_first:
        # As training writes it, with the attempt that saved the checkpoint.
        attempt = (read_json(run.checkpoint(loaded.step).manifest) or {}).get("attempt")
        head = row_head(attempt, "val", loaded.step, loaded.extra.get("steps_per_epoch"))
        row = finite(head | metrics)
        write_text(rank.paths.metrics, json.dumps(row, allow_nan=False) + "\n", sync=True)
    return ExitCode.DONE


def _load(rank: Rank, run: RunPaths, step: int, state: TrainState, source: DataSource) -> Loaded:
    ranks = rank.facts.rank, rank.facts.world_size, rank.group.control
    checkpointer = Checkpointer(run, newest_attempt(run), state.strategy, *ranks)
    loaded = checkpointer.load(step, state.state)
    refuse_other_classes(loaded, source)
    # As in a resume: the number of threads changes the last bit.
    take_over(loaded.extra.get("hardware"), step, rank.device, checkpointer.ranks, rank.warn)
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
    return Evaluator(state, forward, validation, agreement, rank.progress).metrics(step)


def write_predictions(
    rank: Rank, source: DataSource, state: TrainState, step: int, images: str | None, *, ema: bool
) -> None:
    """Write this rank's file of predictions. Collective.

    ``images``: the folder or file of the images; None: the validation data. ``ema``: use the EMA weights. A
    sample skipped by ``data.on_bad_sample: skip`` has no line.

    Raises UsageError if the task has no ``predictions`` or the run has no EMA, BadFileError if there are no
    data.
    """
    config = rank.experiment
    task = make_task(config, source.info)
    if not hasattr(task, "predictions"):
        raise UsageError(
            f"task: {config.task} can't predict, since it has no method predictions(outputs, batch); add it "
            "(docs/plugins.md)"
        )
    if ema and state.ema is None:
        raise UsageError("--ema: this run has no average of its weights (optimization.ema); omit --ema")
    split = _split(rank, source, images)
    place = rank.degrees.data_rank(rank.facts.rank), rank.degrees.data_ranks
    bad_samples, spec = make_bad_samples(rank), target_spec(task)
    batches = evaluation_batches(
        split, config, *place, rank.device, bad_samples, spec, has_targets=images is None
    )
    to_input = make_to_input(config, source.info, rank.device, rank.precision)
    forward = TrainingForward.of(config, state, task, rank.precision, rank.device, to_input)
    share_all_buffers(state)
    averages = state.ema.swapped() if ema and state.ema is not None else nullcontext()
    state.wrapped.eval()
    with averages, torch.no_grad(), rank.paths.predictions(rank.facts.rank).open("w") as file:
        for number, batch in enumerate(batches):
            rank.progress.at("evaluating", step, part=number)
            predictions = _predictions(forward, state, task, replace(batch, step=step))
            if state.strategy.owns_loss:
                file.writelines(_lines(predictions, batch, split))


def _split(rank: Rank, source: DataSource, images: str | None) -> AnySplit:
    if images is not None:
        if source.info.sequence_length is not None:
            raise BadFileError(f"--data: {rank.experiment.data.name} has tokens and not images; omit --data")
        files = ImageFiles(Path(images), source.info.channels)
        if rank.is_first:
            shown = DataSource(files, None, source.info, notices=files.notices)
            notices = data_notices(shown, rank.experiment.data)
            for notice in notices:  # the command, which removes the log, reads them from the file
                rank.warn(printable(notice))
            if notices:
                write_json(rank.paths.attempt(rank.attempt).notices, {"lines": [*map(printable, notices)]})
        return files
    if source.val is None:
        raise BadFileError(f"data.name: {rank.experiment.data.name} has no validation data; give --data")
    return source.val


def _predictions(forward: TrainingForward, state: TrainState, task: Task, batch: Batch) -> Any:
    with forward.begin(batch):
        moved = forward.to_device(batch)
        outputs = task.forward(state.wrapped, moved)
        return task.predictions(outputs, moved) if state.strategy.owns_loss else []  # type: ignore[attr-defined]


def _lines(predictions: list[dict[str, Any]], batch: Batch, split: AnySplit) -> Iterator[str]:
    size = len(batch.valid)
    for place in batch.valid.nonzero().flatten().tolist():
        index = batch.number * size + place
        path = sample_path(split, index)
        named = {} if path is None else {"file": str(path)}
        yield json.dumps({"index": index} | named | predictions[place]) + "\n"
