"""One rank among the others: its experiment and device, the process group, and the watchdog."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import torch

from hpc_train.errors import ExitCode, TryAgainError
from hpc_train.experiment.config.problems import Problem
from hpc_train.experiment.config.schema import Experiment
from hpc_train.experiment.data_facts.by_name import has_one_shape
from hpc_train.experiment.topology.degrees import AXES, Degrees, find_degrees
from hpc_train.experiment.topology.strategy_traits import traits_of
from hpc_train.paths import RunPaths
from hpc_train.rank import signals
from hpc_train.rank.env import RankFacts, is_started_by_slurm, node_name
from hpc_train.run.attempts import EventLog, in_ms, tell_end
from hpc_train.run.create import training_experiment
from hpc_train.run.processes import end_daemons
from hpc_train.training.datasets.skipping import BadSamples
from hpc_train.training.distributed import affinity, rank_limits
from hpc_train.training.distributed.device import (
    Precision,
    choose_device,
    choose_precision,
    limit_memory,
    set_determinism,
    set_threads,
)
from hpc_train.training.distributed.process_group import Group, make_group
from hpc_train.training.distributed.rendezvous import Timeouts, meet
from hpc_train.training.health import node_check, stacks
from hpc_train.training.health.progress import Progress
from hpc_train.training.health.watchdog import CONNECT_LIMIT_S, Watchdog

#: Assumed: the first step compiles and reads cold data.
_FIRST_STEP_FACTOR = 6
#: Share of ``hang_after_min``, if that is longer than the watchdog's default.
_CONNECT_FACTOR = 0.6
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Rank:
    """The objects that are fixed after the rendezvous of the ranks."""

    paths: RunPaths
    attempt: int
    experiment: Experiment
    facts: RankFacts
    degrees: Degrees
    node: str
    device: torch.device
    precision: Precision
    group: Group
    flag: signals.StopFlag
    progress: Progress
    watchdog: Watchdog
    #: On rank 0 only.
    events: EventLog | None

    @property
    def is_first(self) -> bool:
        """True on rank 0."""
        return self.facts.rank == 0

    def warn(self, message: str) -> None:
        """Log a warning that is the same on all ranks, on rank 0 only."""
        if self.is_first:
            _log.warning("%s", message)

    def note(self, event: str) -> None:
        """Record ``event``."""
        self.note_signal()
        if self.events is not None:
            self.events.note(event)

    def note_signal(self) -> None:
        """Record the signal received, if any."""
        _note_signal(self.events, self.flag)

    def has_stepped(self, parts: Mapping[str, float]) -> None:
        """Called after the first step: from now on a stop signal must save, and hang limits are shorter.

        ``parts``: see ``step_times.FirstStep``.
        """
        self.flag.act_at_once(None)
        self.flag.may_exit_early = False
        self.progress.has_stepped()
        if self.events is not None and not self.events.first_step:  # a rollback begins another
            self.events.first_step = dict(parts)
        self.note("first_step")


def make_bad_samples(rank: Rank) -> BadSamples | None:
    """Return the recorder of samples that this rank skips; None if the first bad sample ends the run."""
    if rank.experiment.data.on_bad_sample == "fail":
        return None
    return BadSamples(rank.paths, rank.attempt, rank.facts.rank)


@contextmanager
def joined(paths: RunPaths, attempt: int, facts: RankFacts, flag: signals.StopFlag) -> Iterator[Rank]:
    """Join the attempt's process group. Until its first step a stop signal ends the rank immediately."""
    experiment, device = _on_its_cores(training_experiment(paths, attempt), facts)
    set_determinism(experiment.deterministic, device, has_one_shape=has_one_shape(experiment))
    precision = choose_precision(experiment.precision, device)
    degrees = _degrees(experiment, facts)
    has_mesh = traits_of(experiment.parallel.strategy).has_mesh
    axes = [getattr(degrees, axis) for axis in AXES] if has_mesh else []
    rank_limits.check_open_files(facts, axes, experiment.workers, node_name(os.environ))
    stacks.limit_core_files(os.environ)
    rank_limits.check_address_space(node_name(os.environ))
    events = _event_log(paths, attempt) if facts.rank == 0 else None
    hang_after_s = experiment.recovery.hang_after_min * 60
    first_hang_after_s = hang_after_s * _FIRST_STEP_FACTOR
    # They expire after the watchdog, which can name the hung rank.
    timeouts = Timeouts(silence_s=2 * first_hang_after_s)
    node, progress = node_name(os.environ), Progress()
    rendezvous, token = paths.attempt(attempt).rendezvous, os.environ.get("HPC_TRAIN_TOKEN", "")
    with _signal_noted(events, flag):
        meeting = meet(facts, device, rendezvous, token, timeouts, must_stop=flag.__bool__)

    def end(code: ExitCode) -> None:
        end_process(paths, attempt, facts.rank, node, code)

    watchdog = Watchdog(
        paths.attempt(attempt),
        facts,
        node,
        meeting.own_store,
        progress,
        hang_after_s=hang_after_s,
        first_hang_after_s=first_hang_after_s,
        connect_after_s=max(CONNECT_LIMIT_S, hang_after_s * _CONNECT_FACTOR),
        end=end,
    )
    progress.at("connecting")
    watchdog.start()
    try:
        with _signal_noted(events, flag):
            group = make_group(facts, device, meeting, timeouts, must_stop=flag.__bool__)
        state = (device, precision, group, flag, progress, watchdog, events)
        rank = Rank(paths, attempt, experiment, facts, degrees, node, *state)

        def leave() -> None:
            """End on a stop signal: all training so far is in a checkpoint."""
            rank.note_signal()
            end(ExitCode.TRY_AGAIN)

        flag.act_at_once(leave)
        rank.note("joined")
        _check_and_connect(rank)
        progress.at("building")
        yield rank
    except BaseException:
        watchdog.wait_if_ending()  # the lost peer may have been ended by its own watchdog
        raise
    progress.at("leaving")
    group.wait_to_leave()
    watchdog.stop()
    group.leave()  # not after an error: destroying a broken group may hang or abort


