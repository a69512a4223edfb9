"""From a checked file to what would be started: runs, ranks, batches and what they cost.

Called by ``plan``, ``submit`` and whatever starts runs; a plan is picklable and knows nothing of torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from hpc_train.config.cluster_sections import SlurmConfig
from hpc_train.config.degrees import AXES, Degrees, find_degrees
from hpc_train.config.keys import GRID, SCALING
from hpc_train.config.loading import Loaded
from hpc_train.config.pipelines import bubble, stages_per_rank
from hpc_train.config.problems import Problem
from hpc_train.config.schema import Experiment
from hpc_train.config.slurm_rules import least_nodes, most_nodes, ranks_a_node
from hpc_train.config.sweep_rules import swept_paths
from hpc_train.config.training_sections import DataConfig
from hpc_train.errors import BadFileError
from hpc_train.plan.batches import (
    StepLayout,
    accumulation,
    count_micro_batches,
    count_total_steps,
    too_few_samples,
    too_long_warmup,
)
from hpc_train.plan.dataset_size import training_samples
from hpc_train.plan.sweep import Variant, expand

JSON_VERSION = 1
#: The sampler's permutation counts in signed 64-bit integers; no data set comes near.
MAX_SAMPLES = 2**40


@dataclass(frozen=True)
class PlannedRun:
    """One run as it would start; None where a number is not known before it does."""

    id: str
    values: dict[str, Any]
    experiment: Experiment
    ranks: int
    ranks_per_node: int
    #: Of a range of nodes; ``ranks`` are the most.
    fewest_ranks: int
    #: None where they do not fit the ranks, which ``check_start`` tells.
    degrees: Degrees | None
    micro_batches: int | None
    accumulation: int | None
    steps_per_epoch: int | None
    total_steps: int | None
    #: Of the fullest device.
    peak_memory_gb: float | None
    #: At most, of one attempt: all its GPUs for the whole time limit.
    gpu_hours: float | None

    @property
    def layout(self) -> StepLayout:
        """The arithmetic of a step."""
        optimization = self.experiment.optimization
        size = optimization.global_batch_size // self.micro_batches if self.micro_batches else None
        data_ranks = self.ranks if self.degrees is None else self.degrees.data_ranks
        precision = self.experiment.precision
        return StepLayout(optimization.global_batch_size, size, self.ranks, data_ranks, precision)

    @property
    def stages(self) -> int | None:
        """Of a pipeline, on all its ranks; None where there is none."""
        if self.degrees is None or self.degrees.pipeline == 1:
            return None
        return self.degrees.pipeline * stages_per_rank(self.experiment.parallel)

    @property
    def schedule(self) -> str | None:
        """Of a pipeline."""
        parallel = self.experiment.parallel
        return parallel.schedule if self.stages and parallel.strategy == "pipeline" else None

    @property
    def bubble(self) -> float | None:
        """The part of a step that a pipeline's ranks wait, 0…1; None without one, or where not known."""
        if self.degrees is None or self.stages is None or self.accumulation is None:
            return None
        return bubble(self.experiment.parallel, self.degrees.pipeline, self.accumulation)

    def to_json(self) -> dict[str, Any]:
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
            "precision": self.experiment.precision,
            "steps_per_epoch": self.steps_per_epoch,
            "total_steps": self.total_steps,
            "peak_memory_gb": self.peak_memory_gb,
            "gpu_hours": self.gpu_hours,
        }


@dataclass(frozen=True)
class Plan:
    """All runs of one file."""

    name: str
    runs: list[PlannedRun]

    def to_json(self) -> dict[str, Any]:
        """Return what ``plan --json`` prints (DESIGN §5, a contract)."""
        return {"version": JSON_VERSION, "name": self.name, "runs": [run.to_json() for run in self.runs]}


def make_plan(loaded: Loaded, devices: int | None = None, local: bool = False) -> Plan:
    """Plan all runs of the file. ``devices``: ranks on this machine, for ``local``.

    Raises BadFileError where the sweep can't be run, the data are smaller than a batch, or the warm-up is
    as long as the run.
    """
    if local:
        _refuse_scaling(loaded)
    sizes = _Sizes()
    runs, problems = [], []
    for variant in expand(loaded):
        num_samples = sizes.of(variant.experiment.data)
        if num_samples is not None:
            problems += [loaded.problem(*problem) for problem in _misfits(variant, num_samples)]
        runs.append(_planned(variant, num_samples, devices, local))
    if problems:
        raise BadFileError(list(dict.fromkeys(problems)))
    return Plan(loaded.experiment.name, runs)


