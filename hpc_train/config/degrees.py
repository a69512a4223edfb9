"""Degrees of parallelism: how many ranks share what, and where in that a rank stands.

Ranks are counted over the axes (pipeline, replicate, shard, tensor), the last varying fastest, so that those
who talk most are neighbours on a node. Asked by the planner and by every rank.
"""

from __future__ import annotations

from dataclasses import dataclass

from hpc_train.config.problems import KeyPath, Problem
from hpc_train.config.training_sections import ParallelConfig

#: Degree → the strategies that it belongs to.
DEGREES = {
    "shard": ("fsdp", "hsdp", "zero1", "zero2", "tensor", "pipeline", "split"),
    "replicate": ("hsdp", "tensor", "pipeline", "split"),
    "tensor": ("tensor", "pipeline", "split"),
    "pipeline": ("pipeline", "split"),
}
#: Strategies that share one copy of what they shard among all their ranks.
_ALL_IN_ONE = ("fsdp", "zero1", "zero2")
#: Strategies by which a rank has parts of layers, or some of the layers.
SHARING_LAYERS = ("tensor", "pipeline", "split")


@dataclass(frozen=True)
class Degrees:
    """The sizes of the axes; their product is the world size."""

    pipeline: int = 1
    replicate: int = 1
    shard: int = 1
    tensor: int = 1

    @property
    def world_size(self) -> int:
        return self.pipeline * self.data_ranks * self.tensor

    @property
    def data_ranks(self) -> int:
        """R: how many ranks, or groups of ranks with one model together, share a step's micro-batches."""
        return self.replicate * self.shard

    def data_rank(self, rank: int) -> int:
        """Return which of the R a rank belongs to."""
        return rank // self.tensor % self.data_ranks

    def stage_rank(self, rank: int) -> int:
        """Return which of the ``pipeline`` ranks, in the order of the layers, a rank is."""
        return rank // (self.tensor * self.data_ranks)

    def tensor_rank(self, rank: int) -> int:
        """Return which of the ``tensor`` ranks that share each layer a rank is."""
        return rank % self.tensor


def find_degrees(parallel: ParallelConfig, ranks: int, ranks_per_node: int) -> Degrees | Problem:
    """Return what ``parallel:`` makes of so many ranks, or why it makes nothing of them.

    A plug-in's strategy has all of them as data-parallel ranks.
    """
    if parallel.strategy in _ALL_IN_ONE:
        degrees = Degrees(shard=parallel.shard or ranks)
    elif parallel.strategy == "hsdp":
        degrees = _hybrid(parallel, ranks, ranks_per_node)
    elif parallel.strategy in SHARING_LAYERS:
        degrees = _shared_layers(parallel, ranks, ranks_per_node)
    else:
        degrees = Degrees(replicate=ranks)
    return degrees if degrees.world_size == ranks else _misfit(parallel, degrees, ranks)


def _hybrid(parallel: ParallelConfig, ranks: int, ranks_per_node: int) -> Degrees:
    """Shard within a node and replicate over nodes, unless the file says otherwise."""
    shard = parallel.shard or (ranks // parallel.replicate if parallel.replicate else ranks_per_node)
    return Degrees(replicate=parallel.replicate or max(1, ranks // max(1, shard)), shard=max(1, shard))


def _shared_layers(parallel: ParallelConfig, ranks: int, ranks_per_node: int) -> Degrees:
    """Take degrees left out as 1, but for the strategy's own: layers are shared within a node, stages are
    what is left of all ranks, and so are copies where stages are given.
    """
    shard, tensor, stages = parallel.shard or 1, parallel.tensor or 1, parallel.pipeline or 1
    if parallel.strategy == "tensor":
        tensor = parallel.tensor or _part_of(ranks_per_node, shard * (parallel.replicate or 1))
    elif parallel.pipeline is None:
        stages = _part_of(ranks, shard * tensor * (parallel.replicate or 1))
    return Degrees(
        pipeline=stages,
        replicate=parallel.replicate or _part_of(ranks, stages * shard * tensor),
        shard=shard,
        tensor=tensor,
    )


def _part_of(ranks: int, others: int) -> int:
    """Return how many times ``others`` goes into ``ranks``, once at least; a misfit is told later."""
    return max(1, ranks // others)


def _misfit(parallel: ParallelConfig, degrees: Degrees, ranks: int) -> Problem:
    written = [key for key in DEGREES if getattr(parallel, key) is not None]
    path: KeyPath = ("parallel", written[0]) if written else ("parallel", "strategy")
    product = " × ".join(f"{key} {getattr(degrees, key)}" for key in DEGREES if getattr(degrees, key) > 1)
    message = f"{product or '1'} takes {degrees.world_size} ranks, and there are {ranks}"
    if parallel.strategy == "hsdp":
        fitting = [size for size in range(2, ranks + 1) if ranks % size == 0]
        remedy = f"write a shard that divides {ranks}" + (f", like {fitting[0]}" if fitting else "")
    else:
        remedy = f"take it out, or start {degrees.world_size} ranks"
        if parallel.strategy == "fsdp" and ranks % degrees.shard == 0:
            remedy = "write strategy: hsdp, which replicates what it shards, or take it out"
    return Problem(path, message, remedy)
