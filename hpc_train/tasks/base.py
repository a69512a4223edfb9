"""The protocol of a task."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor, nn

from hpc_train.errors import BadFileError
from hpc_train.runtime.data_info import Batch, TargetSpec


class Task(Protocol):
    """What is learnt: the loss of a micro-batch, and sums that evaluation adds up over ranks.

    Constructed as ``Task(experiment, info)`` from the file and the data set's ``DataInfo``. It may have an
    attribute ``target_spec``, a ``TargetSpec``: the loader then refuses other targets and names the sample.
    Without one the task receives targets as the data set gives them.
    """

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the mean loss over the micro-batch, shape (), float32 or float64, with its graph.

        Runs the model's forward exactly once, with ``batch.inputs`` on the device and normalised.
        """

    def evaluation_sums(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """Return sums over the samples where ``batch.valid`` is true: name → shape (), float64.

        ``count`` is always among them. The names never depend on the data. Runs without gradients.
        """

    def metrics(self, sums: dict[str, float]) -> dict[str, float]:
        """Turn the sums over all validation data into what a ``val`` row says (``loss``, ``accuracy``, …)."""


def target_spec(task: Task) -> TargetSpec | None:
    """Return what the task needs as targets; None where it does not say."""
    spec = getattr(task, "target_spec", None)
    if spec is not None and not isinstance(spec, TargetSpec):
        raise BadFileError(
            f"task: {type(task).__name__}.target_spec is {type(spec).__name__}; make it a TargetSpec or None"
        )
    return spec
