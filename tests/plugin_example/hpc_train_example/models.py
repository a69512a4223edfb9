"""``example/mlp``."""

import torch
from torch import Tensor, nn

from hpc_train.plugins import BadFileError, DataInfo, ModelConfig
from hpc_train_example.datasets import SIDE


def build(rest: str, config: ModelConfig, info: DataInfo, *, download: bool) -> nn.Module:
    if rest != "mlp":
        raise BadFileError(f"model.name: example has no {rest!r}; write example/mlp")
    return Mlp(info.channels * SIDE * SIDE, config.args.get("hidden", 32), info.num_classes)


class Mlp(nn.Module):
    def __init__(self, pixels: int, hidden: int, num_classes: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(pixels + 1, hidden), nn.ReLU(), nn.Linear(hidden, num_classes))

    def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        pixels = inputs["image"].flatten(1)
        return self.layers(torch.cat([pixels, inputs["brightness"][:, None].to(pixels.dtype)], 1))
