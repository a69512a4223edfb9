"""One rank's trial of sizes of micro-batches, in a process of its own: ``python -m hpc_train.worker.trial``.

``worker.micro_batch`` starts it on every rank, reads what it says, and ends it. It writes nothing that stays
but what is compiled, in the run's cache.

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
from typing import cast

import torch
from torch import Tensor

from hpc_train.config.degrees import Degrees, find_degrees
from hpc_train.config.problems import Problem
from hpc_train.config.schema import Experiment
from hpc_train.datasets.bad_samples import BadSamples
from hpc_train.datasets.base import DataSource
from hpc_train.datasets.building import build_source
from hpc_train.datasets.loading import training_batches
from hpc_train.datasets.sampler import Position
from hpc_train.engine.compiling import begin_forward, compile_error
from hpc_train.engine.forward import TrainingForward
from hpc_train.errors import BadFileError, ExitCode, HpcTrainError, UserError
from hpc_train.models.inspection import has_batchnorm
from hpc_train.models.preprocessing import with_preprocessing
from hpc_train.paths import RunPaths
from hpc_train.plan.batches import BatchArithmetic
from hpc_train.run_folder.bad_samples import BadSample
from hpc_train.run_folder.creation import effective_experiment
from hpc_train.runtime import parent_process
from hpc_train.runtime.data_info import Batch
from hpc_train.runtime.device import choose_device, set_determinism
from hpc_train.runtime.precision import Precision, choose_precision
from hpc_train.runtime.process_group import join, peer_lost
from hpc_train.runtime.ranks import RankFacts
from hpc_train.strategies.base import Placement
from hpc_train.tasks.base import Task, target_spec
from hpc_train.worker.ends import out_of_memory
from hpc_train.worker.free_memory import limit_memory
from hpc_train.worker.inputs import make_to_input
from hpc_train.worker.learner import Learner, build, part
from hpc_train.worker.micro_batch import DONE, FAILED, OUT_OF_MEMORY, PEER

#: The optimizer's state is there from the second step on.
_STEPS = 2
#: Strategies under which a rank's micro-batches follow each other: two need as much memory as all.
_ONE_BY_ONE = {"ddp", "zero1", "zero2", "fsdp", "hsdp", "tensor"}
#: What CUDA says in a second process of a GPU that takes one alone (nvidia-smi --compute-mode).
_TAKEN = "busy or unavailable"


@dataclass(frozen=True)
class _Place:
    """What stands fast for all sizes."""

    experiment: Experiment
    facts: RankFacts
    degrees: Degrees
    device: torch.device
    precision: Precision
    source: DataSource
    #: One sample of training, as a loader makes it.
    sample: Batch

    @property
    def placement(self) -> Placement:
        return Placement(
            rank=self.facts.rank,
            degrees=self.degrees,
            device=self.device,
            precision=self.precision,
            channels_last=self.experiment.model.channels_last,
            parallel=self.experiment.parallel,
        )


def run(paths: RunPaths, attempt: int, sizes: Iterable[int], channel: Connection) -> None:
    """Try the sizes in their order, saying which fit, until one does not. Collective; raises what it met."""
    experiment = with_preprocessing(effective_experiment(paths, attempt))
    facts = RankFacts.from_environment(os.environ)
    device = choose_device(experiment.device, facts.local_rank, gpus_expected=False)
    set_determinism(experiment.deterministic, device)
    precision = choose_precision(experiment.precision, device)
    degrees = find_degrees(experiment.parallel, facts.world_size, facts.world_size // facts.num_nodes)
    assert not isinstance(degrees, Problem), "the rank has found it to fit"
    meeting, token = paths.attempt(attempt).trial_rendezvous, os.environ["HPC_TRAIN_TOKEN"]
    group = join(facts, device, meeting, token)
    limit_memory(device, facts.local_world_size)
    source = build_source(experiment.data)
    sample = _sample(source, experiment, degrees, facts.rank, _Unnoted(paths, attempt, facts.rank))
    place = _Place(experiment, facts, degrees, device, precision, source, sample)
    for size in sizes:
        _try(place, size)
        _clear(experiment)
        channel.send(("fitted", "", int(ExitCode.DONE)))
    group.wait_to_leave()


class _Unnoted(BadSamples):
    """Lets another sample stand in for a bad one and tells nobody: training will."""

    def note(self, samples: Iterable[BadSample]) -> None:
        """Nothing."""


def _sample(
    source: DataSource, experiment: Experiment, degrees: Degrees, rank: int, bad_samples: BadSamples
) -> Batch:
    """Read one sample."""
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
        target_spec(cast(Task, part("tasks", experiment.task)(experiment, source.info))),
    )
    with batches:
        _, (sample,) = next(batches)
    return sample


def _try(place: _Place, size: int) -> None:
    """Train and evaluate as much as needs the most memory, with micro-batches of ``size``. Collective."""
    experiment = place.experiment.with_micro_batch_size(size)
    arithmetic = BatchArithmetic.of(
        experiment.optimization, len(place.source.train), place.degrees.data_ranks
    )
    # Anew for each size: a pipeline or a compiled model keeps the shapes that it saw first.
    learner = build(experiment, place.source.info, arithmetic, place.placement)
    _refuse_batchnorm(experiment, learner)
    task = cast(Task, part("tasks", experiment.task)(experiment, place.source.info))
    if learner.optimization.scaler is not None:  # one that overflows takes no step
        learner.optimization.scaler.load_state_dict(learner.optimization.scaler.state_dict() | {"scale": 1.0})
    forward = _forward(place, experiment, learner, task)
    batches = _batches(place, size, arithmetic)
    learner.wrapped.train()
    for step in range(_STEPS):
        _step(experiment, learner, forward, batches, step)
    if place.device.type == "cpu":
        _reserve_for_saves(learner)
    _evaluate(place, learner, task, forward, batches[0])


def _forward(place: _Place, experiment: Experiment, learner: Learner, task: Task) -> TrainingForward:
    return TrainingForward(
        seed=experiment.seed,
        task=task,
        device=place.device,
        compile=experiment.compile,
        context=lambda: nullcontext() if learner.strategy.casts else place.precision.autocast(place.device),
        to_input=make_to_input(experiment, place.source.info, place.device, place.precision),
        scale=learner.optimization.scale,
    )


def _batches(place: _Place, size: int, arithmetic: BatchArithmetic) -> list[Batch]:
    """Return slots of a step, the same sample in all of them."""
    strategy, slots = place.experiment.parallel.strategy, arithmetic.accumulation
    sample = place.sample
    whole = replace(
        sample,
        weight=1 / arithmetic.micro_batches,
        inputs=sample.inputs.repeat_interleave(size, 0),
        targets=sample.targets.repeat_interleave(size, 0),
        valid=sample.valid.repeat_interleave(size, 0),
    )
    count = min(slots, 2) if strategy in _ONE_BY_ONE else slots
    return [replace(whole, number=sample.number + slot * place.degrees.data_ranks) for slot in range(count)]


def _step(
    experiment: Experiment, learner: Learner, forward: TrainingForward, batches: list[Batch], step: int
) -> None:
    """Take an optimizer step as the trainer does."""
    most_norm = experiment.optimization.clip_grad_norm
    learner.optimization.set_learning_rate(step)
    learner.strategy.share_buffers(all_persistent=False)
    learner.strategy.accumulate(batches, forward)
    learner.optimization.step(
        lambda: None if most_norm is None else learner.strategy.clip_gradients(most_norm)
    )
    learner.strategy.weights_changed()
    if learner.ema is not None:
        learner.ema.update()


def _evaluate(place: _Place, learner: Learner, task: Task, forward: TrainingForward, batch: Batch) -> None:
    learner.wrapped.eval()
    begin_forward(place.experiment.compile, place.device)
    with torch.no_grad(), forward.context(), nullcontext() if learner.ema is None else learner.ema.swapped():
        task.evaluation_sums(learner.wrapped, forward.to_input(batch))


def _reserve_for_saves(learner: Learner) -> None:
    """Take for a moment what a copy of the rank's checkpoint takes."""
    states = learner.optimization.optimizer.state.values()
    held: list[Tensor] = [value for state in states for value in state.values() if torch.is_tensor(value)]
    held += [*learner.model.parameters(), *learner.model.buffers()]
    held += [] if learner.ema is None else learner.ema.averages.values()
    torch.empty(sum(_local(tensor).nbytes for tensor in held), dtype=torch.uint8)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, torch.distributed.tensor.DTensor) else tensor


def _refuse_batchnorm(experiment: Experiment, learner: Learner) -> None:
    """Refuse models of the user's own that no list knows of; the others were refused with the file."""
    if has_batchnorm(learner.model):
        raise BadFileError(
            f"optimization.micro_batch_size: auto would let memory decide BatchNorm's statistics, and "
            f"{experiment.model.name} has BatchNorm; write a number, like 64"
        )


def _clear(experiment: Experiment) -> None:
    """Let go of what a size took: modules under FSDP refer to themselves."""
    if experiment.compile.enabled:
        torch.compiler.reset()  # else a second shape is compiled as any shape, which no run does
    gc.collect()
    torch.cuda.empty_cache()


def last_words(error: BaseException) -> tuple[str, str, int]:
    """Return how the trial ended, in what words, and with which exit code a rank would end of it."""
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
    """``FOLDER ATTEMPT DESCRIPTOR RANK_PID THREADS SIZE…``; what is said goes to the descriptor."""
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
