"""Builds a ``Trainer`` from the file and runs it; rebuilds all but ``TrainingRun`` after a rollback."""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hpc_train.errors import ExitCode, printable
from hpc_train.experiment.config.schema import Experiment
from hpc_train.experiment.topology.batch_arithmetic import BatchArithmetic
from hpc_train.run import checkpoints, evaluation_jobs, metric_rows, weight_source
from hpc_train.run.digests import DigestWriter, StepDigest
from hpc_train.run.rollbacks import Rollback
from hpc_train.run.spikes import SpikeRule
from hpc_train.training import batch_size_search, compiling, evaluation_outputs, non_finite
from hpc_train.training.checkpoint.checkpointer import Checkpointer, Save
from hpc_train.training.data_staging import staged, verified
from hpc_train.training.datasets.batches import TrainingBatches, training_batches
from hpc_train.training.datasets.building import build_source
from hpc_train.training.datasets.notices import data_notices
from hpc_train.training.datasets.sampler import Position
from hpc_train.training.datasets.types import Batch
from hpc_train.training.distributed.consensus import Agreement
from hpc_train.training.evaluation import Evaluator, make_validation
from hpc_train.training.forward import TrainingForward
from hpc_train.training.loop import AutoInterval, Cadence, NoSaves, Saves, Trainer
from hpc_train.training.meters import Meters, StatusWriter
from hpc_train.training.model_selection import ModelSelection, refuse_no_evaluations
from hpc_train.training.models.preprocessing import with_preprocessing
from hpc_train.training.profiling import StepProfiler
from hpc_train.training.rank import Rank, make_bad_samples
from hpc_train.training.resuming import Resumed, extra, resumed
from hpc_train.training.state_digests import PartDigests
from hpc_train.training.step import StepObserver
from hpc_train.training.step_digests import StepDigests, digests_mode
from hpc_train.training.step_times import FirstStep, RunAhead, StepProgress, StepTimes
from hpc_train.training.tasks.base import Task, make_task, optional_metrics, target_spec
from hpc_train.training.train_state import TrainState, build, context
from hpc_train.training.training_run import (
    Stretch,
    TrainingRun,
    bad_sample_count,
    begin_record,
    on_first_batch,
    report_start,
)
from hpc_train.training.verification import Verification

_log = logging.getLogger(__name__)


def train(rank: Rank) -> ExitCode:
    """Train to the end or until a stop request; roll back if the file allows it."""
    run = prepared_run(rank)
    try:
        is_done = None
        while is_done is None:
            is_done = _train_once(run)
            if is_done is None:
                free_memory(rank)
        if run.metrics_writer is not None:
            run.metrics_writer.state = "completed" if is_done else "failed"
        if run.profiler is not None and not run.profiler.has_begun:
            _log.warning("no profile: the attempt ended before its step %d", run.profiler.after_steps)
    finally:
        if run.metrics_writer is not None:
            run.metrics_writer.close()
        if run.flops is not None:
            run.flops.count.close()
        for file in (run.digests, run.spikes, run.rollbacks):
            if file is not None:
                file.close()
    rank.note_signal()  # again: it may have reached another rank first
    return ExitCode.DONE if is_done else ExitCode.TRY_AGAIN


def train_again(run: TrainingRun, stretch: Stretch) -> bool | None:
    """Replay the steps of ``stretch``; see ``_train_once`` for the result. Nothing is saved or logged.

    Between two stretches call ``free_memory``.
    """
    run.stretch, run.skipped = stretch, stretch.skipped
    return _train_once(run)


def free_memory(rank: Rank) -> None:
    """Free what the last training on this rank occupied, before everything is built again."""
    rank.progress.forget_phases()
    rank.progress.at("building")
    gc.collect()  # modules under FSDP are in reference cycles
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def prepared_run(rank: Rank) -> TrainingRun:
    """Find the micro-batch size, then build the data."""
    rank = batch_size_search.resolved(rank)
    rank = replace(rank, experiment=with_preprocessing(rank.experiment))
    source = verified(rank, build_source(staged(rank)))
    if rank.is_first:
        for notice in data_notices(source, rank.experiment.data):
            _log.warning("%s", printable(notice))
    refuse_no_evaluations(rank.experiment, source)
    batches = BatchArithmetic.of(rank.experiment.optimization, len(source.train), rank.degrees.data_ranks)
    return TrainingRun(rank, source, batches, make_bad_samples(rank))


