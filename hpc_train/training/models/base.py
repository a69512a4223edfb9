"""The protocol of a model plug-in."""

from __future__ import annotations

from typing import Protocol

from torch import nn

from hpc_train.experiment.config.training_sections import ModelConfig
from hpc_train.training.datasets.types import DataInfo


class ModelBuilder(Protocol):
    """The plug-in itself: a function."""

    def __call__(self, rest: str, config: ModelConfig, info: DataInfo, *, download: bool) -> nn.Module:
        """Return the model on the CPU in float32; ``rest`` is the part of the name after ``provider/``.

        Weights are random, drawn from torch's default generator (seeded by the caller), or, with
        ``config.pretrained``, loaded and the head replaced for ``info.num_classes``. ``download`` is true
        only in ``hpc-train prepare``. Raises BadFileError, starting with a key path (``model.args: …; …``).
        """
