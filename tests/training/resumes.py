"""A resume as the only rank of a run does it, without a run."""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import torch

from hpc_train.experiment.topology.degrees import Degrees
from hpc_train.training.datasets.types import DataInfo
from hpc_train.training.rank import Rank
from hpc_train.training.resuming import Resumed, resumed
from hpc_train.training.train_state import TrainState


def resume(
    checkpointer: Any,
    state: Any = None,
    *,
    strict: bool = False,
    batchnorm: bool = False,
    set_learning_rate: Callable[[int], None] = lambda step: None,
) -> Resumed:
    """Load the newest checkpoint into ``state``; ``batchnorm``: the model has some, synchronized."""
    rank = SimpleNamespace(
        experiment=SimpleNamespace(
            environment=SimpleNamespace(strict=strict),
            parallel=SimpleNamespace(strategy="ddp", sync_batchnorm=batchnorm),
        ),
        warn=logging.warning,
        facts=SimpleNamespace(world_size=1),
        degrees=Degrees(),
        device=torch.device("cpu"),
    )
    source = SimpleNamespace(train=range(3), info=DataInfo(2, 3, (), (), ("a", "b")))
    optimization = SimpleNamespace(set_learning_rate=set_learning_rate)
    train_state = SimpleNamespace(state=state, has_batchnorm=batchnorm, optimization=optimization)
    return resumed(cast(Rank, rank), checkpointer, cast(TrainState, train_state), cast(Any, source))