def _train_once(run: TrainingRun) -> bool | None:
    """Build everything and continue training from the newest checkpoint.

    Returns True if done, False after a stop request, None for a rollback; then ``run.skipped`` is updated.
    """
    rank = run.rank
    train_state = build(_to_build(run), run.source.info, run.batches, context(rank))
    checkpointer = _checkpointer(run, train_state)
    rank.progress.at("loading")
    begin = None if run.stretch is None else run.stretch.begin
    start = resumed(rank, checkpointer, train_state, run.source, begin)
    # A replay may begin at a checkpoint that was saved after a rollback of the step that it repeats.
    earlier = start.position.skipped if run.stretch is None else ()
    skipped = tuple(sorted({*earlier, *run.skipped}))
    if run.stretch is None:
        non_finite.check_rollbacks(skipped, rank.experiment.optimization, run.rolled_back_at)
    start = replace(start, position=Position(start.position.step, skipped))
    rank.note("loaded")
    if run.stretch is None:
        begin_record(run, start.position)
    report_start(run, train_state, start.position)
    with ExitStack() as stack:
        trainer = _trainer(run, train_state, checkpointer, start, stack)
        try:
            is_done = trainer.train()
        except non_finite.RollbackError as back:
            _go_back(run, start.position, back)
            return None
        if trainer.status is not None and is_done:
            trainer.status.write("completed", trainer.step, trainer.selection.reason)
        if run.metrics_writer is not None and is_done:
            run.metrics_writer.committed(trainer.step)  # the last evaluation may have no save after it
    return is_done


def _to_build(run: TrainingRun) -> Experiment:
    """Return the experiment to build; without files of weights once a checkpoint replaces them.

    Collective: rank 0 decides, since ranks may see different files on a network disk.
    """
    rank = run.rank
    if not weight_source.reads_files(rank.experiment):
        return rank.experiment
    has_weights = bool(checkpoints.committed(run.paths)) if run.stretch is None else run.stretch.begin > 0
    if Agreement(rank.group, rank.flag).rank_0_says(has_weights):
        return weight_source.without_files(rank.experiment)
    return weight_source.pinned(run.paths, rank.experiment)


def _go_back(run: TrainingRun, start: Position, back: non_finite.RollbackError) -> None:
    """Record which data the run skips from now on. The same on every rank."""
    window = next(Position(back.step, start.skipped).windows())
    run.skipped, run.rolled_back_at = run.skipped | {window}, back.step + 1
    if run.rollbacks is not None:
        run.rollbacks.append(Rollback(back.step + 1, window))
    if run.rank.is_first:
        _log.warning("%s; going back to the newest checkpoint, leaving data window %d out", back, window)


def _checkpointer(run: TrainingRun, train_state: TrainState) -> Checkpointer:
    rank = run.rank
    return Checkpointer(
        run.paths,
        rank.attempt if run.stretch is None else checkpoints.newest_attempt(run.paths),
        train_state.strategy,
        rank.facts.rank,
        rank.facts.world_size,
        rank.group.control,
        keep=rank.experiment.checkpoint.keep,
        keep_every=rank.experiment.checkpoint.keep_every,
    )


