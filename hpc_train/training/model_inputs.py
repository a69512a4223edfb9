"""From a loader's batch to what the model takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from hpc_train.config.schema import Experiment
from hpc_train.datasets.normalize import Normalize
from hpc_train.datasets.types import Batch, DataInfo
from hpc_train.distributed.precision import Precision


def make_to_input(
    config: Experiment, info: DataInfo, device: torch.device, precision: Precision
) -> Callable[[Batch], Batch]:
    """Return what moves a batch to ``device`` and normalises it there."""
    normalize = Normalize(info, config.data, precision.param_dtype, channels_last=config.model.channels_last)

    def to_input(batch: Batch) -> Batch:
        moved = batch.to(device)
        return replace(moved, inputs=normalize(moved.inputs))

    return to_input
