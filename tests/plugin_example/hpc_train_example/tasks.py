"""``margin``: classification by the multi-class hinge loss."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from hpc_train.config.schema import Experiment
from hpc_train.runtime.data_info import Batch, DataInfo


class Margin:
    def __init__(self, experiment: Experiment, info: DataInfo) -> None:
        pass

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return functional.multi_margin_loss(model(batch.inputs).float(), batch.targets)

    def evaluation_sums(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        scores = model(batch.inputs).float()
        losses = functional.multi_margin_loss(scores, batch.targets, reduction="none")
        hits = scores.argmax(1) == batch.targets
        sums = {
            "count": batch.valid,
            "loss": torch.where(batch.valid, losses, 0),
            "correct": hits & batch.valid,
        }
        return {name: values.sum(dtype=torch.float64) for name, values in sums.items()}

    def metrics(self, sums: dict[str, float]) -> dict[str, float]:
        return {"loss": sums["loss"] / sums["count"], "accuracy": sums["correct"] / sums["count"]}
