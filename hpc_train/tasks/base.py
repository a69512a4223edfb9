"""The protocol of a task, how one is made of its name, and what several tasks share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, cast, runtime_checkable

import torch
from PIL import Image
from torch import Tensor, nn

from hpc_train import registry
from hpc_train.config.schema import Experiment
from hpc_train.console import csv_line
from hpc_train.data_facts.by_name import task_facts, task_misfit
from hpc_train.data_facts.facts import DataFacts, Modality
from hpc_train.datasets.types import Batch, DataInfo, TargetSpec, TargetSpecs
from hpc_train.errors import BadFileError

_METHODS = ("forward", "loss", "sums", "metrics")


class Task(Protocol):
    """What is learnt, in three steps: the model's outputs, their loss, and sums that evaluation merges.

    Constructed as ``Task(experiment, info)`` from the file and the data set's ``DataInfo``. It may have an
    attribute ``target_spec``, a ``TargetSpec`` or a dict of them: the loader then refuses other targets and
    names the sample. Without one the task receives targets as the data set gives them.
    """

    def forward(self, model: nn.Module, batch: Batch) -> Any:
        """Return the model's outputs, a tensor or a structure of tensors.

        Calls ``model`` exactly once. ``batch`` is on the device and its images are normalised. A pipeline
        calls the stages itself and not this method: there outputs are ``model(batch.inputs)``.
        """
        return model(batch.inputs)

    def loss(self, outputs: Any, batch: Batch) -> Tensor:
        """Return the mean loss over the micro-batch, shape (), float32 or float64, with its graph.

        The mean over the samples or, if the task has a ``weight``, over that weight. Reads
        ``batch.targets``; on the last stage of a pipeline ``batch.inputs`` is None.
        """

    def sums(self, outputs: Any, batch: Batch) -> dict[str, Any]:
        """Return sums over the samples where ``batch.valid`` is true: name → a tensor of any shape.

        Floating-point sums (float64) are added in an order that does not depend on the number of ranks;
        counts (int64, for example a confusion matrix) are exact in any order. ``count`` is always among them.
        Names, shapes and dtypes never depend on the data. Runs without gradients.

        What can't be summed (detections, scores to rank) is a list of B tensors in place of a sum: a record
        of each sample, of any shape. Those of valid samples are kept, and gathered from all ranks.
        """

    def metrics(self, sums: dict[str, Any]) -> dict[str, float]:
        """Turn the sums over all validation data into what a ``val`` row says (``loss``, ``accuracy``, …).

        A sum of shape () is a number here, any other a tensor on the CPU. Records are a list of N tensors on
        the CPU, in the order of the validation data.
        """

    # Optional: ``weight(batch) -> Tensor``, shape (): the number by which ``loss`` divides its sum over the
    # micro-batch, such as the labelled pixels or the predicted tokens. The step's loss is then the mean over
    # the weight of all its micro-batches, on all ranks. A function of ``batch.targets`` alone, at least 0;
    # ``batch.inputs`` is None. If it is 0, ``loss`` and its gradient must be finite. Without the method, or
    # if the attribute is None, micro-batches weigh the same.
    #
    # Optional: ``optional_metrics``, a sequence of the names that only some evaluations have: without a value
    # ``checkpoint.best`` and ``early_stopping`` find no improvement.
    #
    # Optional: ``predictions(outputs, batch) -> list[dict[str, Any]]``, what ``hpc-train predict`` writes of
    # each sample of the batch: names → JSON values. Targets may be those of no data.


@runtime_checkable
class DrawsPictures(Protocol):
    """Optional: a task that draws its predictions on images, for ``evaluation.images``."""

    def picture(self, outputs: Any, batch: Batch, place: int, image: Image.Image) -> Image.Image | None:
        """Return the picture (RGB, any size) of sample ``place`` of the batch; None for none.

        ``image`` is the sample's input as RGB in its own size, without normalization. Outputs and batch are
        those of ``sums``. Called on one rank, for a few samples; a function of its arguments alone.
        """


def make_task(experiment: Experiment, info: DataInfo) -> Task:
    """Return the task that the file names.

    Raises BadFileError where the name is not that of a class, a method is missing or ``target_spec`` is none.
    """
    _refuse_other_data(experiment, info)
    make = registry.load("tasks", experiment.task)
    if not callable(make):
        raise BadFileError(f"task: {experiment.task} is {type(make).__name__}; name a class")
    task = make(experiment, info)
    name = type(task).__name__
    missing = [method for method in _METHODS if not hasattr(task, method)]
    if missing:
        raise BadFileError(f"task: {name} has no method {missing[0]}; write it, as tasks.base.Task describes")
    target_spec(task)
    return cast(Task, task)


def _refuse_other_data(experiment: Experiment, info: DataInfo) -> None:
    """Raise BadFileError where the task reads tokens and the data have none, or the other way round."""
    modality: Modality = "tokens"
    if info.sequence_length is None:  # images and features are alike in a DataInfo
        modality = "features" if "features" in task_facts(experiment.task).modalities else "images"
    if misfit := task_misfit(experiment.task, experiment.data.name, DataFacts(modality)):
        raise BadFileError(f"task: {'; '.join(misfit)}")


def optional_metrics(task: Task) -> Sequence[str]:
    """Return the names of the metrics that only some evaluations of the task have."""
    names: Sequence[str] = getattr(task, "optional_metrics", ())
    return names


def mean_loss(task: Task, outputs: Any, batch: Batch) -> Tensor:
    """Return the task's loss, shape (). Raises BadFileError if it is anything else."""
    loss = task.loss(outputs, batch)
    if isinstance(loss, Tensor) and loss.dim() == 0:
        return loss
    found = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
    raise BadFileError(f"task: loss returned {found}; return the micro-batch's mean, a tensor of shape ()")


