"""``micro_batch_size: auto``: finds by trial the largest size that fits on all ranks; stored in the run.

Each rank starts a trial process, this module's ``main``. The trials form their own process group and train
whole steps, smallest size first, until one of them runs out of memory. Only trials can then hang in a
collective; they are killed, and the run itself starts as if nothing had been tried. They leave no files
except compiled code in the run's cache.

Legend: G global batch, m micro-batch, M micro-batches of a step, R data-parallel ranks, S = ⌈M/R⌉ slots of a
rank.
"""

from __future__ import annotations

import gc
import logging
import multiprocessing
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from hpc_train.errors import BadFileError, ExitCode, HpcTrainError, PeerLostError, UserError
from hpc_train.experiment.config.problems import Problem
from hpc_train.experiment.config.schema import Experiment
from hpc_train.experiment.data_facts.by_name import has_one_shape
from hpc_train.experiment.topology.batch_arithmetic import BatchArithmetic, too_few_micro_batches
from hpc_train.experiment.topology.degrees import Degrees, find_degrees, scheduled_candidates
from hpc_train.experiment.topology.strategy_traits import traits_of
from hpc_train.experiment.validate.compatibility import auto_batchnorm, auto_on_cpu
from hpc_train.experiment.validate.slurm_rules import max_nodes, ranks_on_each_node
from hpc_train.paths import RunPaths
from hpc_train.rank import signals
from hpc_train.rank.env import RankFacts, is_started_by_slurm
from hpc_train.run import processes, weight_source
from hpc_train.run.bad_samples import BadSample
from hpc_train.run.create import training_experiment
from hpc_train.run.found_micro_batch import Found, keep, kept
from hpc_train.training.checkpoint.control_group import ControlGroup
from hpc_train.training.compiling import compile_error
from hpc_train.training.datasets.base import DataSource
from hpc_train.training.datasets.batches import training_batches
from hpc_train.training.datasets.building import build_source
from hpc_train.training.datasets.sampler import Position
from hpc_train.training.datasets.skipping import BadSamples
from hpc_train.training.datasets.types import Batch
from hpc_train.training.distributed.backends import peer_lost
from hpc_train.training.distributed.device import choose_device, choose_precision, set_determinism
from hpc_train.training.distributed.process_group import join
from hpc_train.training.forward import TrainingForward
from hpc_train.training.models.preprocessing import with_preprocessing
from hpc_train.training.non_finite import Guard
from hpc_train.training.rank import Rank
from hpc_train.training.rank_exit import TrialError, out_of_memory
from hpc_train.training.step import train_step
from hpc_train.training.strategies.base import RankContext
from hpc_train.training.strategies.batchnorm import has_batchnorm
from hpc_train.training.tasks.base import make_task, target_spec
from hpc_train.training.train_state import TrainState, build

_KEY = "optimization.micro_batch_size"
_TRIAL_MODULE = "hpc_train.training.batch_size_search"
#: Interval between polls of the trials (assumed); a step of most models takes longer.
_POLL_S = 0.1
#: Outcomes that a trial sends last, unless it dies. ``peer``: another trial is gone; this one did not fail.
DONE, OUT_OF_MEMORY, FAILED, PEER = "done", "out of memory", "failed", "peer"
#: Precedence of the outcomes if ranks differ: other trials fail because one ran out of memory.
_WEIGHT = {OUT_OF_MEMORY: 2, FAILED: 1}
_log = logging.getLogger(__name__)
#: The optimizer's state exists from the second step on.
_STEPS = 2
#: Share of the GPU's free memory; the rest is for fragmentation and allocations outside trials. Assumed.
_PART = 0.9
#: CUDA's error in a second process on a GPU in exclusive-process mode (nvidia-smi --compute-mode).
_TAKEN = "busy or unavailable"


def resolved(rank: Rank) -> Rank:
    """Return the rank with ``auto`` replaced by a number. Collective.

    Raises BadFileError if the ranks have no GPUs, nothing fits, the model has BatchNorm, or there are more
    ranks now than micro-batches of the run's size. Errors of a trial's step are raised here.
    """
    if rank.experiment.optimization.micro_batch_size != "auto":
        return rank
    control = ControlGroup(rank.facts.rank, rank.facts.world_size, rank.group.control)
    # Rank 0 decides: on a network disk the others may not see the file yet.
    first = control.together(lambda: kept(rank.paths) if rank.is_first else None)
    (size,) = control.broadcast([0 if first is None else first.size])
    if size == 0:
        result = _search(rank, control)
        first = control.together(lambda: keep(rank.paths, result) if rank.is_first else None)
        (size,) = control.broadcast([result.size if first is None else first.size])
    _check_ranks(rank, size)
    if rank.is_first:
        _log.info("%s: auto is %d in this run", _KEY, size)
    return replace(rank, experiment=rank.experiment.with_micro_batch_size(size))


