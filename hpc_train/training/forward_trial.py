"""Runs the file's model and task on a few samples on the CPU, so that ``prepare`` finds errors that only a
forward pass shows: shapes, dtypes and mistakes in the user's own code.
"""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn

from hpc_train.config.schema import Experiment
from hpc_train.datasets.normalize import Normalize
from hpc_train.datasets.structures import map_tensors
from hpc_train.datasets.types import Batch, DataInfo
from hpc_train.errors import BadFileError, UserError
from hpc_train.run.tracebacks import shortened_traceback
from hpc_train.tasks.base import Task, mean_loss, optional_metrics, total_weight, weighs_batches
from hpc_train.training.evaluation import without_dimensions
from hpc_train.training.model_selection import check_metrics
from hpc_train.training.model_size import MEMORY_RAN_OUT, lacking_memory, weight_bytes
from hpc_train.training.rank_exit import out_of_memory

#: BatchNorm needs two samples.
_SAMPLES = 2


def try_forward(
    experiment: Experiment, info: DataInfo, model: nn.Module, task: Task, batches: Sequence[Batch]
) -> str | None:
    """Compute the loss of training samples, then the sums of an evaluation, without gradients and in float32.

    ``batches``: a training batch and, if there is any, a validation batch. If this machine has too little
    memory, returns the reason. Raises BadFileError, with the user's own frames if there are any.
    """
    # Assumed: without gradients, the activations of two samples need no more memory than the weights.
    if why := lacking_memory(weight_bytes(model)):
        return why
    normalize = Normalize(info, experiment.data, channels_last=experiment.model.channels_last)
    for batch, is_training in zip(batches, (True, False), strict=False):
        few = batch.first(_num_samples(experiment))
        try:
            normalized = replace(few, inputs=normalize(few.inputs))
            metrics = _forward(model, task, normalized, is_training=is_training)
        except UserError:
            raise
        except Exception as error:  # from the user's code
            if out_of_memory(error):
                return MEMORY_RAN_OUT
            raise _refusal(experiment, few, is_training=is_training) from error
        if metrics is not None:
            check_metrics(experiment, {*metrics, *optional_metrics(task)})
    return None


def _num_samples(experiment: Experiment) -> int:
    size = experiment.optimization.micro_batch_size
    # Synchronized BatchNorm counts the samples of all ranks.
    return _SAMPLES if size == "auto" or experiment.parallel.sync_batchnorm else min(_SAMPLES, size)


@torch.no_grad()
def _forward(model: nn.Module, task: Task, batch: Batch, *, is_training: bool) -> dict[str, float] | None:
    """Return the metrics of an evaluation of ``batch``; None in training."""
    outputs = task.forward(model.train(is_training), batch)
    if is_training:
        if weighs_batches(task):
            total_weight(task, replace(batch, inputs=None))
        mean_loss(task, outputs, batch)
        return None
    sums = task.sums(outputs, batch)
    return task.metrics({name: without_dimensions(each) for name, each in sums.items()})


def _refusal(experiment: Experiment, batch: Batch, *, is_training: bool) -> BadFileError:
    """Return the error for the exception that is being handled."""
    shapes = map_tensors(lambda tensor: tuple(tensor.shape), batch.inputs)
    what = "loss of training" if is_training else "sums of validation"
    return BadFileError(
        f"{shortened_traceback(traceback.format_exc())}\n"
        f"model.name: {experiment.model.name} and task {experiment.task} can't compute the {what} samples of "
        f"{experiment.data.name} (inputs of shape {shapes}); fix the one that raised this, or write "
        "--no-forward if it only works on a GPU"
    )
