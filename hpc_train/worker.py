"""One rank, from its start to its exit code: builds what the file names, trains, says how it ended.

Called by ``launchers.entry`` on every rank. Whatever goes wrong becomes an exit code and, unless another
rank is the cause, a ``rank-<r>.error`` file that the launcher and ``status`` show.
"""

from __future__ import annotations

import errno
import logging
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from hpc_train import __version__, registry
from hpc_train.config.schema import Experiment
from hpc_train.datasets.base import DataSource
from hpc_train.datasets.building import build_source
from hpc_train.datasets.loading import evaluation_batch_count, evaluation_batches, training_batches
from hpc_train.datasets.normalize import Normalize
from hpc_train.datasets.sampler import Position
from hpc_train.engine.cadence import Cadence
from hpc_train.engine.checkpoint import Checkpointer
from hpc_train.engine.compiling import compile_error, compile_model
from hpc_train.engine.meters import Meters, Recorder, StatusWriter
from hpc_train.engine.metrics_file import MetricsFile
from hpc_train.engine.optimization import Optimization, make_optimizer
from hpc_train.engine.schedules import make_schedule
from hpc_train.engine.shards import storage_error
from hpc_train.engine.trainer import Trainer, Validation
from hpc_train.engine.training_state import TrainingState
from hpc_train.errors import ExitCode, HpcTrainError, StorageError, TryAgainError, UserError
from hpc_train.loggers.base import Logger, LoggerContext
from hpc_train.models.blocks import find_blocks
from hpc_train.models.building import build_model
from hpc_train.paths import RunPaths
from hpc_train.plan.batches import BatchArithmetic
from hpc_train.run_folder.attempts import in_ms
from hpc_train.run_folder.creation import effective_experiment
from hpc_train.run_folder.ends import tell_error
from hpc_train.run_folder.events import EventLog
from hpc_train.run_folder.files import read_json
from hpc_train.runtime import affinity, signals
from hpc_train.runtime.agreement import Agreement
from hpc_train.runtime.data_info import Batch
from hpc_train.runtime.device import choose_device, set_determinism, set_threads
from hpc_train.runtime.precision import Precision, choose_precision
from hpc_train.runtime.process_group import Group, join, peer_lost
from hpc_train.runtime.ranks import RankFacts, is_started_by_slurm
from hpc_train.runtime.seeds import seed_build
from hpc_train.strategies.base import Placement, Strategy
from hpc_train.tasks.base import Task

#: Errors of the disk that the user mends; any other OSError is shown whole.
_DISK_REFUSES = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO}

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Rank:
    """What stands fast once the ranks have found each other."""

    paths: RunPaths
    attempt: int
    experiment: Experiment
    facts: RankFacts
    device: torch.device
    precision: Precision
    group: Group
    flag: signals.StopFlag
    #: On rank 0 alone.
    events: EventLog | None

    @property
    def is_first(self) -> bool:
        return self.facts.rank == 0

    def note(self, event: str) -> None:
        """Write down that ``event`` happened."""
        self.note_signal()
        if self.events is not None:
            self.events.note(event)

    def note_signal(self) -> None:
        """Write down which signal has come, if one has."""
        _note_signal(self.events, self.flag)


@dataclass(frozen=True)
class Learner:
    """The model as it is trained here, and what changes it."""

    #: Plain: its names are those of checkpoints and exports.
    model: nn.Module
    #: What training calls.
    wrapped: nn.Module
    strategy: Strategy
    optimization: Optimization

    @property
    def state(self) -> TrainingState:
        return TrainingState(self.model, self.optimization.optimizer, self.optimization.scaler)


def run(paths: RunPaths, attempt: int) -> ExitCode:
    """Be one rank of one attempt, to its end. Returns what the process exits with; never raises."""
    flag = signals.install()
    facts = RankFacts()
    try:
        facts = RankFacts.from_environment(os.environ)
        logging.basicConfig(stream=sys.stderr, level=logging.INFO if facts.rank == 0 else logging.WARNING)
        with _joined(paths, attempt, facts, flag) as rank:
            return _train(rank)
    except BaseException as error:
        return _report(error, paths, attempt, facts)


@contextmanager
def _joined(paths: RunPaths, attempt: int, facts: RankFacts, flag: signals.StopFlag) -> Iterator[Rank]:
    experiment = effective_experiment(paths, attempt)
    on_slurm = is_started_by_slurm(os.environ)
    device = choose_device(experiment.device, facts.local_rank, _expects_gpus(experiment, on_slurm))
    set_threads(affinity.bind(facts, device, os.environ) if on_slurm else facts.local_world_size)
    set_determinism(experiment.deterministic, device)
    precision = choose_precision(experiment.precision, device)
    rendezvous = paths.attempt(attempt).rendezvous
    token = os.environ.get("HPC_TRAIN_TOKEN", "")
    events = _event_log(paths, attempt) if facts.rank == 0 else None
    try:
        group = join(facts, device, rendezvous, token, must_stop=lambda: bool(flag))
    except TryAgainError:
        _note_signal(events, flag)
        raise
    rank = Rank(paths, attempt, experiment, facts, device, precision, group, flag, events)
    rank.note("joined")
    yield rank
    group.wait_to_leave()
    group.leave()  # not after an error: tearing a broken group down may hang or abort