def _trainer(
    run: TrainingRun, train_state: TrainState, checkpointer: Checkpointer, start: Resumed, stack: ExitStack
) -> Trainer:
    rank, config = run.rank, run.rank.experiment
    task = make_task(config, run.source.info)
    training = _training_batches(run, start.position, task)
    stack.callback(training.close)
    agreement = Agreement(rank.group, rank.flag)
    rule, acts = non_finite.spike_rule(config.optimization, run.paths, start.position, checkpointer.ranks)
    recorder = _spike_recorder(run, training, None if acts else rule)
    digests = _observer(run, train_state, recorder)
    meters = _meters(run, digests)
    observers = [] if digests is None else [digests]
    verification = None
    if config.recovery.verify_every_steps is not None and run.stretch is None:
        steps = range(start.position.step, run.last_step)
        verification = Verification(rank, train_state, checkpointer.ranks, training, steps, start)
        observers.insert(0, verification)
    rows = metric_rows.evaluation_rows(rank.paths.metrics) if rank.is_first else ()
    paths = rank.paths if rank.is_first else None
    selection = ModelSelection.of(config, agreement, rows, paths, optional_metrics(task))
    status = _status_writer(run, start.position, meters, selection) if rank.is_first else None
    compilation = stack.enter_context(compiling.watched(config.compile, _on_compilation(rank, status)))
    on_batch = on_first_batch(run, train_state, task, start.position.step)
    progress = StepProgress(rank.progress, meters.forward_time, _run_ahead(rank))
    forward = _forward(run, train_state, task, progress, observers)
    guard = _guard(rank, train_state, start, rule if acts else None, recorder)
    if run.interval is None and run.stretch is None:
        run.interval = AutoInterval.of(rank)
    return Trainer(
        state=train_state,
        forward=forward,
        training=training,
        step=start.position.step,
        cadence=Cadence(
            config.evaluation,
            config.checkpoint,
            run.last_step,
            run.batches.steps_per_epoch,
            by_job=_evaluates_by_job(run),
        ),
        guard=guard,
        max_norm=config.optimization.clip_grad_norm,
        evaluator=None if run.stretch else _evaluator(run, train_state, forward, agreement),
        selection=selection,
        saves=NoSaves()
        if run.stretch
        else _saves(run, train_state, checkpointer, meters, guard, selection, start, verification),
        meters=meters,
        agreement=agreement,
        progress=rank.progress,
        step_progress=progress,
        first_step=FirstStep(meters.times, compilation, config.compile, on_batch, rank.has_stepped),
        bad_samples=bad_sample_count(run, agreement),
        on_event=rank.note,
        status=status,
        profiler=_profiler(run, meters, stack),
        request_evaluation=partial(evaluation_jobs.request, run.paths) if rank.is_first else None,
        observers=observers,
        interval=run.interval,
    )


def _spike_recorder(
    run: TrainingRun, training: TrainingBatches, rule: SpikeRule | None
) -> non_finite.SpikeRecorder | None:
    """Return rank 0's recorder of spikes, if they are recorded. ``rule``: None: the guard finds them."""
    if run.spikes is None or run.digests is None:
        return None
    return non_finite.SpikeRecorder(run.spikes, run.digests.steps, training.sampler.samples, rule)


def _guard(
    rank: Rank,
    train_state: TrainState,
    start: Resumed,
    rule: SpikeRule | None,
    recorder: non_finite.SpikeRecorder | None,
) -> non_finite.Guard:
    return non_finite.Guard(
        rank.experiment.optimization,
        train_state.model,
        norm_counts=not rank.precision.needs_scaler,
        skips=start.skips,
        rule=rule,
        record=(lambda spike, reaction: spike) if recorder is None else recorder.record,
    )


def _evaluates_by_job(run: TrainingRun) -> bool:
    """Return True if the launcher submits a job for the evaluation of each checkpoint that is due."""
    is_wanted = run.rank.experiment.evaluation.as_job and evaluation_jobs.VARIABLE in os.environ
    return is_wanted and run.stretch is None and run.source.val is not None


def _observer(
    run: TrainingRun, train_state: TrainState, recorder: DigestWriter[StepDigest] | None
) -> StepObserver | None:
    """Return the observer of a replay, or that of the file's digests, if any. Collective."""
    rank = run.rank
    if run.stretch is not None:
        return run.stretch.observe(run, train_state)
    mode = digests_mode(rank.experiment, rank.device)
    if mode == "off":
        return None
    files, every = run.digests, rank.experiment.checkpoint.parts_every
    parts = None
    if mode == "parts":
        writer = files.parts if files else None
        parts = PartDigests(train_state, writer, rank.attempt, every, run.batches.total_steps)
    steps = recorder or (files.steps if files else None)
    return StepDigests(steps, rank.attempt, owns_loss=train_state.strategy.owns_loss, parts=parts)


def _forward(
    run: TrainingRun,
    train_state: TrainState,
    task: Task,
    progress: StepProgress,
    observers: Sequence[StepObserver],
) -> TrainingForward:
    def on_loss(batch: Batch, loss: Tensor) -> None:
        for observer in observers:
            observer.loss_computed(batch, loss)

    rank, info = run.rank, run.source.info
    forward = TrainingForward.of(rank.experiment, info, train_state, task, rank.precision, rank.device)
    return replace(forward, on_begin=progress.begin_forward, on_end=progress.end_forward, on_loss=on_loss)