def _on_its_cores(experiment: Experiment, facts: RankFacts) -> tuple[Experiment, torch.device]:
    """Bind this rank to its device, cores and threads; return the file with ``data.workers`` as a number."""
    on_slurm = is_started_by_slurm(os.environ)
    device = choose_device(experiment.device, facts.local_rank, _expects_gpus(experiment, on_slurm))
    num_sharing = affinity.bind(facts, device, os.environ) if on_slurm else facts.local_world_size
    set_threads(num_sharing)
    if on_slurm and experiment.slurm is not None and "HPC_TRAIN_SLOT" in os.environ:
        limit_memory(device, experiment.slurm.runs_per_gpu)
    if device.type == "cpu":
        rank_limits.keep_freed(os.environ)
    if experiment.data.workers == "auto":
        experiment = experiment.with_workers(affinity.loader_processes(num_sharing, device))
        _log.info("data.workers: auto is %d here", experiment.workers)
    return experiment, device


def end_process(paths: RunPaths, attempt: int, rank: int, node: str, code: ExitCode) -> None:
    """End this process immediately, from any thread; write the exit code for the launcher.

    For a hung rank, the watchdog that raised the alarm has already written the exit code.
    """
    if code != ExitCode.HUNG or not paths.attempt(attempt).exit(rank).exists():
        tell_end(paths.attempt(attempt), rank, int(code), node)
    with suppress(Exception):  # the interrupted or main thread may hold their locks
        sys.stdout.flush()
        sys.stderr.flush()
    end_daemons()
    os._exit(int(code))


def _degrees(experiment: Experiment, facts: RankFacts) -> Degrees:
    degrees = find_degrees(experiment.parallel, facts.world_size, facts.world_size // facts.num_nodes)
    if isinstance(degrees, Problem):
        raise degrees.as_error()
    return degrees


def _check_and_connect(rank: Rank) -> None:
    """Check the nodes, then connect the devices; signals act immediately meanwhile. Collective."""

    def connect() -> None:
        rank.progress.at("connecting devices")
        rank.group.connect()

    experiment, attempt = rank.experiment, rank.paths.attempt(rank.attempt)
    if experiment.recovery.check_nodes:
        rank.progress.at("checking")
        owns_gpu = _expects_gpus(experiment, is_started_by_slurm(os.environ))
        identity = (rank.facts, rank.device, attempt, rank.node)
        node_check.check(*identity, experiment=experiment, connect=connect, owns_gpu=owns_gpu)
    else:
        connect()


@contextmanager
def _signal_noted(events: EventLog | None, flag: signals.StopFlag) -> Iterator[None]:
    try:
        yield
    except TryAgainError:
        _note_signal(events, flag)
        raise


def _expects_gpus(experiment: Experiment, on_slurm: bool) -> bool:
    return on_slurm and experiment.slurm is not None and experiment.slurm.gpus_per_node > 0


def _event_log(paths: RunPaths, attempt: int) -> EventLog:
    """Start rank 0's event log, with the start time of its process, if the launcher passed that."""
    events = EventLog(paths.attempt(attempt))
    started = os.environ.get("HPC_TRAIN_RANK_START")
    events.note("rank", in_ms(float(started)) if started else None)
    return events


def _note_signal(events: EventLog | None, flag: signals.StopFlag) -> None:
    if events is not None and flag.first is not None and flag.first_at is not None:
        events.signalled(flag.first.name, flag.first_at)
