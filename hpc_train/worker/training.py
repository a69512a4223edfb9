"""From the file to a ``Trainer`` that runs: what is built anew after a rollback, and what lives beyond it."""

from __future__ import annotations

import gc
import logging
import sys
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from typing import Any, cast

import torch

from hpc_train.datasets.bad_samples import BadSamples, too_many
from hpc_train.datasets.base import DataSource
from hpc_train.datasets.building import build_source
from hpc_train.datasets.loading import evaluation_batch_count, evaluation_batches, training_batches
from hpc_train.datasets.sampler import Position
from hpc_train.engine.cadence import Cadence
from hpc_train.engine.checkpoint import Checkpointer, Save
from hpc_train.engine.meters import Meters, Recorder, StatusWriter
from hpc_train.engine.metrics_file import MetricsFile
from hpc_train.engine.non_finite import Guard, RollbackError, check_rollbacks
from hpc_train.engine.saving import Saves
from hpc_train.engine.trainer import BadSampleCount, Trainer, Validation
from hpc_train.errors import ExitCode, printable
from hpc_train.loggers.base import Logger, LoggerContext
from hpc_train.models.preprocessing import with_preprocessing
from hpc_train.plan.batches import BatchArithmetic, StepLayout
from hpc_train.run_folder.bad_samples import all_known
from hpc_train.run_folder.files import read_json, write_json
from hpc_train.runtime.agreement import Agreement
from hpc_train.runtime.data_info import TargetSpec
from hpc_train.tasks.base import Task, target_spec
from hpc_train.worker import micro_batch
from hpc_train.worker.inputs import make_to_input
from hpc_train.worker.learner import Learner, Resumed, build, extra, part, placement, resumed
from hpc_train.worker.rank import Rank

_log = logging.getLogger(__name__)


@dataclass
class _Run:
    """What one rank keeps over rollbacks."""

    rank: Rank
    source: DataSource
    batches: BatchArithmetic
    #: None where the first one ends the run.
    bad_samples: BadSamples | None
    #: On rank 0 alone, once training begins.
    recorder: Recorder | None = None
    #: Windows that rollbacks of this attempt leave out; a checkpoint has those from before it.
    skipped: frozenset[int] = frozenset()


def train(rank: Rank) -> ExitCode:
    """Train to the end, or until asked to stop; go back where the file wants that."""
    rank = micro_batch.resolved(rank)
    rank = replace(rank, experiment=with_preprocessing(rank.experiment))
    source = build_source(rank.experiment.data)
    batches = BatchArithmetic.of(rank.experiment.optimization, len(source.train), rank.degrees.data_ranks)
    run = _Run(rank, source, batches, _bad_samples(rank))
    try:
        is_done = None
        while is_done is None:
            is_done = _train_once(run)
            if is_done is None:
                rank.begins_anew()
                _free_memory()
        if run.recorder is not None:
            run.recorder.state = "completed" if is_done else "failed"
    finally:
        if run.recorder is not None:
            run.recorder.close()
    rank.note_signal()  # again: it may have reached another rank first
    return ExitCode.DONE if is_done else ExitCode.TRY_AGAIN


def _train_once(run: _Run) -> bool | None:
    """Build everything and train on from the newest checkpoint.

    Returns True when done, False where it was asked to stop, None where it must go back; then ``run`` knows
    what it leaves out.
    """
    rank = run.rank
    learner = build(rank.experiment, run.source.info, run.batches, placement(rank))
    checkpointer = _checkpointer(rank, learner)
    rank.progress.at("loading")
    start = _without_skipped(run, resumed(rank, checkpointer, learner, run.source))
    rank.note("loaded")
    _begin_record(run, start.position.step)
    _say_start(run, learner, start.position)
    with ExitStack() as stack:
        trainer = _trainer(run, learner, checkpointer, start, stack)
        try:
            is_done = trainer.train()
        except RollbackError as back:
            _go_back(run, start.position, back)
            return None
        if trainer.status is not None and is_done:
            trainer.status.write("completed", trainer.step)
    return is_done


