"""A training step and an evaluation of a few samples on the CPU, by the code of ranks, for ``prepare``.

Also the memory that is free on this machine: a login node may have too little for the step.
"""

from __future__ import annotations

import re
import resource
import traceback
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from hpc_train.console import say
from hpc_train.errors import BadFileError, UserError
from hpc_train.experiment.config.schema import Experiment
from hpc_train.experiment.config.training_sections import CompileConfig, ParallelConfig
from hpc_train.experiment.topology.degrees import Degrees
from hpc_train.experiment.topology.strategy_traits import traits_of
from hpc_train.run.resource_limits import cgroup_folders, of_process
from hpc_train.run.tracebacks import shortened_traceback
from hpc_train.training import evaluation, model_selection, rank_exit, step
from hpc_train.training.datasets.types import Batch, DataInfo, map_tensors
from hpc_train.training.distributed.device import choose_precision
from hpc_train.training.forward import TrainingForward
from hpc_train.training.non_finite import NoGuard
from hpc_train.training.strategies.base import RankContext
from hpc_train.training.strategies.ddp import FIND_UNUSED, unused_parameters
from hpc_train.training.tasks.base import Task, optional_metrics
from hpc_train.training.train_state import TrainState

#: BatchNorm needs two samples.
_SAMPLES = 2
#: Memory that a training step needs besides the weights, in their size. Assumed: gradients, two values per
#: weight of the optimizer, and activations of two samples.
_STEP_FACTOR = 4
#: So low that an evaluation after the step uses the same weights.
_TINY_LR = 1e-12
#: Why a model can't be built or run if its size was not known before.
MEMORY_RAN_OUT = "the memory that is free here does not suffice"
#: Parts of a step that can fail.
_LOSS, _GRADIENTS, _SUMS = "loss of training", "gradients of the loss of training", "sums of validation"
_UPDATE = "update"
_CPU = torch.device("cpu")
#: The rank that takes the step.
ONE_RANK = RankContext(0, Degrees(), _CPU, choose_precision("fp32", _CPU))


def on_one_rank(experiment: Experiment) -> Experiment:
    """Return the experiment as it is tried: in float32 without its strategy, compilation and EMA."""
    optimizer = experiment.optimization.optimizer
    optimizer = optimizer.model_copy(update={"lr": _TINY_LR, "lr_per_batch": None})
    optimization = experiment.optimization.model_copy(update={"optimizer": optimizer, "ema": None})
    other = {"parallel": ParallelConfig(), "compile": CompileConfig(enabled=False), "precision": "fp32"}
    return experiment.model_copy(update=other | {"optimization": optimization})


def num_samples(experiment: Experiment) -> int:
    """Return the number of samples of the step."""
    size = experiment.optimization.micro_batch_size
    # Synchronized BatchNorm counts the samples of all ranks.
    return _SAMPLES if size == "auto" or experiment.parallel.sync_batchnorm else min(_SAMPLES, size)