def weighs_batches(task: Task) -> bool:
    """Return True if the micro-batches of the task differ in weight. An attribute that is not a method is
    the task's own, such as a tensor of class weights.
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
    """Return ``total`` / ``weight``, and ``total``, which is then 0, if the weight is 0."""
    return total / torch.where(weight == 0, 1, weight).to(total.dtype)


def at_least_float32(values: Tensor) -> Tensor:
    """Return float64 as it is, and anything else as float32: losses and probabilities need as much.

    Raises BadFileError where a model has returned something else than a tensor.
    """
    if not isinstance(values, Tensor):
        raise BadFileError(f"model.name: the model returned a {type(values).__name__}; return a tensor alone")
    return values if values.dtype == torch.float64 else values.float()


def checked_logits(outputs: object, axes: str, num_classes: int) -> Tensor:
    """Return the model's logits, float32 at least. ``axes``: theirs, as ``B, C, H, W``.

    Raises BadFileError where they are no tensor with these axes, or have fewer than ``num_classes`` classes.
    """
    logits, names = at_least_float32(cast(Tensor, outputs)), axes.split(", ")
    if logits.dim() != len(names) or logits.shape[names.index("C")] < num_classes:
        raise BadFileError(
            f"model.name: the model's outputs have shape {tuple(logits.shape)}, and the data {num_classes} "
            f"classes; write model.args: {{num_classes: {num_classes}}}, or a model that returns ({axes})"
        )
    return logits


def class_table(columns: Sequence[str], names: Sequence[str], counts: Tensor) -> bytes:
    """Return a CSV table of counts (classes, columns): a row for each of ``names``, the classes."""
    rows = [["class", *columns], *([name, *row] for name, row in zip(names, counts.tolist(), strict=True))]
    return "".join(map(csv_line, rows)).encode()


def target_spec(task: Task) -> TargetSpecs:
    """Return what the task needs as targets; None where it does not say."""
    spec = getattr(task, "target_spec", None)
    specs = list(spec.values()) if isinstance(spec, dict) else [spec]
    wrong = next((each for each in specs if each is not None and not isinstance(each, TargetSpec)), None)
    if wrong is not None or (isinstance(spec, dict) and None in specs):
        raise BadFileError(
            f"task: {type(task).__name__}.target_spec is {type(wrong).__name__}; make it a TargetSpec, a "
            "dict of TargetSpecs, or None"
        )
    return spec
