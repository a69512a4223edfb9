"""Exact evaluation: each sample counts once, and the result is the same on any number of ranks.

Integer sums (counts, a confusion matrix) are exact in any order, so each rank accumulates its own.
Floating-point sums have a row per micro-batch in one table; ranks fill in their rows, the table is summed
over ranks (other ranks' rows are zeros, so exactly) and then over rows, in an order that does not depend on
the number of ranks.
Records (a list of tensors, one per sample) are kept on the CPU. At the end each rank in turn broadcasts its
records, and all ranks have them in the order of the samples.

``Evaluator`` evaluates the weights in training (``loop``). ``evaluate_checkpoint`` is ``hpc-train evaluate``
and ``predict`` on the ranks: they belong to a separate run folder, which contains ``evaluation.json``: the
run and the step of the checkpoint. They write one row, the only one in that folder's ``metrics.jsonl``; the
evaluated run is only read. For ``predict`` each rank writes the predictions for its own samples to
``predictions-<rank>.jsonl``: a line is a JSON object with the sample's ``index``, and a file is sorted by it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hpc_train.errors import BadFileError, ExitCode, UsageError, printable
from hpc_train.paths import RunPaths
from hpc_train.run.checkpoints import kept_best, newest_attempt
from hpc_train.run.files import read_json, write_json, write_text
from hpc_train.run.metric_rows import finite
from hpc_train.run.weight_source import without_files
from hpc_train.training import data_staging, meters, resuming
from hpc_train.training.checkpoint.checkpointer import Checkpointer, Loaded
from hpc_train.training.datasets.base import AnySplit, DataSource
from hpc_train.training.datasets.batches import evaluation_batch_count, evaluation_batches
from hpc_train.training.datasets.building import build_source
from hpc_train.training.datasets.images import sample_path
from hpc_train.training.datasets.notices import data_notices
from hpc_train.training.datasets.skipping import BadSamples
from hpc_train.training.datasets.sources.image_files import ImageFiles
from hpc_train.training.datasets.types import Batch, TargetSpecs
from hpc_train.training.distributed.consensus import Agreement
from hpc_train.training.evaluation_outputs import EvaluationFiles, EvaluationOutput, Sums
from hpc_train.training.forward import TrainingForward
from hpc_train.training.health.progress import Progress
from hpc_train.training.models.preprocessing import with_preprocessing
from hpc_train.training.rank import Rank, make_bad_samples
from hpc_train.training.tasks.base import Task, make_task, target_spec
from hpc_train.training.train_state import TrainState, build, context

#: A batch → name → sum over its valid samples, or a list of B tensors with one record per sample. Shapes and
#: dtypes of sums are the same for every batch.
SumsOf = Callable[[Batch], dict[str, Any]]


@dataclass
class Validation:
    """This rank's validation data, a new iterable per call, and the number of batches of all ranks."""

    batches: Callable[[], Iterable[Batch | None]]
    num_batches: int


def make_validation(
    rank: Rank, source: DataSource, bad_samples: BadSamples | None, spec: TargetSpecs
) -> Validation | None:
    """Return this rank's share of the validation data; None if there are none."""
    split = source.val
    if split is None:
        return None
    size = rank.experiment.optimization.micro_batch_size
    assert isinstance(size, int)
    batches = evaluation_batches(
        split,
        rank.experiment,
        rank.degrees.data_rank(rank.facts.rank),
        rank.degrees.data_ranks,
        rank.device,
        bad_samples,
        spec,
        keeps=True,
    )
    return Validation(lambda: batches.until(lambda: bool(rank.flag)), evaluation_batch_count(split, size))


def share_all_buffers(state: TrainState) -> None:
    """Broadcast rank 0's buffers, since a save or an evaluation reads them from any rank. Collective."""
    state.strategy.share_buffers(all_persistent=True)
    if state.ema is not None:
        state.ema.share_buffers(state.strategy)


