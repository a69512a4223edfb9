"""A rank of a test's process group, as far as ``training.train_state.context`` asks for it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from hpc_train.config.schema import Experiment
from hpc_train.distributed.precision import Precision
from hpc_train.distributed.shared_sum import SharedSum, open_shared_sum
from hpc_train.topology.degrees import Degrees


def as_rank(experiment: Experiment, rank: int, degrees: Degrees, precision: Precision) -> Any:
    """Return it, on the CPU; all ranks of the default group are on one node."""
    ranks = degrees.world_size

    def open_sum() -> SharedSum | None:
        if ranks == 1:
            return None
        assert dist.group.WORLD is not None
        return open_shared_sum(rank, ranks, dist.group.WORLD, silence_s=60.0)

    return SimpleNamespace(
        experiment=experiment,
        facts=SimpleNamespace(rank=rank, world_size=ranks),
        degrees=degrees,
        device=torch.device("cpu"),
        precision=precision,
        group=SimpleNamespace(open_shared_sum=open_sum),
    )
