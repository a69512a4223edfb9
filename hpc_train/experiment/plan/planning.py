"""Plans the runs of a checked file: ranks, batches and cost.

Called by ``plan``, ``submit`` and the launchers; a plan can be pickled and does not depend on torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hpc_train.errors import BadFileError
from hpc_train.experiment.config.keys import SCALING
from hpc_train.experiment.config.problems import Problem
from hpc_train.experiment.config.schema import Experiment, Job
from hpc_train.experiment.config.training_sections import ParallelConfig
from hpc_train.experiment.data_facts.by_name import training_samples
from hpc_train.experiment.plan.sweep import expand
from hpc_train.experiment.topology import batch_arithmetic
from hpc_train.experiment.topology.batch_arithmetic import StepLayout
from hpc_train.experiment.topology.degrees import AXES, Degrees, Ranks, bubble, find_degrees, stages_per_rank
from hpc_train.experiment.topology.strategy_traits import traits_of
from hpc_train.experiment.validate.budget_rules import planned_runs, with_share
from hpc_train.experiment.validate.loading import Loaded
from hpc_train.experiment.validate.sweep_rules import swept_paths

JSON_VERSION = 1
#: The sampler's permutation uses signed 64-bit integers; no data set comes close.
MAX_SAMPLES = 2**40


@dataclass(frozen=True)
class PlannedRun:
    """One planned run; a number is None if it is not known before the start, or if the workload has none."""

    id: str
    values: dict[str, Any]
    experiment: Job
    #: Ranks that the launcher will start.
    size: Ranks
    #: None if they don't fit the ranks, which ``check_start`` reports.
    degrees: Degrees | None = None
    micro_batches: int | None = None
    steps_per_epoch: int | None = None
    total_steps: int | None = None

    @property
    def ranks(self) -> int | None:
        """The number of ranks; for a range of nodes, the maximum."""
        return self.size.most

    @property
    def data_ranks(self) -> int | None:
        """The ranks, or groups of ranks with one copy of the model, that share a step."""
        return self.ranks if self.degrees is None else self.degrees.data_ranks

    @property
    def accumulation(self) -> int | None:
        """Micro-batches of the rank with the most in one step."""
        if self.micro_batches is None or self.data_ranks is None:
            return None
        return batch_arithmetic.accumulation(self.micro_batches, self.data_ranks)

    @property
    def parallel(self) -> ParallelConfig | None:
        """How ranks share the model; None if the workload is not our trainer."""
        return self.experiment.parallel if isinstance(self.experiment, Experiment) else None

    @property
    def has_degrees(self) -> bool:
        """Whether the strategy has several degrees of parallelism."""
        return self.parallel is not None and len(traits_of(self.parallel.strategy).degrees) > 1

    @property
    def precision(self) -> str | None:
        """The file's ``precision``; None if the workload is not our trainer."""
        return self.experiment.precision if isinstance(self.experiment, Experiment) else None

    @property
    def layout(self) -> StepLayout | None:
        """The arithmetic of a step; None if the ranks are not known."""
        if self.ranks is None or self.data_ranks is None or not isinstance(self.experiment, Experiment):
            return None
        optimization = self.experiment.optimization
        size = optimization.global_batch_size // self.micro_batches if self.micro_batches else None
        return StepLayout(
            optimization.global_batch_size, size, self.ranks, self.data_ranks, self.experiment.precision
        )

    @property
    def stages(self) -> int | None:
        """The number of stages on all ranks of a pipeline; None without a pipeline."""
        if self.parallel is None or self.degrees is None or self.degrees.pipeline == 1:
            return None
        return self.degrees.pipeline * stages_per_rank(self.parallel)

    @property
    def schedule(self) -> str | None:
        """The schedule of a pipeline; None without one."""
        parallel = self.parallel
        has_schedule = parallel and self.stages and traits_of(parallel.strategy).has_schedule
        return parallel.schedule if parallel and has_schedule else None

    @property
    def bubble(self) -> float | None:
        """The fraction of a step, 0…1, in which a pipeline's ranks wait; None without one or if unknown."""
        if self.parallel is None or self.degrees is None or self.stages is None or self.accumulation is None:
            return None
        return bubble(self.parallel, self.degrees.pipeline, self.accumulation)

    def to_json(self) -> dict[str, Any]:
        """Return its entry in ``plan --json``, without predictions."""
        return {
            "id": self.id,
            "values": self.values,
            "ranks": self.ranks,
            "degrees": None if self.degrees is None else {key: getattr(self.degrees, key) for key in AXES},
            "stages": self.stages,
            "schedule": self.schedule,
            "bubble": self.bubble,
            "micro_batches": self.micro_batches,
            "accumulation": self.accumulation,
            "precision": self.precision,
            "steps_per_epoch": self.steps_per_epoch,
            "total_steps": self.total_steps,
            "peak_memory_gb": None,
            "gpu_hours": self.size.gpu_hours,
        }


