"""The possible micro-batch sizes of a run, for ``auto`` on the ranks and for ``plan``."""

from __future__ import annotations

from hpc_train.config.training_sections import ParallelConfig
from hpc_train.topology.batch_arithmetic import accumulation
from hpc_train.topology.degrees import Degrees, divisors
from hpc_train.topology.pipeline_schedules import problem_of_schedule
from hpc_train.topology.strategy_traits import traits_of


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
    return [
        size
        for size in sizes
        if slots[size] >= fewest and not problem_of_schedule(parallel, degrees.pipeline, slots[size])
    ]
