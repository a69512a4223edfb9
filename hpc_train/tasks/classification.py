"""``task: classification``: one class a sample, cross entropy."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from hpc_train.config.schema import Experiment
from hpc_train.datasets.types import Batch, DataInfo, TargetSpec

#: What ``accuracy_top5`` is; with fewer classes it would always be 1.
_TOP = 5


class Classification:
    """Logits (B, num_classes) against classes (B,) int64."""

    def __init__(self, experiment: Experiment, info: DataInfo) -> None:
        self._label_smoothing = experiment.optimization.label_smoothing
        num_classes = experiment.model.args.get("num_classes", info.num_classes)
        self._has_top5 = num_classes > _TOP
        self.target_spec = TargetSpec(
            "a class number", kind="integer", shape=(), minimum=0, maximum=num_classes - 1
        )

    def forward(self, model: nn.Module, batch: Batch) -> Tensor:
        return model(batch.inputs)

    def loss(self, outputs: Tensor, batch: Batch) -> Tensor:
        """Return the mean cross entropy with label smoothing (arXiv:1512.00567, section 7)."""
        logits = _at_least_float32(outputs)
        return functional.cross_entropy(logits, batch.targets, label_smoothing=self._label_smoothing)

    def sums(self, outputs: Tensor, batch: Batch) -> dict[str, Tensor]:
        """Return ``count``, and the sums ``loss`` (without smoothing), ``correct`` and ``correct5``."""
        logits = _at_least_float32(outputs)
        losses = functional.cross_entropy(logits, batch.targets, reduction="none")
        hits = logits.argmax(dim=1) == batch.targets
        # No product with ``valid``: what a filled-up sample gives may be nan.
        sums = {
            "count": batch.valid,
            "loss": torch.where(batch.valid, losses, torch.zeros_like(losses)),
            "correct": hits & batch.valid,
        }
        if self._has_top5:
            among = (logits.topk(_TOP, dim=1).indices == batch.targets[:, None]).any(dim=1)
            sums["correct5"] = among & batch.valid
        return {name: values.sum(dtype=torch.float64) for name, values in sums.items()}

    def metrics(self, sums: dict[str, float]) -> dict[str, float]:
        """Return means over the validation data."""
        count = sums["count"]
        found = {"loss": sums["loss"] / count, "accuracy": sums["correct"] / count}
        if "correct5" in sums:
            found["accuracy_top5"] = sums["correct5"] / count
        return found


def _at_least_float32(logits: Tensor) -> Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()