@dataclass(frozen=True)
class Trial:
    """A model and its optimizer, made by ``train_state.assemble`` from ``on_one_rank`` of ``experiment``."""

    experiment: Experiment
    info: DataInfo
    state: TrainState
    task: Task

    def run(self, batches: Sequence[Batch]) -> str | None:
        """Train one step, then compute the metrics of an evaluation.

        ``batches``: a training batch and, if there is any, a validation batch. If this machine has too little
        memory, returns the reason; if only the step lacks it, computes its loss alone. Raises BadFileError,
        with the user's own frames if there are any.
        """
        # Assumed: without gradients, the activations of two samples need no more memory than the weights.
        nbytes = weight_bytes(self.state.model)
        if why := lacking_memory(nbytes):
            return why
        may_step = not lacking_memory(_STEP_FACTOR * nbytes)
        for batch, is_training in zip(batches, (True, False), strict=False):
            few, metrics = replace(batch.first(num_samples(self.experiment)), weight=1.0), None
            reached = [_LOSS if is_training else _SUMS]
            try:
                if is_training and may_step:
                    self._train(few, reached)
                elif is_training:
                    self._compute_loss(few)
                else:
                    metrics = self._metrics(few)
            except UserError:
                raise
            except Exception as error:  # from the user's code
                if rank_exit.out_of_memory(error):
                    return MEMORY_RAN_OUT
                raise self._refusal(few, reached[-1]) from error
            if metrics is not None:
                model_selection.check_metrics(self.experiment, {*metrics, *optional_metrics(self.task)})
        return None

    def _train(self, few: Batch, reached: list[str]) -> None:
        """Train a step; append to ``reached`` what is computed next."""
        optimization = on_one_rank(self.experiment).optimization
        guard = NoGuard(optimization, self.state.model, norm_counts=False)
        self.state.wrapped.train()
        max_norm = optimization.clip_grad_norm

        def before_update() -> None:
            reached.append(_UPDATE)
            self._report_unused()

        forward = replace(self._forward, on_end=lambda: reached.append(_GRADIENTS))
        with limited_to_free_memory():
            step.train_step(self.state, 0, [few], forward, guard, max_norm, before_update)

    @torch.no_grad()
    def _compute_loss(self, few: Batch) -> None:
        (weighted,) = self._forward.with_loss_factors([few], owns_loss=True)
        self._forward.loss(self.state.wrapped.train(), weighted)

    @torch.no_grad()
    def _metrics(self, few: Batch) -> dict[str, float]:
        sums = self._forward.sums(self.state.wrapped.eval(), few, 0)
        return self.task.metrics({name: evaluation.without_dimensions(value) for name, value in sums.items()})

    @property
    def _forward(self) -> TrainingForward:
        single, precision = on_one_rank(self.experiment), ONE_RANK.precision
        return TrainingForward.of(single, self.info, self.state, self.task, precision, ONE_RANK.device)

    def _report_unused(self) -> None:
        """Print the parameters without a gradient, for which ranks of DDP would wait."""
        parallel = self.experiment.parallel
        may_find = FIND_UNUSED in (traits_of(parallel.strategy).arguments or ())
        if (
            may_find
            and not parallel.args.get(FIND_UNUSED)
            and (unused := unused_parameters(self.state.model))
        ):
            say(f"model.name: two or more ranks will refuse it: {unused}")

    def _refusal(self, batch: Batch, part: str) -> BadFileError:
        shapes = map_tensors(lambda tensor: tuple(tensor.shape), batch.inputs)
        shown, model = shortened_traceback(traceback.format_exc()), self.experiment.model.name
        if part == _UPDATE:
            optimizer = self.experiment.optimization.optimizer.name
            return BadFileError(
                f"{shown}\noptimization.optimizer: {optimizer} can't update the weights of {model}; fix its "
                "args, write adamw, or --no-forward if it only works on a GPU"
            )
        return BadFileError(
            f"{shown}\nmodel.name: {model} and task {self.experiment.task} can't compute the {part} samples "
            f"of {self.experiment.data.name} (inputs of shape {shapes}); fix the one that raised this, or "
            "write --no-forward if it only works on a GPU"
        )


_GB = 1e9
#: A cgroup's limit, its usage, and the line of memory.stat with reclaimable memory; by version.
_CGROUP_FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def free_bytes() -> int:
    """Return the free memory of the machine, or of the tightest cgroup of this process."""
    machine = _number_in(Path("/proc/meminfo"), r"^MemAvailable:\s+(\d+) kB") or 0
    return max(0, min([machine * 1024, *_free_in_cgroups()]))


def _free_in_cgroups() -> Iterator[int]:
    for folder in cgroup_folders("memory"):
        for limit_name, use_name, reclaimed in _CGROUP_FILES:
            limit, use = (
                _number_in(folder / limit_name, r"^(\d+)$"),
                _number_in(folder / use_name, r"^(\d+)$"),
            )
            if limit is not None and use is not None:
                yield limit - use + (_number_in(folder / "memory.stat", rf"^{reclaimed} (\d+)$") or 0)


def _number_in(file: Path, pattern: str) -> int | None:
    try:
        match = re.search(pattern, file.read_text(encoding="utf-8"), re.MULTILINE)
    except OSError:
        return None
    return None if match is None else int(match[1])


@contextmanager
def limited_to_free_memory() -> Iterator[None]:
    """Limit this process's allocations within this context to the memory that is free now."""
    before, hard = of_process(resource.RLIMIT_DATA)
    in_use = (_number_in(Path("/proc/self/status"), r"^VmData:\s+(\d+) kB") or 0) * 1024
    limits = [limit for limit in (before, hard) if limit != resource.RLIM_INFINITY]
    _set_data_limit(min([in_use + free_bytes(), *limits]), hard)
    try:
        yield
    finally:
        _set_data_limit(before, hard)


def _set_data_limit(soft: int, hard: int) -> None:
    with suppress(OSError):  # a sandbox refuses it
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def lacking_memory(nbytes: int) -> str | None:
    """Return why weights of this size can't be used on this machine now; None if they can."""
    free = free_bytes()
    if nbytes <= free:
        return None
    return f"its weights have {nbytes / _GB:.1f} GB, and {free / _GB:.1f} GB of memory are free here"


def weight_bytes(model: nn.Module) -> int:
    """Return the size of parameters and buffers, on any device."""
    tensors: Iterable[Tensor] = (*model.parameters(), *model.buffers())
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
