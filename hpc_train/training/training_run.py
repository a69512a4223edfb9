"""The objects that one rank keeps across rollbacks, and the record of a training that it begins."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import torch

from hpc_train.errors import printable
from hpc_train.experiment.config.training_sections import ProfileConfig
from hpc_train.experiment.plan.devices import peak_tflops
from hpc_train.experiment.topology.batch_arithmetic import BatchArithmetic, StepLayout
from hpc_train.loggers.base import Row
from hpc_train.loggers.metrics_writer import MetricsWriter, start_loggers
from hpc_train.paths import RunPaths
from hpc_train.run import evaluation_jobs, files
from hpc_train.run.bad_samples import all_known
from hpc_train.run.metric_rows import MetricsFile
from hpc_train.run.rollbacks import RollbacksFile
from hpc_train.run.spikes import SpikesFile
from hpc_train.training.datasets.base import DataSource
from hpc_train.training.datasets.notices import batch_notices
from hpc_train.training.datasets.sampler import Position
from hpc_train.training.datasets.skipping import BadSamples, too_many
from hpc_train.training.datasets.types import Batch
from hpc_train.training.distributed.consensus import Agreement
from hpc_train.training.evaluation_outputs import EvaluationFiles
from hpc_train.training.flops import FlopCount, FlopRates
from hpc_train.training.forward import make_to_input
from hpc_train.training.loop import AutoInterval, BadSampleCount
from hpc_train.training.models.preprocessing import normalized_otherwise
from hpc_train.training.profiling import StepProfiler
from hpc_train.training.rank import Rank
from hpc_train.training.step import StepObserver
from hpc_train.training.step_digests import DigestFiles, digest_files
from hpc_train.training.tasks.base import Task
from hpc_train.training.train_state import TrainState

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Stretch:
    """The steps of another run that ranks replay, from its checkpoint ``begin`` (0: the start) to ``end``.

    ``skipped``: the data windows that the run skipped when it trained them. ``observe`` returns the observer
    of the steps. ``profile``: the steps to profile; its ``after_steps`` may be 0.
    """

    run: RunPaths
    begin: int
    end: int
    skipped: frozenset[int]
    observe: Callable[[TrainingRun, TrainState], StepObserver]
    profile: ProfileConfig | None = None


@dataclass
class TrainingRun:
    """The objects that one rank keeps across rollbacks."""

    rank: Rank
    source: DataSource
    batches: BatchArithmetic
    #: None if the first bad sample ends the run.
    bad_samples: BadSamples | None
    #: None: train this run.
    stretch: Stretch | None = None
    #: On rank 0 only, once training begins.
    metrics_writer: MetricsWriter | None = None
    digests: DigestFiles | None = None
    spikes: SpikesFile | None = None
    rollbacks: RollbacksFile | None = None
    #: On rank 0 only, of ``checkpoint.every: auto``.
    interval: AutoInterval | None = None
    #: Windows skipped by this attempt's rollbacks; earlier ones are in the checkpoint.
    skipped: frozenset[int] = frozenset()
    #: On rank 0 only, if the model's FLOPs can be counted.
    flops: FlopRates | None = None
    #: On rank 0 only, if a profile is requested. Kept through rollbacks: an attempt is profiled once.
    profiler: StepProfiler | None = None
    #: The step of the last rollback.
    rolled_back_at: int | None = None

    @property
    def paths(self) -> RunPaths:
        """The run whose steps are trained."""
        return self.rank.paths if self.stretch is None else self.stretch.run

    @property
    def last_step(self) -> int:
        """The step after which training ends."""
        return self.batches.total_steps if self.stretch is None else self.stretch.end

    def rates(self, samples_per_s: float) -> Row:
        """Return the columns of a row about FLOPs that are known so far."""
        return {} if self.flops is None else self.flops.row(samples_per_s)


def begin_record(run: TrainingRun, position: Position) -> None:
    """Start, or after a rollback continue, rank 0's record of the training."""
    step, optimization = position.step, run.rank.experiment.optimization
    if run.rank.is_first:
        EvaluationFiles(run.rank.paths).withdraw(step)
    if run.metrics_writer is not None:
        run.metrics_writer.go_back(step)
    elif run.rank.is_first:
        run.metrics_writer = MetricsWriter(
            MetricsFile(run.rank.paths.metrics, step, evaluation_jobs.rows(run.rank.paths)),
            start_loggers(run.rank.experiment, run.rank.paths, run.rank.attempt),
            sys.stdout,
            run.rank.paths.evaluation_images,
        )
        run.metrics_writer.begin(step)
    if run.rank.is_first:
        run.digests = digest_files(run.rank.experiment, run.rank.device, run.rank.paths, step)
        if optimization.on_spike is not None:
            run.spikes = SpikesFile(run.rank.paths.spikes, step)
        if run.rollbacks is None and "rollback" in (optimization.on_non_finite, optimization.on_spike):
            run.rollbacks = RollbacksFile(run.rank.paths.rollbacks, position.skipped)