def _expects_gpus(experiment: Experiment, on_slurm: bool) -> bool:
    return on_slurm and experiment.slurm is not None and experiment.slurm.gpus_per_node > 0


def _event_log(paths: RunPaths, attempt: int) -> EventLog:
    """Begin rank 0's account: with the time at which its process began, where the launcher left that."""
    events = EventLog(paths.attempt(attempt))
    started = os.environ.get("HPC_TRAIN_RANK_START")
    events.note("rank", in_ms(float(started)) if started else None)
    return events


def _note_signal(events: EventLog | None, flag: signals.StopFlag) -> None:
    if events is not None and flag.first is not None and flag.first_at is not None:
        events.signalled(flag.first.name, flag.first_at)


def _train(rank: Rank) -> ExitCode:
    source = build_source(rank.experiment.data)
    batches = BatchArithmetic.of(rank.experiment.optimization, len(source.train), rank.facts.world_size)
    learner = _build(rank, source, batches)
    checkpointer = _checkpointer(rank, learner)
    position = _resumed_position(checkpointer, learner)
    rank.note("loaded")
    with ExitStack() as stack:
        recorder = _recorder(rank, position.step) if rank.is_first else None
        if recorder is not None:
            stack.callback(recorder.close)
        _say_start(rank, learner, batches, position, checkpointer.notices)
        trainer = _trainer(rank, learner, source, batches, checkpointer, position, recorder, stack)
        is_done = trainer.train()
        if recorder is not None:
            recorder.state = "completed" if is_done else "failed"
        if trainer.status is not None and is_done:
            trainer.status.write("completed", trainer.step)
    rank.note_signal()  # again: it may have reached another rank first
    return ExitCode.DONE if is_done else ExitCode.TRY_AGAIN


def _build(rank: Rank, source: DataSource, batches: BatchArithmetic) -> Learner:
    """Build, compile, place, then make the optimizer: the order that facts of torch ask for."""
    config = rank.experiment
    seed_build(config.seed)
    model = build_model(config.model, source.info)
    blocks = find_blocks(model)
    compile_model(model, blocks, config.compile)
    placement = Placement(
        rank=rank.facts.rank,
        world_size=rank.facts.world_size,
        device=rank.device,
        precision=rank.precision,
        channels_last=config.model.channels_last,
        args=config.parallel.args,
    )
    strategy = cast(Strategy, _part("strategies", config.parallel.strategy)(placement))
    wrapped = strategy.place(model, blocks)
    optimizer = make_optimizer(config.optimization.optimizer, model, config.optimization.global_batch_size)
    schedule = make_schedule(config.optimization.schedule, batches.total_steps, batches.steps_per_epoch)
    return Learner(model, wrapped, strategy, Optimization(optimizer, schedule, rank.precision, rank.device))


def _part(kind: str, name: str) -> Any:
    return registry.load(kind, name)


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


def _resumed_position(checkpointer: Checkpointer, learner: Learner) -> Position:
    """Bring back the newest whole checkpoint; return where to go on, the beginning where none was saved."""
    loaded = checkpointer.load_newest(learner.state)
    if loaded is not None:
        saved = loaded.extra["position"]
        return Position(saved["step"], tuple(saved["skipped"]))
    if checkpointer.notices:
        raise StorageError(
            "no checkpoint is whole any more, and training is not begun anew in silence; start it again with "
            "hpc-train submit --new: " + "; ".join(checkpointer.notices)
        )
    return Position(0)


def _extra(rank: Rank, batches: BatchArithmetic, position: Position) -> dict[str, Any]:
    """Return what a checkpoint says besides tensors: where it stands and how it came about."""
    return {
        "position": {"step": position.step, "skipped": list(position.skipped)},
        "seed": rank.experiment.seed,
        "world_size": rank.facts.world_size,
        "micro_batches": batches.micro_batches,
        "steps_per_epoch": batches.steps_per_epoch,
        "strategy": rank.experiment.parallel.strategy,
        "precision": rank.experiment.precision,
        "device": rank.device.type,
        "versions": {"hpc_train": __version__, "torch": torch.__version__},
    }


