"""Degrees of parallelism: how many ranks share what, and where in that a rank stands.

Ranks are counted over the axes (pipeline, replicate, shard, tensor), the last varying fastest, so that those
who talk most are neighbours on a node. Asked by the planner and by every rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd, isqrt

from hpc_train.config.problems import Problem
from hpc_train.config.training_sections import ParallelConfig

#: In the order of the ranks' numbers.
AXES = ("pipeline", "replicate", "shard", "tensor")
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
    degrees = _wanted(parallel, ranks, ranks_per_node)
    return degrees if degrees.world_size == ranks else _misfit(parallel, degrees, ranks, ranks_per_node)


def in_words(degrees: Degrees) -> str:
    """Return ``pipeline 2 × shard 4``: the degrees above 1; ``1`` where there is none."""
    above = [f"{key} {size}" for key in AXES if (size := getattr(degrees, key)) > 1]
    return " × ".join(above) or "1"


def _wanted(parallel: ParallelConfig, ranks: int, ranks_per_node: int) -> Degrees:
    """Return the file's degrees, those left out filled in; their product may be another number."""
    if parallel.strategy in _ALL_IN_ONE:
        return Degrees(shard=parallel.shard or ranks)
    if parallel.strategy == "hsdp":
        return _hybrid(parallel, ranks, ranks_per_node)
    if parallel.strategy in SHARING_LAYERS:
        return _shared_layers(parallel, ranks, ranks_per_node)
    return Degrees(replicate=ranks)


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
        tensor = parallel.tensor or _within_a_node(ranks, ranks_per_node, shard * (parallel.replicate or 1))
    elif parallel.pipeline is None:
        stages = _part_of(ranks, shard * tensor * (parallel.replicate or 1))
    return Degrees(
        pipeline=stages,
        replicate=parallel.replicate or _part_of(ranks, stages * shard * tensor),
        shard=shard,
        tensor=tensor,
    )


def _within_a_node(ranks: int, ranks_per_node: int, others: int) -> int:
    """Return how many of a node's ranks share each layer: as many as ``others`` leave, in equal groups."""
    most = ranks_per_node // others
    return max((size for size in divisors(gcd(ranks_per_node, ranks // others)) if size <= most), default=1)


def _part_of(ranks: int, others: int) -> int:
    """Return how many times ``others`` goes into ``ranks``, once at least; a misfit is told later."""
    return max(1, ranks // others)


def divisors(number: int) -> list[int]:
    """Return all of them, the smallest, 1, first."""
    small = [size for size in range(1, isqrt(number) + 1) if number % size == 0]
    return sorted({*small, *(number // size for size in small)})


def _misfit(parallel: ParallelConfig, degrees: Degrees, ranks: int, ranks_per_node: int) -> Problem:
    written = [key for key in DEGREES if getattr(parallel, key) is not None]
    key = written[0] if written else "strategy"
    message = f"{in_words(degrees)} takes {degrees.world_size} ranks, and there are {ranks}"
    remedy = f"take it out, or start {degrees.world_size} ranks"
    if parallel.strategy == "hsdp" and not written:
        fitting = divisors(ranks)[1:2]
        remedy = f"write a shard that divides {ranks}" + (f", like {fitting[0]}" if fitting else "")
    elif parallel.strategy in ("hsdp", *SHARING_LAYERS):
        key, remedy = _mended(parallel, degrees, ranks, ranks_per_node)
    elif parallel.strategy == "fsdp" and ranks % degrees.shard == 0:
        remedy = "write strategy: hsdp, which replicates what it shards, or take it out"
    return Problem(("parallel", key), message, remedy)


def _mended(parallel: ParallelConfig, degrees: Degrees, ranks: int, ranks_per_node: int) -> tuple[str, str]:
    """Return the key to change, copies first, and what to write: the nearest that fits, where one does."""
    keys = [key for key in ("replicate", "shard", "pipeline", "tensor") if getattr(parallel, key) is not None]
    for key in keys:
        written = getattr(parallel, key)
        for size in sorted(divisors(ranks), key=lambda size: (abs(size - written), size)):
            changed = parallel.model_copy(update={key: size})
            if _wanted(changed, ranks, ranks_per_node).world_size == ranks:
                return key, f"write {size}, or start {degrees.world_size} ranks"
    return keys[0], f"start {degrees.world_size} ranks, or write degrees whose product is {ranks}"