@dataclass(frozen=True)
class Plan:
    """All runs of one file."""

    name: str
    runs: list[PlannedRun]
    #: Ranks of each run on this machine, as the launcher chose them; None if the file gives the number.
    devices: int | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the output of ``plan --json`` (a contract)."""
        return {"version": JSON_VERSION, "name": self.name, "runs": [run.to_json() for run in self.runs]}


def make_plan(
    loaded: Loaded,
    ranks_of: Callable[[Job], Ranks] = lambda experiment: Ranks(),
    *,
    on_this_machine: bool = False,
    trials: Sequence[Mapping[str, Any]] | None = None,
) -> Plan:
    """Plan all runs of the file. ``ranks_of``: the launcher's ranks for a run. ``trials``: those of a search.

    Raises BadFileError if the sweep is invalid, the data are smaller than a batch, or the warm-up is as long
    as the run.
    """
    if on_this_machine:
        _refuse_scaling(loaded)
    # The runs of a sweep mostly share their data, and counting a folder of images is slow.
    sizes: dict[str, int | None] = {}
    runs: list[PlannedRun] = []
    problems: list[str] = []
    variants = expand(loaded, trials)
    count = planned_runs(loaded.experiment, len(variants))
    for variant in variants:
        job = with_share(variant.experiment, count)
        run = PlannedRun(variant.id, variant.values, job, ranks_of(job))
        if isinstance(job, Experiment):
            key = repr((job.data.name, job.data.root, job.data.args))
            if key not in sizes:
                sizes[key] = training_samples(job.data)
            if (num_samples := sizes[key]) is not None:
                problems += map(loaded.source.render, _misfits(job, num_samples))
            run = _with_steps(run, job, sizes[key])
        runs.append(run)
    if problems:
        raise BadFileError(list(dict.fromkeys(problems)))
    return Plan(loaded.experiment.name, runs)


def _refuse_scaling(loaded: Loaded) -> None:
    message = "has no effect on this machine, so all values would give the same run"
    remedy = "take it out of the grid, or submit it to a queue"
    scaling = [swept for swept, path in swept_paths(loaded.experiment) if path in SCALING]
    problems = [loaded.problem(swept.place, message, remedy, "sweep.scaling") for swept in scaling]
    if problems:
        raise BadFileError(problems)


def _misfits(experiment: Experiment, num_samples: int) -> Iterator[Problem]:
    optimization = experiment.optimization
    if num_samples > MAX_SAMPLES:
        message = f"has {float(num_samples):.3g} training samples; {MAX_SAMPLES:,} can be indexed"
        yield Problem(
            ("data", "args", "num_samples"), message, f"write at most {MAX_SAMPLES}", code="data.too-many"
        )
    elif num_samples == 0:
        remedy = "write the folder that contains train/<class>/"
        yield Problem(("data", "root"), "contains no training images", remedy, code="data.empty")
    elif too_few := batch_arithmetic.too_few_samples(
        optimization.global_batch_size, optimization.micro_batch_size, num_samples
    ):
        yield too_few
    else:
        steps_per_epoch = num_samples // optimization.global_batch_size
        warmup = batch_arithmetic.count_warmup_steps(optimization.schedule, steps_per_epoch)
        total = batch_arithmetic.count_total_steps(optimization, steps_per_epoch)
        if total is not None and (
            too_long := batch_arithmetic.too_long_warmup(optimization.schedule, warmup, total)
        ):
            yield too_long


def _with_steps(run: PlannedRun, experiment: Experiment, num_samples: int | None) -> PlannedRun:
    optimization = experiment.optimization
    steps_per_epoch = None if num_samples is None else num_samples // optimization.global_batch_size
    return replace(
        run,
        degrees=_degrees(experiment, run.size),
        micro_batches=batch_arithmetic.count_micro_batches(optimization),
        steps_per_epoch=steps_per_epoch,
        total_steps=batch_arithmetic.count_total_steps(optimization, steps_per_epoch),
    )


def _degrees(experiment: Experiment, size: Ranks) -> Degrees | None:
    if size.most is None:
        return None
    degrees = find_degrees(experiment.parallel, size.most, size.per_node or size.most)
    return None if isinstance(degrees, Problem) else degrees