def _trainer(
    rank: Rank,
    learner: Learner,
    source: DataSource,
    batches: BatchArithmetic,
    checkpointer: Checkpointer,
    position: Position,
    recorder: Recorder | None,
    stack: ExitStack,
) -> Trainer:
    config, facts = rank.experiment, rank.facts
    training = training_batches(
        source, config, position, batches.total_steps, facts.rank, facts.world_size, rank.device
    )
    stack.callback(training.close)

    def save(step: int) -> None:
        began = time.monotonic()
        with rank.group.patient():
            checkpointer.save(learner.state, step, _extra(rank, batches, Position(step, position.skipped)))
        if rank.events is not None:
            rank.events.saved(time.monotonic() - began, time.monotonic() - began)

    def on_first_step() -> None:
        rank.group.shorten_timeouts()
        rank.note("first_step")

    return Trainer(
        experiment=config,
        device=rank.device,
        precision=rank.precision,
        task=cast(Task, _part("tasks", config.task)(config, source.info)),
        model=learner.wrapped,
        strategy=learner.strategy,
        optimization=learner.optimization,
        agreement=Agreement(rank.group, rank.flag),
        meters=Meters(
            rank.attempt,
            config.optimization.global_batch_size,
            batches.steps_per_epoch,
            config.logging.every_steps,
            recorder,
        ),
        status=_status_writer(rank, batches, position) if rank.is_first else None,
        cadence=Cadence.of(
            config.evaluation, config.checkpoint, batches.total_steps, batches.steps_per_epoch
        ),
        training=training,
        validation=_validation(rank, source),
        to_input=_to_input(rank, source),
        save_checkpoint=save,
        on_first_step=on_first_step,
        on_event=rank.note,
        step=position.step,
    )


def _to_input(rank: Rank, source: DataSource) -> Callable[[Batch], Batch]:
    """Return what makes of a loader's batch one that the model takes, on the device."""
    config = rank.experiment
    normalize = Normalize(
        source.info, config.data, rank.precision.param_dtype, channels_last=config.model.channels_last
    )

    def to_input(batch: Batch) -> Batch:
        moved = batch.to(rank.device)
        return replace(moved, inputs=normalize(moved.inputs))

    return to_input


def _validation(rank: Rank, source: DataSource) -> Validation | None:
    if source.val is None:
        return None
    facts, size = rank.facts, rank.experiment.optimization.micro_batch_size
    assert isinstance(size, int)
    batches = evaluation_batches(source.val, rank.experiment, facts.rank, facts.world_size, rank.device)
    return Validation(lambda: batches, evaluation_batch_count(source.val, size))


def _status_writer(rank: Rank, batches: BatchArithmetic, position: Position) -> StatusWriter:
    writer = StatusWriter(rank.paths, rank.attempt, batches.total_steps, batches.steps_per_epoch)
    writer.write("running", position.step)
    return writer


def _recorder(rank: Rank, resumed_step: int) -> Recorder:
    return Recorder(MetricsFile(rank.paths.metrics, resumed_step), _loggers(rank), sys.stdout)


def _loggers(rank: Rank) -> list[Logger]:
    run = read_json(rank.paths.run) or {}
    wanted = dict(rank.experiment.logging.loggers)
    if rank.experiment.logging.wandb is not None:
        wanted["wandb"] = {}
    return [
        _part("loggers", name)(
            LoggerContext(rank.experiment, rank.paths, run["id"], rank.attempt, run["wandb_id"], args)
        )
        for name, args in wanted.items()
    ]


def _say_start(
    rank: Rank, learner: Learner, batches: BatchArithmetic, position: Position, notices: list[str]
) -> None:
    if not rank.is_first:
        return
    count = sum(parameter.numel() for parameter in learner.model.parameters())
    _log.info(
        "%s: %d parameters on %d × %s, %s, %s; %d micro-batches a step; from step %d to %d",
        rank.experiment.model.name,
        count,
        rank.facts.world_size,
        rank.device,
        rank.experiment.parallel.strategy,
        rank.precision.name,
        batches.micro_batches,
        position.step,
        batches.total_steps,
    )
    for notice in notices:
        _log.warning("%s", notice)


def _report(error: BaseException, paths: RunPaths, attempt: int, facts: RankFacts) -> ExitCode:
    """Write down why this rank ends, and choose its exit code."""
    cause = _cause(error)
    if isinstance(error, SystemExit | KeyboardInterrupt):
        return ExitCode.INTERRUPTED
    if peer_lost(error) and not isinstance(cause, UserError):
        print(f"rank {facts.rank}: a peer is gone: {error}", file=sys.stderr, flush=True)
        return ExitCode.PEER_LOST
    if isinstance(error, TryAgainError):
        print(f"rank {facts.rank}: {error}", file=sys.stderr, flush=True)
        return ExitCode.TRY_AGAIN
    is_users = isinstance(cause, UserError)
    text = str(cause) if is_users else "".join(traceback.format_exception(error))
    print(text, file=sys.stderr, flush=True)
    try:
        tell_error(paths.attempt(attempt), facts.rank, text)
    except OSError as full:
        print(f"{paths.attempt(attempt).error(facts.rank)} can't be written: {full}", file=sys.stderr)
    return cause.exit_code if isinstance(cause, HpcTrainError) else ExitCode.FAILED


def _cause(error: BaseException) -> BaseException:
    """Return the error in the user's terms where it has any: what a compiler or a full disk said."""
    if isinstance(error, OSError) and error.errno in _DISK_REFUSES:
        return storage_error(error, Path(error.filename or "the run's folder"))
    return compile_error(error) or error
