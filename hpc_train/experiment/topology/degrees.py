"""Degrees of parallelism, the position of a rank along each axis, and pipeline schedules: plain arithmetic.

Ranks are numbered over the axes (pipeline, replicate, shard, tensor), the last varying fastest, so that the
ranks that communicate most are neighbours on a node. Called by the planner and by every rank; the sizes for
``auto`` on the ranks and for ``plan``.

Legend: K ranks of a pipeline, v stages of each, S slots: the micro-batches of one pipeline in a step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import gcd, isqrt, prod
from typing import TYPE_CHECKING, NamedTuple

from hpc_train.experiment.config.problems import Problem
from hpc_train.experiment.topology.batch_arithmetic import accumulation
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

    def __str__(self) -> str:
        """Return the degrees above 1, like ``pipeline 2 × shard 4``; ``1`` if there are none."""
        above = [f"{key} {size}" for key in AXES if (size := getattr(self, key)) > 1]
        return " × ".join(above) or "1"


class Ranks(NamedTuple):
    """A run's ranks: maximum, maximum on one node, and minimum; None: unknown before the start."""

    most: int | None = None
    per_node: int | None = None
    fewest: int | None = None
    #: Upper bound for one attempt: all its GPUs for the whole time limit.
    gpu_hours: float | None = None
    #: Maximum numbers of GPUs and CPU cores that the run occupies; it may occupy more cores.
    gpus: float | None = None
    cores: int | None = None
    #: Training time of one attempt: its time limit without the time to save and stop; None: no limit.
    attempt_s: float | None = None


def find_degrees(parallel: ParallelConfig, ranks: int, ranks_per_node: int) -> Degrees | Problem:
    """Return the degrees for this number of ranks, or the problem; without traits all are data-parallel."""
    degrees = _wanted(parallel, ranks, ranks_per_node)
    return degrees if degrees.world_size == ranks else _misfit(parallel, degrees, ranks, ranks_per_node)


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
    message = f"{degrees} needs {degrees.world_size} ranks, but there are {ranks}"
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


def stages_per_rank(parallel: ParallelConfig) -> int:
    """Return v: the file's value, else 2 for an interleaved pipeline and 1 otherwise."""
    if parallel.stages_per_rank is not None:
        return parallel.stages_per_rank
    return 2 if traits_of(parallel.strategy).has_schedule and parallel.schedule == "interleaved" else 1


def bubble(parallel: ParallelConfig, ranks: int, slots: int) -> float:
    """Return the bubble: the fraction of a step, 0…1, in which a rank waits if all stages take equally long.

    (K − 1) / (S + K − 1): Huang et al. 2019, GPipe (arXiv:1811.06965), section 2.3; the same for 1F1B, which
    only changes the order. With v stages per rank (K − 1) / (v·S + K − 1): Narayanan et al. 2021
    (arXiv:2104.04473), section 2.2.2, who divide by the compute time alone, (K − 1) / (v·S), for S ≥ K. With
    fewer slots each rank waits for each micro-batch between its stages: v·S of v·K + S − 1. ``split`` is a
    pipeline of one slot at a time.
    """
    in_flight = slots if traits_of(parallel.strategy).has_schedule else 1
    stages = stages_per_rank(parallel)
    return 1 - stages * in_flight / (stages * max(in_flight, ranks) + min(in_flight, ranks) - 1)


def problem_of_schedule(parallel: ParallelConfig, ranks: int, slots: int) -> Problem | None:
    """Return the problem if the schedule can't run ``slots`` slots per step, else None.

    ``1f1b`` with fewer slots than ranks is equivalent to gpipe. ``interleaved`` runs in rounds of K slots or
    a few more, all rounds of one size.
    """
    if not traits_of(parallel.strategy).has_schedule or parallel.schedule != "interleaved":
        return None
    rounds = max(1, slots // ranks)
    if slots % rounds == 0:
        return None
    fitting = slots // ranks * ranks
    return Problem(
        ("parallel", "schedule"),
        f"interleaved runs micro-batches of {ranks} ranks in {rounds} equal rounds, and {slots} per step are "
        f"not a multiple of {rounds}",
        f"write 1f1b, or a global_batch_size or micro_batch_size that makes {fitting} or {fitting + ranks}",
        code="parallel.schedule-slots",
    )


def problem_of_stages(parallel: ParallelConfig) -> Problem | None:
    """Return the problem if the schedule does not support the stages per rank, else None."""
    traits = traits_of(parallel.strategy)
    if not traits.has_stages:
        return None
    stages, is_interleaved = stages_per_rank(parallel), parallel.schedule == "interleaved"
    path = ("parallel", "stages_per_rank")
    if not traits.has_schedule:
        message = f"{parallel.strategy} has one stage per rank"
        return Problem(path, message, "take it out") if stages > 1 else None
    if is_interleaved and stages < 2:
        return Problem(path, "interleaved needs at least 2 stages per rank", "write 2, or schedule: 1f1b")
    if not is_interleaved and stages > 1:
        remedy = "take it out, or write schedule: interleaved"
        return Problem(path, f"{parallel.schedule} has one stage per rank", remedy)
    return None


def candidates(global_batch_size: int, data_ranks: int) -> list[int]:
    """Return the sizes that divide G and give each rank a micro-batch, in ascending order."""
    return [size for size in divisors(global_batch_size) if size * data_ranks <= global_batch_size]


def scheduled_candidates(
    global_batch_size: int, parallel: ParallelConfig, degrees: Degrees, data_ranks: int | None = None
) -> list[int]:
    """Return the ``candidates`` that a pipeline's schedule supports and that keep its ranks busy.

    ``data_ranks``: the maximum of an attempt; default: ``degrees.data_ranks``.
    """
    sizes = candidates(global_batch_size, data_ranks or degrees.data_ranks)
    slots = {size: accumulation(global_batch_size // size, degrees.data_ranks) for size in sizes}
    # With fewer micro-batches than ranks a pipeline has no steady state.
    has_schedule = traits_of(parallel.strategy).has_schedule
    fewest = min(degrees.pipeline, max(slots.values(), default=1)) if has_schedule else 1
    enough = [size for size in sizes if slots[size] >= fewest]
    return [size for size in enough if not problem_of_schedule(parallel, degrees.pipeline, slots[size])]
