"""``example/stripes``: images of horizontal or vertical stripes and their brightness, made on the fly."""

import torch
from torch import Tensor

from hpc_train.plugins import DataConfig, DataInfo, DataSource

SIDE = 8


def build(rest: str, config: DataConfig, *, download: bool) -> DataSource:
    count = config.args.get("num_samples", 100)
    info = DataInfo(
        num_classes=2, channels=1, mean=(0.5,), std=(0.5,), class_names=("horizontal", "vertical")
    )
    return DataSource(train=Stripes(count, 0), val=Stripes(count // 4, 1), info=info)


class Stripes:
    """Batches of two inputs, an image and a number, and one target, each by its name."""

    def __init__(self, count: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.classes = torch.randint(2, (count,), generator=generator)
        stripes = torch.randint(2, (count, 1, SIDE), generator=generator)
        rows = stripes[..., None].expand(-1, 1, SIDE, SIDE)
        columns = stripes[:, :, None].expand(-1, 1, SIDE, SIDE)
        images = torch.where(self.classes[:, None, None, None] == 0, rows, columns)
        self.images = (images * 255).to(torch.uint8)

    def __len__(self) -> int:
        return len(self.images)

    def batch(self, indices: Tensor) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        images = self.images[indices]
        brightness = images.float().mean((1, 2, 3)) / 255
        return {"image": images, "brightness": brightness}, {"class": self.classes[indices]}
