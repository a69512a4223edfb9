"""Cost and constraints of pipeline schedules, and the micro-batch sizes of a run: plain arithmetic.

For the planner and for every rank; the sizes for ``auto`` on the ranks and for ``plan``.

Legend: K ranks of a pipeline, v stages of each, S slots: the micro-batches of one pipeline in a step.
"""

from __future__ import annotations

from hpc_train.experiment.config.problems import Problem
from hpc_train.experiment.config.training_sections import ParallelConfig
from hpc_train.experiment.topology.batch_arithmetic import accumulation
from hpc_train.experiment.topology.degrees import Degrees, divisors
from hpc_train.experiment.topology.strategy_traits import traits_of


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
        return Problem(path, message, "take it out", code="parallel.schedule") if stages > 1 else None
    if is_interleaved and stages < 2:
        return Problem(
            path,
            "interleaved needs at least 2 stages per rank",
            "write 2, or schedule: 1f1b",
            code="parallel.schedule",
        )
    if not is_interleaved and stages > 1:
        remedy = "take it out, or write schedule: interleaved"
        return Problem(path, f"{parallel.schedule} has one stage per rank", remedy, code="parallel.schedule")
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
    return [
        size
        for size in sizes
        if slots[size] >= fewest and not problem_of_schedule(parallel, degrees.pipeline, slots[size])
    ]