def _evaluator(
    run: TrainingRun, train_state: TrainState, forward: TrainingForward, agreement: Agreement
) -> Evaluator | None:
    """Return the evaluator with the outputs that the file requests; None without validation data."""
    rank, source, task = run.rank, run.source, forward.task
    validation = make_validation(rank, source, run.bad_samples, target_spec(task))
    if validation is None:
        return None

    def sampled(batch: Batch) -> Tensor:
        rank.progress.at("sampling text", batch.step, part=batch.number)
        return forward.outputs(train_state.wrapped, batch)

    outputs = [
        evaluation_outputs.TextSamples.of(rank.experiment, source, task, sampled),
        evaluation_outputs.Pictures.of(rank.experiment, source, task, rank.group.control),
        evaluation_outputs.TaskFiles(task)
        if rank.is_first and isinstance(task, evaluation_outputs.KeepsFiles)
        else None,
    ]
    folder = evaluation_outputs.EvaluationFiles(rank.paths) if rank.is_first else None
    enabled = [output for output in outputs if output is not None]
    return Evaluator(train_state, forward, validation, agreement, rank.progress, enabled, folder)


def _training_batches(run: TrainingRun, position: Position, task: Task) -> TrainingBatches:
    rank = run.rank
    return training_batches(
        run.source,
        rank.experiment,
        position,
        run.last_step,
        rank.degrees.data_rank(rank.facts.rank),
        rank.degrees.data_ranks,
        rank.device,
        run.bad_samples,
        target_spec(task),
    )


def _meters(run: TrainingRun, observer: StepObserver | None) -> Meters:
    config = run.rank.experiment
    return Meters(
        run.rank.attempt,
        config.optimization.global_batch_size,
        run.batches.steps_per_epoch,
        config.logging.every_steps,
        run.metrics_writer,
        StepTimes(
            config.optimization.global_batch_size,
            run.source.info.sequence_length,
            rates=run.rates,
        ),
        run.rank.device,
        observer if isinstance(observer, StepDigests) else None,
    )


def _profiler(run: TrainingRun, meters: Meters, stack: ExitStack) -> StepProfiler | None:
    """Return the profiler on rank 0 if it is requested; closing ``stack`` writes the profile."""
    rank, stretch = run.rank, run.stretch
    config = rank.experiment.profile if stretch is None else stretch.profile
    if config is None or not rank.is_first or (run.profiler is not None and run.profiler.has_begun):
        return None
    profiler = StepProfiler(config, rank.paths.attempt(rank.attempt), rank.device, meters.times)
    stack.callback(profiler.close)
    run.profiler = profiler
    return profiler


def _on_compilation(rank: Rank, status: StatusWriter | None) -> Callable[[int, float], None]:
    def on_change(graph: int, earlier_s: float) -> None:
        rank.progress.compiles(graph)
        if status is not None:
            status.compiles(graph, earlier_s)

    return on_change


def _run_ahead(rank: Rank) -> RunAhead | None:
    if rank.device.type != "cuda":
        return None
    flags = rank.group.shared_flags  # across nodes the launcher and the watchdog detect a lost peer
    return RunAhead(rank.progress, flags.check_alive if flags is not None else lambda: None)


def _saves(
    run: TrainingRun,
    train_state: TrainState,
    checkpointer: Checkpointer,
    meters: Meters,
    guard: non_finite.Guard,
    selection: ModelSelection,
    start: Resumed,
    verification: Verification | None,
) -> Saves:
    rank = run.rank

    def extra_at(step: int) -> dict[str, Any]:
        position = Position(step, start.position.skipped)
        facts = extra(rank, run.source, run.batches, position, start.hardware, guard.skips)
        verified = {} if verification is None else {checkpoints.VERIFIED: verification.verified}
        return facts | selection.extra() | verified

    def on_saved(save: Save) -> None:
        if run.interval is not None:
            run.interval.saved(save.stall_s)
        if rank.events is not None:
            rank.events.saved(save.duration_s, save.stall_s)
        if run.metrics_writer is not None:
            run.metrics_writer.committed(save.step)
            if rank.experiment.evaluation.as_job:
                run.metrics_writer.join(evaluation_jobs.rows(run.paths), save.step)

    return Saves(checkpointer, train_state.state, meters, extra_at, on_saved)


def _status_writer(
    run: TrainingRun, position: Position, meters: Meters, selection: ModelSelection
) -> StatusWriter:
    rank, batches = run.rank, run.batches
    writer = StatusWriter(
        rank.paths,
        rank.attempt,
        batches.total_steps,
        batches.steps_per_epoch,
        meters.stragglers,
        selection.shown_best,
    )
    writer.write("running", position.step)
    return writer
