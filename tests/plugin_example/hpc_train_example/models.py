"""``example/mlp``."""

from torch import nn

from hpc_train.config.schema import ModelConfig
from hpc_train.errors import BadFileError
from hpc_train.runtime.data_info import DataInfo
from hpc_train_example.datasets import SIDE


def build(rest: str, config: ModelConfig, info: DataInfo, *, download: bool) -> nn.Module:
    if rest != "mlp":
        raise BadFileError(f"model.name: example has no {rest!r}; write example/mlp")
    hidden = config.args.get("hidden", 32)
    pixels = info.channels * SIDE * SIDE
    return nn.Sequential(
        nn.Flatten(), nn.Linear(pixels, hidden), nn.ReLU(), nn.Linear(hidden, info.num_classes)
    )
