"""The micro-batch sizes that ``micro_batch_size: auto`` found in existing runs, for ``plan``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from hpc_train.console import say
from hpc_train.paths import RunPaths, runs_root
from hpc_train.plan.planning import Plan, PlannedRun
from hpc_train.run.found_micro_batch import kept_size


def with_found_sizes(made: Plan) -> Plan:
    """Return the plan with numbers for ``auto`` if the run exists and has found its size."""
    return replace(made, runs=[_with_found_size(made.name, run) for run in made.runs])


def _with_found_size(name: str, run: PlannedRun) -> PlannedRun:
    optimization = run.experiment.optimization
    size = kept_size(RunPaths(runs_root() / name / run.id))
    if optimization.micro_batch_size != "auto" or size is None:
        return run
    return replace(run, micro_batches=optimization.global_batch_size // size)


def say_layouts(runs: Sequence[PlannedRun]) -> None:
    """Print the step layout of the runs, each distinct one once."""
    for words, number in Counter(str(run.layout) for run in runs if run.layout).items():
        say(f"  {words}" if number == len(runs) else f"  {number} of {len(runs)} runs: {words}")
