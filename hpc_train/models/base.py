"""The protocol of a model plug-in."""

from __future__ import annotations

from typing import Protocol

from torch import nn

from hpc_train.config.training_sections import ModelConfig
from hpc_train.runtime.data_info import DataInfo


class ModelBuilder(Protocol):
    """The plug-in itself: a function. ``rest`` is what the name says after ``provider/``.

    Returns the model on the CPU in float32, with random weights drawn from torch's default generator
    (seeded by the caller) or, with ``config.pretrained``, loaded and the head swapped for
    ``info.num_classes``. ``download`` is true in ``hpc-train prepare`` alone. Raises BadFileError,
    beginning with a key path (``model.args: …; …``).
    """

    def __call__(self, rest: str, config: ModelConfig, info: DataInfo, *, download: bool) -> nn.Module: ...
