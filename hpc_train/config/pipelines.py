"""What a pipeline's schedule costs and asks for: plain arithmetic, for the planner and for every rank.

Legend: K ranks of a pipeline, v stages of each, S slots: the micro-batches of one pipeline in a step.
"""

from __future__ import annotations

from hpc_train.config.problems import Problem
from hpc_train.config.training_sections import ParallelConfig

#: Strategies by which a rank has some of the layers.
BY_STAGES = ("pipeline", "split")


def stages_per_rank(parallel: ParallelConfig) -> int:
    """Return v: what the file says, else 2 of an interleaved pipeline and 1 of any other."""
    if parallel.stages_per_rank is not None:
        return parallel.stages_per_rank
    return 2 if parallel.strategy == "pipeline" and parallel.schedule == "interleaved" else 1


def bubble(parallel: ParallelConfig, ranks: int, slots: int) -> float:
    """Return the part of a step in which a rank of the pipeline waits, 0…1, if all stages take equally long.

    (K − 1) / (S + K − 1): Huang et al. 2019, GPipe (arXiv:1811.06965), section 2.3; 1F1B, which changes the
    order alone, has the same. Of v stages a rank (K − 1) / (v·S + K − 1): Narayanan et al. 2021
    (arXiv:2104.04473), section 2.2.2, who divide by the time of work alone, (K − 1) / (v·S); they have S ≥ K,
    and with fewer a rank waits for each micro-batch between its stages: v·S of v·K + S − 1. ``split`` is a
    pipeline of one slot at a time.
    """
    in_flight = 1 if parallel.strategy == "split" else slots
    stages = stages_per_rank(parallel)
    return 1 - stages * in_flight / (stages * max(in_flight, ranks) + min(in_flight, ranks) - 1)


def problem_of_schedule(parallel: ParallelConfig, ranks: int, slots: int) -> Problem | None:
    """Return what keeps the schedule from so many ``slots`` a step, if anything does.

    ``1f1b`` with fewer slots than ranks never comes to its turns: it runs as gpipe, which is then the same.
    ``interleaved`` goes by rounds of K slots or a few more, all rounds of one size.
    """
    if parallel.strategy != "pipeline" or parallel.schedule != "interleaved":
        return None
    rounds = max(1, slots // ranks)
    if slots % rounds == 0:
        return None
    fitting = slots // ranks * ranks
    return Problem(
        ("parallel", "schedule"),
        f"interleaved takes {ranks} ranks' micro-batches in {rounds} equal rounds, and {slots} of a step are "
        f"no multiple of {rounds}",
        f"write 1f1b, or a global_batch_size or micro_batch_size that makes {fitting} or {fitting + ranks}",
    )


def problem_of_stages(parallel: ParallelConfig) -> Problem | None:
    """Return why the schedule can't have so many stages a rank, if it can't."""
    if parallel.strategy not in BY_STAGES:
        return None
    stages, is_interleaved = stages_per_rank(parallel), parallel.schedule == "interleaved"
    path = ("parallel", "stages_per_rank")
    if parallel.strategy == "split":
        return Problem(path, "split has one stage a rank", "take it out") if stages > 1 else None
    if is_interleaved and stages < 2:
        return Problem(path, "interleaved takes at least 2 stages by turns", "write 2, or schedule: 1f1b")
    if not is_interleaved and stages > 1:
        remedy = "take it out, or write schedule: interleaved"
        return Problem(path, f"{parallel.schedule} has one stage a rank", remedy)
    return None
