"""The arithmetic of a step and of a run (DESIGN §1): G samples, M micro-batches, R ranks, N samples of data.

Asked by the planner, which may not know N, and by every rank, which does.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from hpc_train.config.training_sections import OptimizationConfig, ScheduleConfig
from hpc_train.errors import BadFileError


@dataclass(frozen=True)
class BatchArithmetic:
    """What the file, the data and the number of ranks make of a step."""

    #: M, of all ranks together.
    micro_batches: int
    #: Forward passes of one rank in one step, ⌈M/R⌉.
    accumulation: int
    #: ⌊N/G⌋.
    steps_per_epoch: int
    total_steps: int

    @classmethod
    def of(cls, optimization: OptimizationConfig, num_samples: int, ranks: int) -> BatchArithmetic:
        """Raises BadFileError where N < G or R > M."""
        if problem := too_few_samples(optimization, num_samples):
            raise BadFileError(f"optimization.global_batch_size: {'; '.join(problem)}")
        micro_batches = count_micro_batches(optimization)
        assert micro_batches is not None, "micro_batch_size: auto is resolved before it is used"
        if ranks > micro_batches:
            raise BadFileError(
                f"optimization.micro_batch_size: a step has {micro_batches} micro-batches, "
                f"too few for {ranks} ranks; start {micro_batches} ranks or fewer, or halve micro_batch_size"
            )
        steps_per_epoch = num_samples // optimization.global_batch_size
        total_steps = count_total_steps(optimization, steps_per_epoch)
        assert total_steps is not None
        return cls(micro_batches, accumulation(micro_batches, ranks), steps_per_epoch, total_steps)


@dataclass(frozen=True)
class StepLayout:
    """How one optimizer step is divided into micro-batches and over ranks, and its precision.

    Every command and rank 0's log show it by ``str``.
    """

    global_batch_size: int
    #: None: ``auto``, and not found yet.
    micro_batch_size: int | None
    ranks: int
    #: Ranks, or groups of ranks with one copy of the model, that share a step's micro-batches.
    data_ranks: int
    precision: str

    @property
    def micro_batches(self) -> int | None:
        """M, of all ranks together."""
        return None if self.micro_batch_size is None else self.global_batch_size // self.micro_batch_size

    @property
    def accumulation(self) -> int | None:
        """Forward passes of one rank in one step, ⌈M/R⌉."""
        return None if self.micro_batches is None else accumulation(self.micro_batches, self.data_ranks)

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"micro_batches": self.micro_batches, "accumulation": self.accumulation}

    def __str__(self) -> str:
        ranks = "1 rank" if self.ranks == 1 else f"{self.ranks} ranks"
        if self.data_ranks != self.ranks:
            ranks = f"{ranks} ({self.data_ranks} data-parallel)"
        samples = f"{self.global_batch_size} samples per step"
        if self.micro_batches is None:
            return f"{samples}: micro-batches auto, {ranks}, {self.precision}"
        micro_batches = f"{self.micro_batches} micro-batch{'' if self.micro_batches == 1 else 'es'}"
        at_most = "at most " if self.micro_batches % self.data_ranks else ""
        per_rank = f"{at_most}{self.accumulation} per rank"
        return f"{samples}: {micro_batches} of {self.micro_batch_size}, {per_rank}, {ranks}, {self.precision}"


def count_micro_batches(optimization: OptimizationConfig) -> int | None:
    """Return M; None for ``micro_batch_size: auto``."""
    if optimization.micro_batch_size == "auto":
        return None
    return optimization.global_batch_size // optimization.micro_batch_size


def accumulation(micro_batches: int, ranks: int) -> int:
    """Return ⌈M/R⌉."""
    return -(-micro_batches // ranks)


def count_total_steps(optimization: OptimizationConfig, steps_per_epoch: int | None) -> int | None:
    """Return the optimizer steps of the run; None where they follow from data that are not known."""
    if optimization.steps is not None:
        return optimization.steps
    assert optimization.epochs is not None, "the rules see to it that epochs or steps is there"
    return None if steps_per_epoch is None else optimization.epochs * steps_per_epoch


def too_few_samples(optimization: OptimizationConfig, num_samples: int) -> tuple[str, str] | None:
    """Return what is wrong with ``optimization.global_batch_size`` and what to write, where N < G."""
    if num_samples >= optimization.global_batch_size:
        return None
    message = f"{optimization.global_batch_size} is more than the {num_samples} training samples of the data"
    micro = 1 if optimization.micro_batch_size == "auto" else optimization.micro_batch_size
    if num_samples < micro:
        return message, f"write {num_samples} or less, in it and in optimization.micro_batch_size"
    return message, f"write {num_samples // micro * micro} or less, so that an epoch is at least one step"


def count_warmup_steps(schedule: ScheduleConfig, steps_per_epoch: int) -> int:
    """Return the steps of linear warm-up, those given in epochs rounded to whole steps."""
    if schedule.warmup_steps is not None:
        return schedule.warmup_steps
    return round((schedule.warmup_epochs or 0) * steps_per_epoch)


def too_long_warmup(optimization: OptimizationConfig, steps_per_epoch: int) -> tuple[str, str, str] | None:
    """Return the key, what is wrong with it and what to write, where the warm-up fills the run."""
    schedule = optimization.schedule
    warmup = count_warmup_steps(schedule, steps_per_epoch)
    total = count_total_steps(optimization, steps_per_epoch)
    assert total is not None
    if warmup < total:
        return None
    key = "warmup_epochs" if schedule.warmup_steps is None else "warmup_steps"
    message = f"a warm-up of {warmup} steps fills the run, which has {total}"
    return f"optimization.schedule.{key}", message, "write a shorter one, or train longer"