def doubling(sizes: Sequence[int]) -> list[int]:
    """Return a subset from the smallest to the largest size, each at least twice the previous one."""
    chosen: list[int] = []
    for size in reversed(sizes):
        if not chosen or 2 * size <= chosen[-1]:
            chosen.append(size)
    return sorted({*chosen, *sizes[:1]})


def _check_ranks(rank: Rank, size: int) -> None:
    micro_batches, degrees = rank.experiment.optimization.global_batch_size // size, rank.degrees
    ranks_per_copy = degrees.pipeline * degrees.tensor
    if problem := too_few_micro_batches(micro_batches, degrees.data_ranks, ranks_per_copy, found=size):
        raise problem.as_error()


def _search(rank: Rank, control: ControlGroup) -> Found:
    """Return the largest size that fits on all ranks. Collective."""
    if rank.device.type != "cuda":
        raise auto_on_cpu().as_error()
    sizes = _candidates(rank)
    fitted, too_large, left = 0, None, doubling(sizes)
    while left:
        num_fitted, reason = _try(rank, control, left)
        fitted = left[num_fitted - 1] if num_fitted else fitted
        if reason is not None:
            too_large = left[num_fitted]
            if rank.is_first:
                _log.info("%s: auto: %d does not fit (%s)", _KEY, too_large, reason)
        if fitted == 0:
            raise BadFileError(
                f"{_KEY}: auto finds nothing that fits, not even {left[0]} at a time ({reason}); write "
                "activation_checkpointing: blocks, a parallel.strategy that shards, or take devices with "
                "more memory"
            )
        # If G is a power of two there is nothing in between.
        left = [size for size in sizes if too_large is not None and fitted < size < too_large]
    return Found(fitted, too_large, rank.facts.world_size, rank.attempt)


def _candidates(rank: Rank) -> list[int]:
    """Return the sizes to try, at least one."""
    batch, degrees = rank.experiment.optimization.global_batch_size, rank.degrees
    parallel = rank.experiment.parallel
    sizes = scheduled_candidates(batch, parallel, degrees, _most_data_ranks(rank))
    if not sizes:
        raise BadFileError(
            f"{_KEY}: auto finds no number of micro-batches for {degrees.data_ranks} data-parallel ranks and "
            f"parallel.schedule: {parallel.schedule}; start fewer ranks, or write a larger global_batch_size"
        )
    return sizes


def _most_data_ranks(rank: Rank) -> int:
    """Return R; for a job with a range of nodes, the maximum R of an attempt."""
    here, slurm = rank.degrees.data_ranks, rank.experiment.slurm
    if slurm is None or not is_started_by_slurm(os.environ):
        return here
    per_node = ranks_on_each_node(slurm)
    most = find_degrees(rank.experiment.parallel, max_nodes(slurm) * per_node, per_node)
    return here if isinstance(most, Problem) else max(here, most.data_ranks)


def _try(rank: Rank, control: ControlGroup, sizes: Sequence[int]) -> tuple[int, str | None]:
    """Run the trials through the sizes until one does not fit. Collective.

    Returns the number of sizes that fit on every rank; and the rank that ran out of memory at the next size
    with its error, None if all fit.

    Raises a trial's error on every rank.
    """
    torch.cuda.empty_cache()
    trial = _Trial(rank, sizes)
    try:
        return _followed(rank, control, trial, len(sizes))
    finally:
        trial.end()


def _followed(rank: Rank, control: ControlGroup, trial: _Trial, num_sizes: int) -> tuple[int, str | None]:
    """Poll all trials until their outcome is known."""
    has_failed = False
    while True:
        trial.look()
        weight, has_ended = _WEIGHT.get(trial.outcome, 0), trial.outcome != ""
        fitted, weightiest, all_ended = control.smallest([trial.num_fitted, -weight, int(has_ended)])
        rank.progress.at("building", part=fitted + 1)
        if weightiest == -_WEIGHT[OUT_OF_MEMORY]:
            first = control.first_text(trial.message if trial.outcome == OUT_OF_MEMORY else None)
            assert first is not None, "one rank at least ran out"
            return fitted, f"rank {first[0]}: {first[1]}"
        # Poll once more: the cause may be another trial out of memory, which is reported a moment later.
        if weightiest == -_WEIGHT[FAILED] and has_failed:
            control.together(trial.raise_failure)
        has_failed = weightiest == -_WEIGHT[FAILED]
        if all_ended and not has_failed:
            if fitted < num_sizes:
                raise PeerLostError("the trials of micro_batch_size lost each other, and none said why")
            return fitted, None
        time.sleep(_POLL_S)


