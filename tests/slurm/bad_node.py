"""A model that can't be built on node n1: its device is not fit."""

from __future__ import annotations

import os

from torch import nn

from hpc_train.errors import BadNodeError
from tests.end_to_end import paced


def net(num_classes: int) -> nn.Module:
    if os.environ.get("SLURMD_NODENAME") == "n1":
        raise BadNodeError("its memory is held by another")
    return paced.net(num_classes)
