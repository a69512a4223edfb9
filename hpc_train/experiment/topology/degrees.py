"""Degrees of parallelism, and the position of a rank along each axis.

Ranks are numbered over the axes (pipeline, replicate, shard, tensor), the last varying fastest, so that the
ranks that communicate most are neighbours on a node. Called by the planner and by every rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import gcd, isqrt, prod
from typing import TYPE_CHECKING, NamedTuple

from hpc_train.experiment.config.problems import Problem
from hpc_train.experiment.topology.strategy_traits import traits_of

if TYPE_CHECKING:
    from hpc_train.experiment.config.training_sections import ParallelConfig

#: In the order of rank numbering.
AXES = ("pipeline", "replicate", "shard", "tensor")


@dataclass(frozen=True)
class Degrees:
    """The sizes of the axes; their product is the world size."""

    pipeline: int = 1
    replicate: int = 1
    shard: int = 1
    tensor: int = 1

    @property
    def world_size(self) -> int:
        """The number of ranks of the run."""
        return self.pipeline * self.data_ranks * self.tensor

    @property
    def data_ranks(self) -> int:
        """R: the number of ranks, or groups with one copy of the model, that share a step's micro-batches."""
        return self.replicate * self.shard

    def data_rank(self, rank: int) -> int:
        """Return the index of a rank's group among the R groups."""
        return rank // self.tensor % self.data_ranks

    def stage_rank(self, rank: int) -> int:
        """Return a rank's index along the ``pipeline`` axis, in the order of the layers."""
        return rank // (self.tensor * self.data_ranks)

    def tensor_rank(self, rank: int) -> int:
        """Return a rank's index along the ``tensor`` axis, whose ranks share each layer."""
        return rank % self.tensor


class Ranks(NamedTuple):
    """A run's ranks: maximum, maximum on one node, and minimum; None: unknown before the start."""

    most: int | None = None
    per_node: int | None = None
    fewest: int | None = None
    #: Upper bound for one attempt: all its GPUs for the whole time limit.
    gpu_hours: float | None = None
    #: Maximum numbers of GPUs and CPU cores that the run occupies; it may occupy more cores.
    gpus: int | None = None
    cores: int | None = None
    #: Training time of one attempt: its time limit without the time to save and stop; None: no limit.
    attempt_s: float | None = None


def find_degrees(parallel: ParallelConfig, ranks: int, ranks_per_node: int) -> Degrees | Problem:
    """Return the degrees of ``parallel:`` for this number of ranks, or the problem if they don't fit.

    For a strategy without traits all ranks are data-parallel.
    """
    degrees = _wanted(parallel, ranks, ranks_per_node)
    return degrees if degrees.world_size == ranks else _misfit(parallel, degrees, ranks, ranks_per_node)


def in_words(degrees: Degrees) -> str:
    """Return the degrees above 1, like ``pipeline 2 × shard 4``; ``1`` if there are none."""
    above = [f"{key} {size}" for key in AXES if (size := getattr(degrees, key)) > 1]
    return " × ".join(above) or "1"


def _wanted(parallel: ParallelConfig, ranks: int, ranks_per_node: int) -> Degrees:
    """Return the file's degrees and the defaults of the others; their product may differ from ``ranks``."""
    traits = traits_of(parallel.strategy)
    sizes = {axis: (getattr(parallel, axis) if axis in traits.degrees else None) for axis in AXES}
    rest = next((axis for axis in traits.rest if sizes[axis] is None), None)
    if (axis := traits.spans_node) and axis != rest:
        sizes[axis] = sizes[axis] or ranks_per_node
    if (axis := traits.divides_node) and axis != rest:
        sizes[axis] = sizes[axis] or _within_a_node(ranks, ranks_per_node, _product(sizes))
    if rest is not None:
        sizes[rest] = max(1, ranks // _product(sizes))  # the caller reports a mismatch
    return Degrees(**{axis: size or 1 for axis, size in sizes.items()})


def _product(sizes: Mapping[str, int | None]) -> int:
    return prod(size or 1 for size in sizes.values())


def _within_a_node(ranks: int, ranks_per_node: int, others: int) -> int:
    """Return the number of a node's ranks that share each layer: the maximum with equal groups."""
    most = ranks_per_node // others
    return max((size for size in divisors(gcd(ranks_per_node, ranks // others)) if size <= most), default=1)


def divisors(number: int) -> list[int]:
    """Return all divisors in ascending order."""
    small = [size for size in range(1, isqrt(number) + 1) if number % size == 0]
    return sorted({*small, *(number // size for size in small)})


def _misfit(parallel: ParallelConfig, degrees: Degrees, ranks: int, ranks_per_node: int) -> Problem:
    traits = traits_of(parallel.strategy)
    written = [key for key in traits.degrees if getattr(parallel, key) is not None]
    key = written[0] if written else "strategy"
    message = f"{in_words(degrees)} needs {degrees.world_size} ranks, but there are {ranks}"
    remedy = f"take it out, or start {degrees.world_size} ranks"
    if traits.spans_node and not written:
        fitting = divisors(ranks)[1:2]
        remedy = f"write a {traits.spans_node} that divides {ranks}"
        remedy += f", like {fitting[0]}" if fitting else ""
    elif len(traits.degrees) > 1:
        key, remedy = _nearest_fit(parallel, degrees, ranks, ranks_per_node)
    elif traits.replicated_by and ranks % degrees.shard == 0:
        remedy = f"write strategy: {traits.replicated_by}, which replicates what it shards, or take it out"
    return Problem(("parallel", key), message, remedy, code="parallel.degree-ranks")


def _nearest_fit(
    parallel: ParallelConfig, degrees: Degrees, ranks: int, ranks_per_node: int
) -> tuple[str, str]:
    """Return the key to change (replicas first) and the remedy: the nearest number that fits, if any."""
    keys = [key for key in ("replicate", "shard", "pipeline", "tensor") if getattr(parallel, key) is not None]
    for key in keys:
        written = getattr(parallel, key)
        for size in sorted(divisors(ranks), key=lambda size: (abs(size - written), size)):
            changed = parallel.model_copy(update={key: size})
            if _wanted(changed, ranks, ranks_per_node).world_size == ranks:
                return key, f"write {size}, or start {degrees.world_size} ranks"
    return keys[0], f"start {degrees.world_size} ranks, or write degrees whose product is {ranks}"