class _Trial:
    """This rank's trial process and its messages so far."""

    def __init__(self, rank: Rank, sizes: Sequence[int]) -> None:
        self.num_fitted = 0
        #: Empty while it runs.
        self.outcome = ""
        self.message = ""
        self._code = int(ExitCode.FAILED)
        self._receiver, sender = multiprocessing.Pipe(duplex=False)
        arguments = [rank.paths.folder, rank.attempt, sender.fileno(), os.getpid(), torch.get_num_threads()]
        with sender, signals.blocked():  # the trial ends with its rank, not by signals
            # Without the rank's rendezvous address: the trials have their own rendezvous.
            inherited = {name: value for name, value in os.environ.items() if not name.startswith("MASTER_")}
            # Distinguishes the rendezvous of a second series of trials from the first.
            token = f"{os.environ.get('HPC_TRAIN_TOKEN', '')}-{'-'.join(map(str, sizes))}"
            self._process = subprocess.Popen(
                [sys.executable, "-m", _TRIAL_MODULE, *map(str, [*arguments, *sizes])],
                env=inherited | {"HPC_TRAIN_TOKEN": token},
                pass_fds=(sender.fileno(),),
            )

    def look(self) -> None:
        """Read the trial's messages since the last call."""
        while not self.outcome and self._receiver.poll():
            try:
                what, self.message, self._code = self._receiver.recv()
            except EOFError:
                code, what = self._process.wait(), FAILED
                self.message = (
                    f"{_KEY}: a trial ended with exit code {code} and said nothing; see the rank's log"
                )
            if what == "fitted":
                self.num_fitted += 1
            else:
                self.outcome = what

    def raise_failure(self) -> None:
        """Raise the trial's error, if any; a user's mistake as BadFileError. Not collective."""
        if self.outcome == FAILED:
            kind = BadFileError if self._code == ExitCode.BAD_FILE else TrialError
            raise kind(self.message)

    def end(self) -> None:
        """Kill the process; return once it is gone and its memory is free."""
        self._process.kill()
        self._process.wait()
        self._receiver.close()


@dataclass(frozen=True)
class _Place:
    """Objects that are the same for all sizes."""

    experiment: Experiment
    context: RankContext
    source: DataSource
    #: One training sample, as a loader yields it.
    sample: Batch