def _free_memory() -> None:
    """Let go of a learner that nobody holds any more: modules under FSDP refer to themselves."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _without_skipped(run: _Run, start: Resumed) -> Resumed:
    skipped = tuple(sorted({*start.position.skipped, *run.skipped}))
    check_rollbacks(skipped, run.rank.experiment.optimization)
    return replace(start, position=Position(start.position.step, skipped))


def _go_back(run: _Run, start: Position, back: RollbackError) -> None:
    """Note which data the run leaves out from now on. The same on every rank."""
    window = next(Position(back.step, start.skipped).windows())
    run.skipped = run.skipped | {window}
    if run.rank.is_first:
        _log.warning("%s; going back to the newest checkpoint, leaving data window %d out", back, window)


def _checkpointer(rank: Rank, learner: Learner) -> Checkpointer:
    return Checkpointer(
        rank.paths,
        rank.attempt,
        learner.strategy,
        rank.facts.rank,
        rank.facts.world_size,
        rank.group.control,
        keep=rank.experiment.checkpoint.keep,
    )


def _trainer(
    run: _Run, learner: Learner, checkpointer: Checkpointer, start: Resumed, stack: ExitStack
) -> Trainer:
    rank, batches = run.rank, run.batches
    config, degrees = rank.experiment, rank.degrees
    task = cast(Task, part("tasks", config.task)(config, run.source.info))
    training = training_batches(
        run.source,
        config,
        start.position,
        batches.total_steps,
        degrees.data_rank(rank.facts.rank),
        degrees.data_ranks,
        rank.device,
        run.bad_samples,
        target_spec(task),
    )
    stack.callback(training.close)
    agreement = Agreement(rank.group, rank.flag)
    meters = Meters(
        rank.attempt,
        config.optimization.global_batch_size,
        batches.steps_per_epoch,
        config.logging.every_steps,
        run.recorder,
    )
    guard = Guard(
        config.optimization, learner.model, norm_counts=not rank.precision.needs_scaler, skips=start.skips
    )
    return Trainer(
        experiment=config,
        device=rank.device,
        precision=rank.precision,
        task=task,
        model=learner.wrapped,
        strategy=learner.strategy,
        optimization=learner.optimization,
        ema=learner.ema,
        guard=guard,
        agreement=agreement,
        progress=rank.progress,
        meters=meters,
        status=_status_writer(run, start.position) if rank.is_first else None,
        cadence=Cadence.of(
            config.evaluation, config.checkpoint, batches.total_steps, batches.steps_per_epoch
        ),
        training=training,
        validation=_validation(run, target_spec(task)),
        bad_samples=_bad_sample_count(run, agreement),
        to_input=make_to_input(config, run.source.info, rank.device, rank.precision),
        saves=_saves(run, learner, checkpointer, meters, guard, start),
        on_first_step=rank.has_stepped,
        on_event=rank.note,
        step=start.position.step,
    )


def _saves(
    run: _Run,
    learner: Learner,
    checkpointer: Checkpointer,
    meters: Meters,
    guard: Guard,
    start: Resumed,
) -> Saves:
    rank = run.rank

    def extra_at(step: int) -> dict[str, Any]:
        position = Position(step, start.position.skipped)
        return extra(rank, run.source, run.batches, position, start.hardware, guard.skips)

    def on_saved(save: Save) -> None:
        if rank.events is not None:
            rank.events.saved(save.duration_s, save.stall_s)
        if run.recorder is not None:
            run.recorder.committed(save.step)

    return Saves(checkpointer, learner.state, meters, extra_at, on_saved)


def _bad_samples(rank: Rank) -> BadSamples | None:
    if rank.experiment.data.on_bad_sample == "fail":
        return None
    return BadSamples(rank.paths, rank.attempt, rank.facts.rank)


def _bad_sample_count(run: _Run, agreement: Agreement) -> BadSampleCount:
    bad, most = run.bad_samples, run.rank.experiment.data.max_bad_samples
    if bad is None:
        return BadSampleCount(lambda: 0, lambda total: None)
    # Rank 0's word: on a network disk ranks may see different files at the same time.
    earlier, looked_at = agreement.rank_0_says(bad.earlier), 0

    def check(total: int) -> None:
        nonlocal looked_at
        if total == looked_at or earlier + total <= most:
            return
        looked_at = total
        # Two ranks may have met the same one: only then fewer are known than were counted.
        is_over = agreement.rank_0_says(len(all_known(run.rank.paths)) > most)
        if is_over:
            raise too_many(run.rank.paths, most)

    return BadSampleCount(lambda: bad.count, check)


def _validation(run: _Run, spec: TargetSpec | None) -> Validation | None:
    rank, split = run.rank, run.source.val
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
        run.bad_samples,
        spec,
    )
    return Validation(lambda: batches.until(lambda: bool(rank.flag)), evaluation_batch_count(split, size))


def _status_writer(run: _Run, position: Position) -> StatusWriter:
    rank = run.rank
    writer = StatusWriter(rank.paths, rank.attempt, run.batches.total_steps, run.batches.steps_per_epoch)
    writer.write("running", position.step)
    return writer


def _begin_record(run: _Run, step: int) -> None:
    """Begin, or after a rollback go on with, what rank 0 writes down of the training."""
    if run.recorder is not None:
        run.recorder.go_back(step)
    elif run.rank.is_first:
        run.recorder = Recorder(MetricsFile(run.rank.paths.metrics, step), _loggers(run.rank), sys.stdout)
        run.recorder.begin(step)


def _loggers(rank: Rank) -> list[Logger]:
    run = read_json(rank.paths.run) or {}
    wanted = dict(rank.experiment.logging.loggers)
    if rank.experiment.logging.wandb is not None:
        wanted["wandb"] = {}
    made = [
        make_logger(
            name, LoggerContext(rank.experiment, rank.paths, run["id"], rank.attempt, run["wandb_id"], args)
        )
        for name, args in wanted.items()
    ]
    return [logger for logger in made if logger is not None]


def make_logger(name: str, context: LoggerContext) -> Logger | None:
    """Return the logger of this name; None, with a warning, where it can't be imported or constructed."""
    try:
        return cast(Logger, part("loggers", name)(context))
    except (Exception, SystemExit):
        _log.warning(
            "logger %s can't be started and receives nothing from this attempt; training continues, "
            "metrics.jsonl has every row",
            name,
            exc_info=True,
        )
        return None


def _layout(run: _Run) -> StepLayout:
    optimization, rank = run.rank.experiment.optimization, run.rank
    size = optimization.global_batch_size // run.batches.micro_batches
    ranks, data_ranks = rank.facts.world_size, rank.degrees.data_ranks
    return StepLayout(optimization.global_batch_size, size, ranks, data_ranks, rank.precision.name)


def _say_start(run: _Run, learner: Learner, position: Position) -> None:
    rank = run.rank
    if not rank.is_first:
        return
    if learner.pretrained is not None and position.step == 0:
        with suppress(OSError):  # it is in the log, too
            notice = printable(learner.pretrained.line())
            write_json(rank.paths.attempt(rank.attempt).notices, {"lines": [notice]})
    _log.info(
        "%s: %d parameters on %d × %s, %s, %s; from step %d to %d",
        rank.experiment.model.name,
        learner.num_parameters,
        rank.facts.world_size,
        rank.device,
        rank.experiment.parallel.strategy,
        _layout(run),
        position.step,
        run.batches.total_steps,
    )