@dataclass(frozen=True)
class Evaluator:
    """Evaluates a run's weights on its validation data, and writes the files of the evaluation."""

    state: TrainState
    forward: TrainingForward
    validation: Validation
    agreement: Agreement
    progress: Progress
    outputs: Sequence[EvaluationOutput] = ()
    #: On rank 0 only.
    folder: EvaluationFiles | None = None

    def metrics(self, step: int) -> dict[str, float] | None:
        """Return the metrics of the weights after ``step`` and, under ``ema_``, of the EMA weights.

        Collective. Returns None if a rank received a stop request before the end. The files of the evaluation
        are complete on return. Leaves the model in training mode.
        """
        share_all_buffers(self.state)
        sums = self._sums(step)
        if sums is None:
            return None
        if self.outputs:
            self._write_files(step, sums)
        return {
            f"{prefix}{name}": value
            for prefix, of_prefix in sums.items()
            for name, value in self.forward.task.metrics(of_prefix).items()
        }

    def _sums(self, step: int) -> Sums | None:
        sums = self._sums_of_weights(step, "")
        if sums is None or self.state.ema is None:
            return None if sums is None else {"": sums}
        with self.state.ema.swapped():
            averages = self._sums_of_weights(step, "ema_")
        return None if averages is None else {"": sums, "ema_": averages}

    def _sums_of_weights(self, step: int, prefix: str) -> dict[str, Any] | None:
        owns_loss = self.state.strategy.owns_loss

        def sums_of(batch: Batch) -> dict[str, Any]:
            def pass_on(outputs: Any, moved: Batch) -> None:
                for output in self.outputs if owns_loss else ():
                    output.add(prefix, outputs, moved, batch)

            return self.forward.sums(self.state.wrapped, batch, step, pass_on)

        def begin(place: int) -> None:
            self.progress.at("evaluating", step, part=place)
            self.agreement.begin()

        for output in self.outputs:
            output.begin(prefix)
        self.state.wrapped.eval()
        with torch.no_grad():
            sums = evaluate(
                self.validation.batches(),
                self.validation.num_batches,
                sums_of,
                self.forward.device,
                begin=begin,
                must_stop=lambda: self.agreement.wait().stop,
                owns_loss=owns_loss,
            )
        self.state.wrapped.train()
        return sums

    def _write_files(self, step: int, sums: Sums) -> None:
        files: dict[str, bytes] = {}
        self.state.wrapped.eval()
        with torch.no_grad():
            for output in self.outputs:
                files |= output.files(step, sums)
        self.state.wrapped.train()
        if self.folder is not None:
            self.folder.write(step, files)


@dataclass(frozen=True)
class _Records:
    """The records of a batch's valid samples under one name, in one tensor."""

    #: The index of the batch in the whole evaluation.
    batch: int
    shapes: list[torch.Size]
    #: The values of all records, flattened, on the CPU.
    values: Tensor

    @classmethod
    def of(cls, name: str, records: list[Tensor], batch: Batch) -> _Records:
        if len(records) != len(batch.valid):
            raise BadFileError(
                f"task: sums returned {len(records)} records {name!r} for {len(batch.valid)} samples; return "
                "a tensor for each sample of the batch"
            )
        counted = [record for record, is_valid in zip(records, batch.valid.tolist(), strict=True) if is_valid]
        values = torch.cat([record.detach().flatten() for record in [*counted, records[0].new_empty(0)]])
        return cls(batch.number, [record.shape for record in counted], values.cpu())

    def tensors(self) -> list[Tensor]:
        """Return one tensor per valid sample."""
        parts = self.values.split([math.prod(shape) for shape in self.shapes])
        return [part.view(shape) for part, shape in zip(parts, self.shapes, strict=True)]


class _Totals:
    """A rank's part: one row of floating-point sums per batch, one row of integers, and records."""

    def __init__(self, like: dict[str, Any], num_batches: int, device: torch.device) -> None:
        self._names = list(like)
        self._records: dict[str, list[_Records]] = {
            name: [] for name, value in like.items() if isinstance(value, list)
        }
        summed = {name: value for name, value in like.items() if name not in self._records}
        self._shapes = {name: value.shape for name, value in summed.items()}
        self._exact = [name for name, value in summed.items() if not value.is_floating_point()]
        self._rounded = [name for name in summed if name not in self._exact]
        self._device = device
        self._counts = torch.zeros(self._size(self._exact), dtype=torch.int64, device=device)
        self._table = torch.zeros(num_batches, self._size(self._rounded), dtype=torch.float64, device=device)

    def add(self, batch: Batch, sums: dict[str, Any]) -> None:
        for name, records in self._records.items():
            records.append(_Records.of(name, sums[name], batch))
        if self._exact:
            self._counts += torch.cat([sums[name].flatten().to(torch.int64) for name in self._exact])
        if self._rounded:
            values = [sums[name].flatten().to(torch.float64) for name in self._rounded]
            self._table[batch.number] = torch.cat(values)

    def result(self) -> dict[str, Any]:
        """Return name → the sum over all ranks (a number if its shape is ()) or records. Collective."""
        totals: dict[str, Any] = self._all_records() if self._records else {}
        for names, table in ((self._exact, self._counts), (self._rounded, self._table)):
            if names:
                dist.all_reduce(table)
                # On the CPU the order of additions does not depend on the device that computed the rows.
                total = table.cpu() if table is self._counts else table.cpu().sum(0)
                parts = total.split([self._shapes[name].numel() for name in names])
                for name, part in zip(names, parts, strict=True):
                    totals[name] = without_dimensions(part.view(self._shapes[name]))
        return {name: totals[name] for name in self._names}

    def _all_records(self) -> dict[str, list[Tensor]]:
        """Return the records of all ranks in the order of the samples."""
        gathered: dict[str, list[_Records]] = {name: [] for name in self._records}
        for rank in range(dist.get_world_size()):
            sent = [self._records if rank == dist.get_rank() else None]
            dist.broadcast_object_list(sent, src=rank, device=self._device)
            for name, records in (sent[0] or {}).items():
                gathered[name] += records
        return {
            name: [
                tensor for part in sorted(records, key=lambda part: part.batch) for tensor in part.tensors()
            ]
            for name, records in gathered.items()
        }

    def _size(self, names: list[str]) -> int:
        return sum(self._shapes[name].numel() for name in names)