def run_trials(paths: RunPaths, attempt: int, sizes: Iterable[int], channel: Connection) -> None:
    """Try the sizes in order, reporting each that fits. Raises the error of the first failure. Collective."""
    experiment = with_preprocessing(training_experiment(paths, attempt))
    facts = RankFacts.from_environment(os.environ)
    device = choose_device(experiment.device, facts.local_rank, gpus_expected=False)
    set_determinism(experiment.deterministic, device, has_one_shape=has_one_shape(experiment))
    precision = choose_precision(experiment.precision, device)
    degrees = find_degrees(experiment.parallel, facts.world_size, facts.world_size // facts.num_nodes)
    assert not isinstance(degrees, Problem), "the rank has found it to fit"
    meeting, token = paths.attempt(attempt).trial_rendezvous, os.environ["HPC_TRAIN_TOKEN"]
    group = join(facts, device, meeting, token)
    free, total = torch.cuda.mem_get_info(device)
    torch.cuda.set_per_process_memory_fraction(free * _PART / total, device)
    source = build_source(experiment.data)
    sample = one_sample(source, experiment, degrees, facts.rank, _Unnoted(paths, attempt, facts.rank))
    options = experiment.model.channels_last, experiment.parallel
    context = RankContext(facts.rank, degrees, device, precision, *options)
    place = _Place(experiment, context, source, sample)
    for size in sizes:
        _train_and_evaluate(place, size)
        _clear(experiment)
        channel.send(("fitted", "", int(ExitCode.DONE)))
    group.wait_to_leave()


class _Unnoted(BadSamples):
    """Replaces a bad sample without reporting it; training reports it."""

    def note(self, samples: Iterable[BadSample]) -> None:
        """Do nothing."""


def one_sample(
    source: DataSource, experiment: Experiment, degrees: Degrees, rank: int, bad_samples: BadSamples | None
) -> Batch:
    """Read one training sample, as a loader yields it. ``bad_samples``: for ``on_bad_sample: skip``."""
    optimization = experiment.optimization.model_copy(
        update={"global_batch_size": degrees.data_ranks, "micro_batch_size": 1}
    )
    data = experiment.data.model_copy(update={"workers": 0})
    single = experiment.model_copy(update={"optimization": optimization, "data": data})
    batches = training_batches(
        source,
        single,
        Position(0),
        1,
        degrees.data_rank(rank),
        degrees.data_ranks,
        torch.device("cpu"),
        bad_samples if data.on_bad_sample == "skip" else None,
        target_spec(make_task(experiment, source.info)),
    )
    with batches:
        _, (sample,) = next(batches)
    return sample


def _train_and_evaluate(place: _Place, size: int) -> None:
    """Train and evaluate enough to reach peak memory, with micro-batches of ``size``. Collective."""
    experiment = place.experiment.with_micro_batch_size(size)
    context, info = place.context, place.source.info
    data_ranks = context.degrees.data_ranks
    arithmetic = BatchArithmetic.of(experiment.optimization, len(place.source.train), data_ranks)
    # Built again for each size: a pipeline or a compiled model keeps the first shapes it saw.
    train_state = build(weight_source.with_source(experiment, None), info, arithmetic, context)
    _refuse_batchnorm(experiment, train_state)
    task = make_task(experiment, info)
    if train_state.optimization.scaler is not None:  # an overflow would skip the step
        train_state.optimization.scaler.load_state_dict(
            train_state.optimization.scaler.state_dict() | {"scale": 1.0}
        )
    forward = TrainingForward.of(experiment, info, train_state, task, context.precision, context.device)
    # Take every step whatever the loss, so that the optimizer allocates its state.
    config = experiment.optimization.model_copy(update={"on_non_finite": "stop", "on_spike": None})
    guard = Guard(config, train_state.model, norm_counts=False)
    # The slots of a step (two are enough if they run one by one), all with the same sample.
    strategy, slots = place.experiment.parallel.strategy, arithmetic.accumulation
    whole = replace(place.sample.repeated(size), weight=1 / arithmetic.micro_batches)
    count = min(slots, 2) if traits_of(strategy).runs_one_by_one else slots
    batches = [replace(whole, number=whole.number + slot * data_ranks) for slot in range(count)]
    train_state.wrapped.train()
    for step in range(_STEPS):
        train_step(train_state, step, batches, forward, guard, config.clip_grad_norm)
    train_state.wrapped.eval()
    with torch.no_grad(), nullcontext() if train_state.ema is None else train_state.ema.swapped():
        forward.sums(train_state.wrapped, batches[0], step=_STEPS)


def _refuse_batchnorm(experiment: Experiment, train_state: TrainState) -> None:
    """Refuse the user's own models with BatchNorm; known models were refused when the file was checked."""
    if has_batchnorm(train_state.model):
        raise auto_batchnorm(experiment.model.name).as_error()


def _clear(experiment: Experiment) -> None:
    """Free a size's memory; modules under FSDP are in reference cycles."""
    if experiment.compile.enabled:
        torch.compiler.reset()  # else the second shape is compiled as dynamic, unlike in a run
    gc.collect()
    torch.cuda.empty_cache()


def last_words(error: BaseException) -> tuple[str, str, int]:
    """Return the trial's outcome, its error text, and the exit code that a rank would have for it."""
    cause = compile_error(error) or _taken(error) or error
    code = int(cause.exit_code) if isinstance(cause, HpcTrainError) else int(ExitCode.FAILED)
    if out_of_memory(error) is not None:
        return OUT_OF_MEMORY, _first_line(error), code
    if peer_lost(error):
        return PEER, _first_line(error), code
    is_plain = isinstance(cause, UserError)
    return FAILED, str(cause) if is_plain else "".join(traceback.format_exception(error)), code


def _taken(error: BaseException) -> BadFileError | None:
    if not isinstance(error, RuntimeError) or _TAKEN not in str(error):
        return None
    return BadFileError(
        "optimization.micro_batch_size: auto tries sizes in a second process, which the GPU does not let in "
        f"({_first_line(error)}): it is in exclusive-process mode, or broken; write a number, like 64"
    )


def _first_line(error: BaseException) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)


def main(arguments: list[str]) -> None:
    """``FOLDER ATTEMPT DESCRIPTOR RANK_PID THREADS SIZE…``; messages go to the descriptor."""
    folder, (attempt, descriptor, rank, threads, *sizes) = arguments[0], map(int, arguments[1:])
    processes.die_with(rank)
    torch.set_num_threads(threads)
    channel = Connection(descriptor, readable=False)
    try:
        run_trials(RunPaths(Path(folder)), attempt, sizes, channel)
        message = (DONE, "", int(ExitCode.DONE))
    except BaseException as error:
        message = last_words(error)
    channel.send(message)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # gloo's threads sometimes abort in Python's tear-down


if __name__ == "__main__":
    main(sys.argv[1:])
