"""One rank's trial of micro-batch sizes, in a separate process.

``training.batch_size_search`` starts it on every rank, reads its messages and ends it. It leaves no files
except compiled code in the run's cache.

Legend: m micro-batch, M micro-batches of a step, R data-parallel ranks, S = ⌈M/R⌉ slots of a rank.
"""

from __future__ import annotations

import gc
import os
import sys
import traceback
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from hpc_train.config.problems import Problem
from hpc_train.config.schema import Experiment
from hpc_train.data_facts.by_name import has_one_shape
from hpc_train.datasets.base import DataSource
from hpc_train.datasets.batches import training_batches
from hpc_train.datasets.building import build_source
from hpc_train.datasets.sampler import Position
from hpc_train.datasets.skipping import BadSamples
from hpc_train.datasets.types import Batch
from hpc_train.distributed import parent_process
from hpc_train.distributed.device import choose_device, set_determinism
from hpc_train.distributed.env import RankFacts
from hpc_train.distributed.lost_peers import peer_lost
from hpc_train.distributed.precision import Precision, choose_precision
from hpc_train.distributed.process_group import join
from hpc_train.errors import BadFileError, ExitCode, HpcTrainError, UserError
from hpc_train.models.preprocessing import with_preprocessing
from hpc_train.paths import RunPaths
from hpc_train.run.bad_samples import BadSample
from hpc_train.run.create import effective_experiment
from hpc_train.run.weight_source import with_source
from hpc_train.strategies.base import RankContext
from hpc_train.strategies.sync_batchnorm import has_batchnorm
from hpc_train.tasks.base import make_task, target_spec
from hpc_train.topology.batch_arithmetic import BatchArithmetic
from hpc_train.topology.degrees import Degrees, find_degrees
from hpc_train.topology.strategy_traits import traits_of
from hpc_train.training.batch_size_search import DONE, FAILED, OUT_OF_MEMORY, PEER
from hpc_train.training.compiling import compile_error
from hpc_train.training.forward import TrainingForward, make_to_input
from hpc_train.training.non_finite import Guard
from hpc_train.training.rank_exit import out_of_memory
from hpc_train.training.step import train_step
from hpc_train.training.train_state import TrainState, build
from hpc_train.validate.compatibility import auto_batchnorm

#: The optimizer's state exists from the second step on.
_STEPS = 2
#: Share of the GPU's free memory; the rest is for fragmentation and allocations outside trials. Assumed.
_PART = 0.9
#: CUDA's error in a second process on a GPU in exclusive-process mode (nvidia-smi --compute-mode).
_TAKEN = "busy or unavailable"


@dataclass(frozen=True)
class _Place:
    """Objects that are the same for all sizes."""

    experiment: Experiment
    facts: RankFacts
    degrees: Degrees
    device: torch.device
    precision: Precision
    source: DataSource
    #: One training sample, as a loader yields it.
    sample: Batch

    @property
    def context(self) -> RankContext:
        return RankContext(
            rank=self.facts.rank,
            degrees=self.degrees,
            device=self.device,
            precision=self.precision,
            channels_last=self.experiment.model.channels_last,
            parallel=self.experiment.parallel,
        )


def run(paths: RunPaths, attempt: int, sizes: Iterable[int], channel: Connection) -> None:
    """Try the sizes in order, reporting each that fits. Raises the error of the first failure. Collective."""
    experiment = with_preprocessing(effective_experiment(paths, attempt))
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
    place = _Place(experiment, facts, degrees, device, precision, source, sample)
    for size in sizes:
        _try(place, size)
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


def _try(place: _Place, size: int) -> None:
    """Train and evaluate enough to reach peak memory, with micro-batches of ``size``. Collective."""
    experiment = place.experiment.with_micro_batch_size(size)
    arithmetic = BatchArithmetic.of(
        experiment.optimization, len(place.source.train), place.degrees.data_ranks
    )
    # Built again for each size: a pipeline or a compiled model keeps the first shapes it saw.
    train_state = build(with_source(experiment, None), place.source.info, arithmetic, place.context)
    _refuse_batchnorm(experiment, train_state)
    task = make_task(experiment, place.source.info)
    if train_state.optimization.scaler is not None:  # an overflow would skip the step
        train_state.optimization.scaler.load_state_dict(
            train_state.optimization.scaler.state_dict() | {"scale": 1.0}
        )
    to_input = make_to_input(experiment, place.source.info, place.device, place.precision)
    forward = TrainingForward.of(experiment, train_state, task, place.precision, place.device, to_input)
    # Take every step whatever the loss, so that the optimizer allocates its state.
    config = experiment.optimization.model_copy(update={"on_non_finite": "stop"})
    guard = Guard(config, train_state.model, norm_counts=False)
    batches = _batches(place, size, arithmetic)
    train_state.wrapped.train()
    for step in range(_STEPS):
        train_step(train_state, step, batches, forward, guard, config.clip_grad_norm)
    _evaluate(train_state, forward, batches[0])


def _batches(place: _Place, size: int, arithmetic: BatchArithmetic) -> list[Batch]:
    """Return the slots of a step (two are enough if they run one by one), all with the same sample."""
    strategy, slots = place.experiment.parallel.strategy, arithmetic.accumulation
    whole = replace(place.sample.repeated(size), weight=1 / arithmetic.micro_batches)
    count = min(slots, 2) if traits_of(strategy).runs_one_by_one else slots
    return [replace(whole, number=whole.number + slot * place.degrees.data_ranks) for slot in range(count)]


def _evaluate(train_state: TrainState, forward: TrainingForward, batch: Batch) -> None:
    train_state.wrapped.eval()
    with torch.no_grad(), nullcontext() if train_state.ema is None else train_state.ema.swapped():
        forward.sums(train_state.wrapped, batch, step=_STEPS)


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


def main(words: list[str]) -> None:
    """``FOLDER ATTEMPT DESCRIPTOR RANK_PID THREADS SIZE…``; messages go to the descriptor."""
    folder, (attempt, descriptor, rank, threads, *sizes) = words[0], map(int, words[1:])
    parent_process.die_with(rank)
    torch.set_num_threads(threads)
    channel = Connection(descriptor, readable=False)
    try:
        run(RunPaths(Path(folder)), attempt, sizes, channel)
        said = (DONE, "", int(ExitCode.DONE))
    except BaseException as error:
        said = last_words(error)
    channel.send(said)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # gloo's threads sometimes abort in Python's tear-down


if __name__ == "__main__":
    main(sys.argv[1:])
