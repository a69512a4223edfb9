"""``margin``: classification by the multi-class hinge loss."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from hpc_train.plugins import Batch, DataInfo, Experiment


class Margin:
    def __init__(self, experiment: Experiment, info: DataInfo) -> None:
        pass

    def forward(self, model: nn.Module, batch: Batch) -> Tensor:
        return model(batch.inputs)

    def loss(self, outputs: Tensor, batch: Batch) -> Tensor:
        return functional.multi_margin_loss(outputs.float(), batch.targets["class"])

    def sums(self, outputs: Tensor, batch: Batch) -> dict[str, Tensor]:
        scores = outputs.float()
        losses = functional.multi_margin_loss(scores, batch.targets["class"], reduction="none")
        hits = scores.argmax(1) == batch.targets["class"]
        sums = {
            "count": batch.valid,
            "loss": torch.where(batch.valid, losses, 0),
            "correct": hits & batch.valid,
        }
        return {name: values.sum(dtype=torch.float64) for name, values in sums.items()}

    def metrics(self, sums: dict[str, float]) -> dict[str, float]:
        return {"loss": sums["loss"] / sums["count"], "accuracy": sums["correct"] / sums["count"]}