def _refuse_scaling(loaded: Loaded) -> None:
    """Raise BadFileError where a grid varies the size of a Slurm job, which is nothing to this machine."""
    message = "changes nothing on this machine, so its runs would be one"
    remedy = "take it out of the grid, or submit it to Slurm"
    swept = swept_paths(loaded.experiment)
    problems = [
        loaded.problem((*GRID, key), message, remedy) for key, path in swept.items() if path in SCALING
    ]
    if problems:
        raise BadFileError(problems)


def _misfits(variant: Variant, num_samples: int) -> Iterator[tuple[str, str, str]]:
    """Yield key, message and remedy of what can't be with so many training samples."""
    optimization = variant.experiment.optimization
    if num_samples > MAX_SAMPLES:
        message = f"has {float(num_samples):.3g} training samples; {MAX_SAMPLES:,} can be indexed"
        yield "data.args.num_samples", message, f"write at most {MAX_SAMPLES}"
    elif num_samples == 0:
        yield "data.root", "holds no training images", "write the folder that train/<class>/ lies in"
    elif too_few := too_few_samples(optimization, num_samples):
        yield "optimization.global_batch_size", *too_few
    elif too_long := too_long_warmup(optimization, num_samples // optimization.global_batch_size):
        yield too_long


class _Sizes:
    """Remembers sizes: a sweep's runs mostly share their data, and a folder of images is slow to count."""

    def __init__(self) -> None:
        self._known: dict[str, int | None] = {}

    def of(self, data: DataConfig) -> int | None:
        key = repr((data.name, data.root, data.args))
        if key not in self._known:
            self._known[key] = training_samples(data)
        return self._known[key]


def _planned(variant: Variant, num_samples: int | None, devices: int | None, local: bool) -> PlannedRun:
    experiment = variant.experiment
    optimization = experiment.optimization
    ranks = (devices or 1) if local else slurm_ranks(experiment.slurm)
    per_node = ranks if local else slurm_ranks_per_node(experiment.slurm)
    found = find_degrees(experiment.parallel, ranks, per_node)
    degrees = None if isinstance(found, Problem) else found
    data_ranks = ranks if degrees is None else degrees.data_ranks
    micro_batches = count_micro_batches(optimization)
    steps_per_epoch = None if num_samples is None else num_samples // optimization.global_batch_size
    return PlannedRun(
        id=variant.id,
        values=variant.values,
        experiment=experiment,
        ranks=ranks,
        ranks_per_node=per_node,
        fewest_ranks=ranks if local else fewest_slurm_ranks(experiment.slurm),
        degrees=degrees,
        micro_batches=micro_batches,
        accumulation=None if micro_batches is None else accumulation(micro_batches, data_ranks),
        steps_per_epoch=steps_per_epoch,
        total_steps=count_total_steps(optimization, steps_per_epoch),
        peak_memory_gb=None,
        gpu_hours=_local_gpu_hours(experiment) if local else _slurm_gpu_hours(experiment.slurm),
    )


def slurm_ranks(slurm: SlurmConfig | None) -> int:
    """Return the ranks that the file asks of Slurm, the most of a range of nodes; 1 without ``slurm:``."""
    return 1 if slurm is None else most_nodes(slurm) * ranks_a_node(slurm)


def fewest_slurm_ranks(slurm: SlurmConfig | None) -> int:
    """Return the ranks at the lower end of a range of nodes."""
    return 1 if slurm is None else least_nodes(slurm) * ranks_a_node(slurm)


def slurm_ranks_per_node(slurm: SlurmConfig | None) -> int:
    """Return the ranks that the file asks for on each node; 1 without ``slurm:``."""
    return 1 if slurm is None else ranks_a_node(slurm)


def _slurm_gpu_hours(slurm: SlurmConfig | None) -> float | None:
    if slurm is None or slurm.gpus_per_node == 0:
        return 0.0
    if slurm.time_limit is None:
        return None
    return most_nodes(slurm) * slurm.gpus_per_node * slurm.time_limit / 60


def _local_gpu_hours(experiment: Experiment) -> float | None:
    return 0.0 if experiment.device == "cpu" else None  # nothing limits how long a local run takes
