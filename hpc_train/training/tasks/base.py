"""The protocol of a task, how a task is created from its name, and functions that several tasks share."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, Protocol, cast, runtime_checkable

import torch
from PIL import Image
from torch import Tensor, nn

from hpc_train import registry
from hpc_train.console import csv_line
from hpc_train.errors import BadFileError
from hpc_train.experiment.config.schema import Experiment
from hpc_train.experiment.data_facts.by_name import task_facts, task_misfit
from hpc_train.experiment.data_facts.facts import DataFacts, Modality
from hpc_train.training.datasets.types import Batch, DataInfo, TargetSpec, TargetSpecs

_METHODS = ("forward", "loss", "sums", "metrics")


class Task(Protocol):
    """A training objective in three steps: the model's outputs, their loss, and sums that evaluation merges.

    Constructed as ``Task(experiment, info)`` from the file and the data set's ``DataInfo``. It may have an
    attribute ``target_spec``, a ``TargetSpec`` or a dict of them: the loader then refuses other targets and
    names the sample. Without it the task receives the data set's targets unchanged.
    """

    def forward(self, model: nn.Module, batch: Batch) -> Any:
        """Return the model's outputs, a tensor or a structure of tensors.

        Calls ``model`` exactly once. ``batch`` is on the device and its images are normalised. A pipeline
        runs the stages itself and does not call this method: its outputs are ``model(batch.inputs)``.
        """
        return model(batch.inputs)

    def loss(self, outputs: Any, batch: Batch) -> Tensor:
        """Return the mean loss over the micro-batch, shape (), float32 or float64, with its graph.

        The mean over the samples or, if the task has a ``weight``, over that weight. Reads
        ``batch.targets``; on the last stage of a pipeline ``batch.inputs`` is None.
        """

    def sums(self, outputs: Any, batch: Batch) -> dict[str, Any]:
        """Return sums over the samples with ``batch.valid`` true: name → a tensor of any shape.

        Floating-point sums (float64) are added in an order that does not depend on the number of ranks;
        counts (int64, for example a confusion matrix) are exact in any order. ``count`` is always among them.
        Names, shapes and dtypes never depend on the data. Runs without gradients.

        Values that can't be summed (detections, scores to rank) are a list of B tensors instead of a sum: one
        record per sample, of any shape. Records of valid samples are kept, and gathered from all ranks.
        """

    def metrics(self, sums: dict[str, Any]) -> dict[str, float]:
        """Return the metrics of a ``val`` row (``loss``, …) from the sums over all validation data.

        A sum of shape () is a number here, any other a tensor on the CPU. Records are a list of N tensors on
        the CPU, in the order of the validation data.
        """

    # Optional: ``weight(batch) -> Tensor``, shape (): the number by which ``loss`` divides its sum over the
    # micro-batch, such as the labelled pixels or the predicted tokens. The step's loss is then the mean over
    # the weight of all its micro-batches, on all ranks. A function of ``batch.targets`` alone, at least 0;
    # ``batch.inputs`` is None. If it is 0, ``loss`` and its gradient must be finite. Without the method, or
    # if the attribute is None, micro-batches weigh the same.
    #
    # Optional: ``optional_metrics``, a sequence of the names of metrics that only some evaluations have. An
    # evaluation without the metric is no improvement for ``checkpoint.best`` and ``early_stopping``.
    #
    # Optional: ``predictions(outputs, batch) -> list[dict[str, Any]]``, the output of ``hpc-train predict``
    # for each sample of the batch: names → JSON values. The data may have no targets.


@runtime_checkable
class DrawsPictures(Protocol):
    """Optional: a task that draws its predictions on images, for ``evaluation.images``."""

    def picture(self, outputs: Any, batch: Batch, place: int, image: Image.Image) -> Image.Image | None:
        """Return the picture (RGB, any size) of sample ``place`` of the batch, or None.

        ``image`` is the sample's input as RGB in its original size, without normalization. Outputs and batch
        are those of ``sums``. Called on one rank, for a few samples; a function of its arguments alone.
        """


def make_task(experiment: Experiment, info: DataInfo) -> Task:
    """Return the experiment's task.

    Raises BadFileError if the name is not that of a class, a method is missing or ``target_spec`` is invalid.
    """
    _refuse_other_data(experiment, info)
    make = registry.load("tasks", experiment.task)
    if not callable(make):
        raise BadFileError(f"task: {experiment.task} is {type(make).__name__}; name a class")
    try:
        inspect.signature(make).bind(experiment, info)
    except TypeError as error:
        raise BadFileError(
            f"task: {experiment.task} does not take (experiment, info): {error}; "
            "write __init__(self, experiment, info)"
        ) from error
    except ValueError:  # the signature is unknown: the call itself reports errors
        pass
    task = make(experiment, info)
    name = type(task).__name__
    missing = [method for method in _METHODS if not hasattr(task, method)]
    if missing:
        raise BadFileError(f"task: {name} has no method {missing[0]}; write it, as tasks.base.Task describes")
    target_spec(task)
    return cast(Task, task)


def _refuse_other_data(experiment: Experiment, info: DataInfo) -> None:
    """Raise BadFileError if the task reads tokens and the data have none, or vice versa."""
    modality: Modality = "tokens"
    if info.sequence_length is None:  # images and features are alike in a DataInfo
        modality = "features" if "features" in task_facts(experiment.task).modalities else "images"
    if misfit := task_misfit(experiment.task, experiment.data.name, DataFacts(modality)):
        raise BadFileError(f"task: {'; '.join(misfit)}")


def optional_metrics(task: Task) -> Sequence[str]:
    """Return the names of the metrics that only some evaluations of the task have."""
    return getattr(task, "optional_metrics", ())


def mean_loss(task: Task, outputs: Any, batch: Batch) -> Tensor:
    """Return the task's loss, shape (). Raises BadFileError if it is anything else."""
    loss = task.loss(outputs, batch)
    if isinstance(loss, Tensor) and loss.dim() == 0:
        return loss
    kind = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
    raise BadFileError(f"task: loss returned {kind}; return the micro-batch's mean, a tensor of shape ()")


