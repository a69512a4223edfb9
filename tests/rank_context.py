"""Ranks and their strategies on the CPU, for tests that train without a run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from hpc_train.experiment.config.schema import Experiment
from hpc_train.experiment.topology.degrees import Degrees
from hpc_train.registry import load
from hpc_train.training.distributed.device import Precision, choose_precision
from hpc_train.training.distributed.shared_flags import SharedSum, open_shared_sum
from hpc_train.training.strategies.base import RankContext

_CPU = torch.device("cpu")
_ALONE = Degrees()


def as_rank(experiment: Experiment, rank: int, degrees: Degrees, precision: Precision) -> Any:
    """Return what ``training.train_state.context`` reads of a rank; all ranks of the default group are on one
    node.
    """
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
        device=_CPU,
        precision=precision,
        group=SimpleNamespace(open_shared_sum=open_sum),
    )


def make_strategy(
    name: str, rank: int = 0, degrees: Degrees = _ALONE, precision: str = "fp64", **keys: Any
) -> Any:
    """Return a rank's strategy; ``keys``: further fields of its context."""
    context = RankContext(rank, degrees, _CPU, choose_precision(precision, _CPU), **keys)
    return load("strategies", name)(context)  # type: ignore[operator]
