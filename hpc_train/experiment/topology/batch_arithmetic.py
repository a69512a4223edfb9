"""The arithmetic of a step and of a run: G samples, M micro-batches, R ranks, N training samples.

Called by the planner, for which N may be unknown, and by every rank.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

from hpc_train.errors import counted
from hpc_train.experiment.config.problems import Problem

if TYPE_CHECKING:
    from hpc_train.experiment.config.schema import CheckpointConfig, EvaluationConfig
    from hpc_train.experiment.config.training_sections import OptimizationConfig, ScheduleConfig

#: Minutes between checkpoints if the file sets neither steps nor minutes.
DEFAULT_SAVE_EVERY_MIN = 10.0


@dataclass(frozen=True)
class BatchArithmetic:
    """The number of micro-batches, steps and epochs that follow from the file, the data and the ranks."""

    #: M, over all ranks.
    micro_batches: int
    #: Forward passes of one rank in one step, ⌈M/R⌉.
    accumulation: int
    #: ⌊N/G⌋.
    steps_per_epoch: int
    total_steps: int

    @classmethod
    def of(cls, optimization: OptimizationConfig, num_samples: int, ranks: int) -> BatchArithmetic:
        """Raises BadFileError if N < G or R > M."""
        sizes = optimization.global_batch_size, optimization.micro_batch_size
        if problem := too_few_samples(*sizes, num_samples):
            raise problem.as_error()
        micro_batches = count_micro_batches(optimization)
        assert micro_batches is not None, "micro_batch_size: auto must be resolved first"
        if problem := too_few_micro_batches(micro_batches, ranks):
            raise problem.as_error()
        steps_per_epoch = num_samples // optimization.global_batch_size
        total_steps = count_total_steps(optimization, steps_per_epoch)
        assert total_steps is not None
        return cls(micro_batches, accumulation(micro_batches, ranks), steps_per_epoch, total_steps)


@dataclass(frozen=True)
class StepLayout:
    """The division of an optimizer step into micro-batches and over ranks, and its precision."""

    global_batch_size: int
    #: None: ``auto``, not determined yet.
    micro_batch_size: int | None
    ranks: int
    #: Ranks, or groups of ranks with one copy of the model, that share the micro-batches of a step.
    data_ranks: int
    precision: str

    @property
    def micro_batches(self) -> int | None:
        """M, over all ranks."""
        return None if self.micro_batch_size is None else self.global_batch_size // self.micro_batch_size

    @property
    def accumulation(self) -> int | None:
        """Forward passes of one rank in one step, ⌈M/R⌉."""
        return None if self.micro_batches is None else accumulation(self.micro_batches, self.data_ranks)

    def to_json(self) -> dict[str, Any]:
        """Return ``step`` of ``run.json``."""
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
    """Return the number of optimizer steps; None if it depends on data of unknown size."""
    if optimization.steps is not None:
        return optimization.steps
    assert optimization.epochs is not None, "the rules require epochs or steps"
    return None if steps_per_epoch is None else optimization.epochs * steps_per_epoch


def evaluation_interval(evaluation: EvaluationConfig, steps_per_epoch: int) -> int:
    """Return the steps between two evaluations."""
    return evaluation.every_steps or (evaluation.every_epochs or 1) * steps_per_epoch


def minutes_between_saves(checkpoint: CheckpointConfig) -> float | None:
    """Return ``every_min``, or its default without ``every_steps``; None if only steps are set.

    For ``every: auto`` the default is the first interval, until the run has measured its own.
    """
    if checkpoint.every_min is None and checkpoint.every_steps is None:
        return DEFAULT_SAVE_EVERY_MIN
    return checkpoint.every_min


def too_few_micro_batches(
    micro_batches: int,
    ranks: int,
    ranks_per_copy: int = 1,
    *,
    is_auto: bool = False,
    found: int | None = None,
) -> Problem | None:
    """Return the problem if M < R: a rank without a micro-batch would have no gradients.

    ``ranks_per_copy`` ranks share one copy of the model. ``is_auto``: the file has
    ``micro_batch_size: auto``; ``found``: the size from the search in the run's first attempt.
    """
    if ranks <= micro_batches:
        return None
    most = counted(micro_batches, "rank")
    if ranks_per_copy > 1:
        most = f"{counted(micro_batches, 'group')} of {ranks_per_copy} ranks with a model together"
    message = f"needs at most {most}, one per micro-batch, got {ranks}"
    instead = "write a smaller micro_batch_size"
    if found is not None:
        message = f"auto found {found} in the run's first attempt, which {message}"
        instead = "search again with hpc-train submit --new"
    elif is_auto:
        message, instead = f"auto {message}", "write a larger global_batch_size"
    fit = micro_batches * ranks_per_copy
    remedy = f"start {counted(fit, 'rank')}{' or fewer' if fit > 1 else ''}, or {instead}"
    return Problem(("optimization", "micro_batch_size"), message, remedy, code="batch.too-few")


def undivided_batch(global_batch_size: int, micro_batch_size: int) -> Problem | None:
    """Return the problem if the micro-batch size does not divide G."""
    if global_batch_size % micro_batch_size == 0:
        return None
    below = global_batch_size // micro_batch_size * micro_batch_size
    is_nearer_below = below and global_batch_size - below <= micro_batch_size // 2
    fitting = below if is_nearer_below else below + micro_batch_size
    return Problem(
        ("optimization", "global_batch_size"),
        f"{global_batch_size} is not a multiple of micro_batch_size {micro_batch_size}",
        f"write {fitting}, or a micro_batch_size that divides {global_batch_size}",
    )


def undivided_repeats(global_batch_size: int, repeats: int) -> Problem | None:
    """Return the problem if ``data.augment.repeats`` does not divide G."""
    if global_batch_size % repeats == 0:
        return None
    fitting = max(size for size in range(1, repeats) if global_batch_size % size == 0)
    message = f"{repeats} does not divide optimization.global_batch_size {global_batch_size}"
    remedy = f"write {fitting}, or a global_batch_size that is a multiple of {repeats}"
    return Problem(("data", "augment", "repeats"), message, remedy)


def too_few_samples(
    global_batch_size: int, micro_batch_size: int | Literal["auto"], num_samples: int
) -> Problem | None:
    """Return the problem if N < G."""
    if num_samples >= global_batch_size:
        return None
    path = ("optimization", "global_batch_size")
    message = f"{global_batch_size} is more than the {num_samples} training samples of the data"
    micro = 1 if micro_batch_size == "auto" else micro_batch_size
    remedy = f"write {num_samples // micro * micro} or less, so that an epoch is at least one step"
    if num_samples < micro:
        remedy = f"write {num_samples} or less, in it and in optimization.micro_batch_size"
    return Problem(path, message, remedy, code="data.too-few")


def count_warmup_steps(schedule: ScheduleConfig, steps_per_epoch: int) -> int:
    """Return the steps of linear warm-up; epochs are rounded to whole steps."""
    if schedule.warmup_steps is not None:
        return schedule.warmup_steps
    return round((schedule.warmup_epochs or 0) * steps_per_epoch)


def too_long_warmup(
    schedule: ScheduleConfig, warmup: float, length: int, unit: str = "steps"
) -> Problem | None:
    """Return the problem if a warm-up is not shorter than the run, both in ``unit``."""
    if warmup < length:
        return None
    key = "warmup_epochs" if schedule.warmup_steps is None else "warmup_steps"
    shown = unit.removesuffix("s") if warmup == 1 else unit
    path = ("optimization", "schedule", key)
    message = f"a warm-up of {warmup:g} {shown} is not shorter than the run, which has {length}"
    return Problem(path, message, "write a shorter one, or train longer", code="schedule.long-warmup")
