"""A model that notes the devices that CUDA may show to its rank, named as ``tests.slurm.visible:net``."""

from __future__ import annotations

import os
from pathlib import Path

from torch import nn

from tests.end_to_end import paced


def net(num_classes: int, folder: str) -> nn.Module:
    note = Path(folder) / f"visible-{os.environ['SLURM_PROCID']}"
    note.write_text(os.environ["CUDA_VISIBLE_DEVICES"])
    return paced.net(num_classes)