def bad_sample_count(run: TrainingRun, agreement: Agreement) -> BadSampleCount:
    """Return the count of samples that could not be read, and the check of it. Collective."""
    bad, most = run.bad_samples, run.rank.experiment.data.max_bad_samples
    if bad is None:
        return BadSampleCount(lambda: 0, lambda total: None)
    # Rank 0 decides: on a network disk ranks may see different files at the same time.
    earlier, looked_at = agreement.rank_0_says(bad.earlier), 0

    def check(total: int) -> None:
        nonlocal looked_at
        if total == looked_at or earlier + total <= most:
            return
        looked_at = total
        # Two ranks may have counted the same sample: compare the number of distinct ones.
        is_over = agreement.rank_0_says(len(all_known(run.rank.paths)) > most)
        if is_over:
            raise too_many(run.rank.paths, most)

    return BadSampleCount(lambda: bad.count, check)


def _layout(run: TrainingRun) -> StepLayout:
    optimization, rank = run.rank.experiment.optimization, run.rank
    size = optimization.global_batch_size // run.batches.micro_batches
    ranks, data_ranks = rank.facts.world_size, rank.degrees.data_ranks
    return StepLayout(optimization.global_batch_size, size, ranks, data_ranks, rank.precision.name)


def report_start(run: TrainingRun, train_state: TrainState, position: Position) -> None:
    """Log the model, the ranks and the steps, on rank 0."""
    rank = run.rank
    if not rank.is_first:
        return
    if train_state.pretrained is not None and position.step == 0:
        lines = [train_state.pretrained.line()]
        if otherwise := normalized_otherwise(rank.experiment, run.source.info):
            _log.warning("%s", otherwise)
            lines.append(otherwise)
        with suppress(OSError):  # they are in the log, too
            files.write_json(rank.paths.attempt(rank.attempt).notices, {"lines": [*map(printable, lines)]})
    _log.info(
        "%s: %d parameters on %d × %s, %s, %s; from step %d to %d",
        rank.experiment.model.name,
        train_state.num_parameters,
        rank.facts.world_size,
        rank.device,
        rank.experiment.parallel.strategy,
        _layout(run),
        position.step,
        run.batches.total_steps,
    )


def on_first_batch(
    run: TrainingRun, train_state: TrainState, task: Task, step: int
) -> Callable[[Batch], None]:
    """Return a callback for the first micro-batch from ``step`` on, which is on the CPU.

    Rank 0 warns of unfit images and counts the FLOPs.
    """
    count = _flop_count(run, train_state, task, step)

    def on_batch(batch: Batch) -> None:
        if count is not None:
            count.start(batch)
        if run.rank.is_first:
            for notice in batch_notices([batch], run.source.info, run.rank.experiment.data):
                _log.warning("%s", notice)

    return on_batch


def _flop_count(run: TrainingRun, train_state: TrainState, task: Task, step: int) -> FlopCount | None:
    """Return the FLOP count of a micro-batch, once per attempt, on rank 0; None if no row would show it.

    A row has rates only if the attempt has an earlier row. The count continues through rollbacks.
    """
    rank, every = run.rank, run.rank.experiment.logging.every_steps
    has_rates = run.batches.total_steps // every - step // every > 1
    is_counted = run.flops is not None or run.stretch is not None
    if train_state.without_weights is None or is_counted or not has_rates:
        return None
    to_input = make_to_input(rank.experiment, run.source.info, torch.device("meta"), rank.precision)
    count = FlopCount(train_state.without_weights, task, to_input)
    name = torch.cuda.get_device_name(rank.device) if rank.device.type == "cuda" else ""
    run.flops = FlopRates(count, rank.facts.world_size, peak_tflops(name, rank.precision.name))
    return count
