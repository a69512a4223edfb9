"""``example/stripes``: images of horizontal or vertical stripes, made on the fly."""

import torch

from hpc_train.config.schema import DataConfig
from hpc_train.datasets.base import DataSource, TensorSplit
from hpc_train.runtime.data_info import DataInfo

SIDE = 8


def build(rest: str, config: DataConfig, *, download: bool) -> DataSource:
    count = config.args.get("num_samples", 100)
    info = DataInfo(
        num_classes=2, channels=1, mean=(0.5,), std=(0.5,), class_names=("horizontal", "vertical")
    )
    return DataSource(train=_split(count, 0), val=_split(count // 4, 1), info=info)


def _split(count: int, seed: int) -> TensorSplit:
    generator = torch.Generator().manual_seed(seed)
    classes = torch.randint(2, (count,), generator=generator)
    stripes = torch.randint(2, (count, 1, SIDE), generator=generator)
    rows, columns = (
        stripes[..., None].expand(-1, 1, SIDE, SIDE),
        stripes[:, :, None].expand(-1, 1, SIDE, SIDE),
    )
    images = torch.where(classes[:, None, None, None] == 0, rows, columns)
    return TensorSplit((images * 255).to(torch.uint8), classes)