def without_dimensions(summed: Any) -> Any:
    """Return a sum as ``metrics`` receives it: a number for shape (); tensors and records unchanged."""
    return summed.item() if isinstance(summed, Tensor) and summed.dim() == 0 else summed


def evaluate(
    batches: Iterable[Batch | None],
    num_batches: int,
    sums_of: SumsOf,
    device: torch.device,
    begin: Callable[[int], None],
    must_stop: Callable[[], bool],
    *,
    owns_loss: bool = True,
) -> dict[str, Any] | None:
    """Return sums and records of the whole validation set, or None if ``must_stop`` ended it early.

    Collective: every rank passes the same number of its own batches. ``begin`` receives a batch's place and
    starts the agreement on stopping; ``must_stop`` returns its result, the same on all ranks. The previous
    batch is computed in between. So a collective forward begins on all ranks or on none. None in place of a
    batch: it did not arrive before the stop request. ``num_batches``: the number of batches of all ranks; a
    batch numbered past it is padding. ``owns_loss``: True on a single one of the ranks that share a model,
    and so have the same batches.
    """
    totals: _Totals | None = None

    def count(batch: Batch) -> None:
        nonlocal totals
        sums = sums_of(batch)
        totals = totals or _Totals(sums, num_batches, device)
        if owns_loss and batch.number < num_batches:
            totals.add(batch, sums)

    agreed: Batch | None = None
    for place, batch in enumerate(batches):
        begin(place)
        if agreed is not None:
            count(agreed)
        if must_stop():
            return None
        assert batch is not None, "a rank gives up only where all stop"
        agreed = batch
    if agreed is not None:
        count(agreed)
    assert totals is not None, "a split without samples is refused"
    return totals.result()


def evaluate_checkpoint(rank: Rank) -> ExitCode:
    """Load the checkpoint that ``evaluation.json`` names and evaluate it; rank 0 writes the row. Collective.

    Raises BadFileError if there are no validation data, the checkpoint is of another model, or its classes
    differ; StorageError if it is damaged.
    """
    request = read_json(rank.paths.evaluated_checkpoint) or {}
    run, step = RunPaths(Path(request["run"])), int(request["step"])
    rank = replace(rank, experiment=with_preprocessing(rank.experiment))
    source = data_staging.verified(rank, build_source(data_staging.staged(rank)))
    state = build(without_files(rank.experiment), source.info, None, context(rank))
    rank.progress.at("loading")
    loaded = _load(rank, run, step, state, source)
    rank = replace(rank, experiment=resuming.normalized_as_trained(rank.experiment, loaded))
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
        head = meters.row_head(attempt, "val", loaded.step, loaded.extra.get("steps_per_epoch"))
        row = finite(head | metrics)
        write_text(rank.paths.metrics, json.dumps(row, allow_nan=False) + "\n", sync=True)
    return ExitCode.DONE


def _load(rank: Rank, run: RunPaths, step: int, state: TrainState, source: DataSource) -> Loaded:
    ranks = rank.facts.rank, rank.facts.world_size, rank.group.control
    checkpointer = Checkpointer(run, newest_attempt(run), state.strategy, *ranks)
    loaded = checkpointer.load(step, state.state)
    resuming.refuse_other_classes(loaded, source)
    # As in a resume: the number of threads changes the last bit.
    resuming.take_over(loaded.extra.get("hardware"), step, rank.device, checkpointer.ranks, rank.warn)
    return loaded


def _metrics(rank: Rank, source: DataSource, state: TrainState, step: int) -> dict[str, float] | None:
    config = rank.experiment
    task = make_task(config, source.info)
    validation = make_validation(rank, source, make_bad_samples(rank), target_spec(task))
    if validation is None:
        raise BadFileError(f"data.name: {config.data.name} has no validation data to evaluate")
    forward = TrainingForward.of(config, source.info, state, task, rank.precision, rank.device)
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
    forward = TrainingForward.of(config, source.info, state, task, rank.precision, rank.device)
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