def weighs_batches(task: Task) -> bool:
    """Return True if the micro-batches of the task differ in weight.

    An attribute that is not a method has another meaning, such as a tensor of class weights.
    """
    return callable(getattr(task, "weight", None))


def total_weight(task: Task, batch: Batch) -> Tensor:
    """Return the weight of a micro-batch, shape (), float64. Raises BadFileError if it is anything else."""
    weight = cast(Any, task).weight(batch)
    if isinstance(weight, Tensor) and weight.dim() == 0:
        return weight.detach().to(batch.valid.device, torch.float64)
    kind = f"shape {tuple(weight.shape)}" if isinstance(weight, Tensor) else type(weight).__name__
    raise BadFileError(f"task: weight returned {kind}; return the micro-batch's sum, a tensor of shape ()")


def divided(total: Tensor, weight: Tensor) -> Tensor:
    """Return ``total`` / ``weight``; if the weight is 0, ``total``, which is then 0 as well."""
    return total / torch.where(weight == 0, 1, weight).to(total.dtype)


def at_least_float32(values: Tensor) -> Tensor:
    """Return float64 unchanged, and any other dtype as float32: losses and probabilities need this precision.

    Raises BadFileError if a model has returned anything but a tensor.
    """
    if not isinstance(values, Tensor):
        raise BadFileError(f"model.name: the model returned a {type(values).__name__}; return a tensor alone")
    return values if values.dtype == torch.float64 else values.float()


def checked_logits(outputs: object, axes: str, num_classes: int) -> Tensor:
    """Return the model's logits, at least float32. ``axes``: their axes, as ``B, C, H, W``.

    Raises BadFileError if they are not a tensor with these axes, or have fewer than ``num_classes`` classes.
    """
    logits, names = at_least_float32(cast(Tensor, outputs)), axes.split(", ")
    if logits.dim() != len(names) or logits.shape[names.index("C")] < num_classes:
        raise BadFileError(
            f"model.name: the model's outputs have shape {tuple(logits.shape)}, and the data {num_classes} "
            f"classes; write model.args: {{num_classes: {num_classes}}}, or a model that returns ({axes})"
        )
    return logits


def class_table(columns: Sequence[str], names: Sequence[str], counts: Tensor) -> bytes:
    """Return a CSV table of counts (classes, columns), with a row for each class of ``names``."""
    rows = [["class", *columns], *([name, *row] for name, row in zip(names, counts.tolist(), strict=True))]
    return "".join(map(csv_line, rows)).encode()


def target_spec(task: Task) -> TargetSpecs:
    """Return the task's ``target_spec``, or None if it has none. Raises BadFileError if it is invalid."""
    spec = getattr(task, "target_spec", None)
    specs = list(spec.values()) if isinstance(spec, dict) else [spec]
    wrong = next((item for item in specs if item is not None and not isinstance(item, TargetSpec)), None)
    if wrong is not None or (isinstance(spec, dict) and None in specs):
        raise BadFileError(
            f"task: {type(task).__name__}.target_spec is {type(wrong).__name__}; make it a TargetSpec, a "
            "dict of TargetSpecs, or None"
        )
    return spec
