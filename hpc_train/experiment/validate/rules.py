"""Constraints between keys, and features that this version can't run yet.

Each rule names the keys that it reads. Rules on Slurm, on names of parts and on sweeps are in their own
modules; ``check`` applies all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from functools import lru_cache
from operator import attrgetter

from hpc_train.errors import shortened
from hpc_train.experiment.config.problems import KeyPath, Problem, is_clean
from hpc_train.experiment.config.schema import Experiment, Job
from hpc_train.experiment.config.training_sections import OF_STAGE, WEIGHT_FILES
from hpc_train.experiment.data_facts.built_in import MODELS, TASKS
from hpc_train.experiment.data_facts.image_facts import not_for_masks, only_for_masks
from hpc_train.experiment.topology import batch_arithmetic
from hpc_train.experiment.topology.degrees import find_degrees, problem_of_schedule
from hpc_train.experiment.validate import (  # noqa: F401 (they register their rules)
    compatibility,
    container_rules,
    layer_rules,
    logging_rules,
    model_rules,
    optimizer_rules,
    part_rules,
    program_rules,
    slurm_rules,
    smp_rules,
    sweep_rules,
    task_rules,
)
from hpc_train.experiment.validate.base import RULES, Rule, rule, unexpanded
from hpc_train.experiment.validate.compatibility import auto_on_cpu, uneven_sync_batchnorm
from hpc_train.experiment.validate.layer_rules import problems_of_layers
from hpc_train.paths import expanded
from hpc_train.registry import is_factory


def unused_without_queue(job: Job, *, is_local: bool) -> list[Problem]:
    """Return the remarks on keys that promise something only a queue can do; ``is_local``: or only Slurm."""
    remarks = []
    if job.slurm is not None and job.slurm.spare_nodes:
        message, remedy = "has no effect without a job of its own", "omit --local and --here to use it"
        remarks.append(Problem(("slurm", "spare_nodes"), message, remedy, code="slurm.spare-nodes"))
    if isinstance(job, Experiment) and job.evaluation.as_job:
        message = "has no effect without a job of its own: the run's ranks evaluate"
        remedy = "omit --local and --here to use it"
        remarks.append(Problem(("evaluation", "as_job"), message, remedy, code="evaluation.as-job"))
    if is_local and job.recovery.standby:
        message, remedy = "has no effect on this machine", "omit --local to use it"
        remarks.append(Problem(("recovery", "standby"), message, remedy, code="recovery.standby"))
    return remarks


def check(experiment: Job, failed: Collection[KeyPath] = (), *, check_names: bool = True) -> list[Problem]:
    """Return the problems across keys. Rules that read a key of ``failed`` are skipped."""
    applicable = _applicable(type(experiment), frozenset(failed), check_names)
    return [problem for one in applicable for problem in one.problems(experiment)]


@lru_cache(maxsize=8)
def _applicable(kind: type[Job], failed: frozenset[KeyPath], check_names: bool) -> list[Rule]:
    """Return the rules for this kind of file that read no key of ``failed``, ordered by code."""
    fitting = [one for _, one in sorted(RULES.items()) if one.fits(kind) and one.can_judge(failed)]
    return [one for one in fitting if check_names or not one.looks_up_names]


@rule("optimization.length", "optimization.epochs", "optimization.steps")
def length_is_given_once(experiment: Experiment) -> Iterator[Problem]:
    """Exactly one of ``epochs`` and ``steps`` must be given."""
    optimization = experiment.optimization
    if optimization.epochs is None and optimization.steps is None:
        remedy = "write epochs: 30, or steps: 12000"
        yield Problem(("optimization", "epochs"), "is missing, and so is optimization.steps", remedy)
    yield from _beside("optimization.epochs", "optimization.steps")(experiment)


#: Code → two keys that exclude each other; the second one is reported.
_EXCLUSIVE = {
    "augment.two-policies": ("data.augment.randaugment", "data.augment.policy"),
    "checkpoint.two-intervals": ("checkpoint.every_min", "checkpoint.every_steps"),
    "checkpoint.auto-and-minutes": ("checkpoint.every", "checkpoint.every_min"),
    "checkpoint.auto-and-steps": ("checkpoint.every", "checkpoint.every_steps"),
    "evaluation.two-intervals": ("evaluation.every_epochs", "evaluation.every_steps"),
    "schedule.two-warmups": ("optimization.schedule.warmup_epochs", "optimization.schedule.warmup_steps"),
}


def _beside(one: str, other: str) -> Callable[[Experiment], Iterator[Problem]]:
    """Return a rule's function that reports ``other`` if both keys are given."""

    def find(experiment: Experiment) -> Iterator[Problem]:
        if None not in attrgetter(one, other)(experiment):
            yield Problem(tuple(other.split(".")), f"can't be combined with {one}", "take one of the two out")

    return find


for _code, _keys in _EXCLUSIVE.items():
    rule(_code, *_keys)(_beside(*_keys))


@rule("checkpoint.unused-parts", "checkpoint.digests", "checkpoint.parts_every")
def parts_have_digests(experiment: Experiment) -> Iterator[Problem]:
    """``checkpoint.parts_every`` needs ``digests: parts``."""
    if experiment.checkpoint.parts_every is not None and experiment.checkpoint.digests != "parts":
        message = "has no effect without checkpoint.digests: parts"
        yield Problem(("checkpoint", "parts_every"), message, "write digests: parts, or take it out")


@rule("batch.undivided", "optimization.global_batch_size", "optimization.micro_batch_size")
def micro_batches_divide_the_batch(experiment: Experiment) -> Problem | None:
    """``micro_batch_size`` must divide ``global_batch_size``."""
    batch, micro = experiment.optimization.global_batch_size, experiment.optimization.micro_batch_size
    return None if micro == "auto" else batch_arithmetic.undivided_batch(batch, micro)


@rule("batch.undivided-repeats", "data.augment.repeats", "optimization.global_batch_size")
def repeats_divide_the_batch(experiment: Experiment) -> Problem | None:
    """``data.augment.repeats`` must divide ``global_batch_size``."""
    return batch_arithmetic.undivided_repeats(
        experiment.optimization.global_batch_size, experiment.data.augment.repeats
    )


@rule("augment.magnitude", "data.augment.randaugment")
def timms_magnitudes_end_at_ten(experiment: Experiment) -> Iterator[Problem]:
    """``data.augment.randaugment.magnitude`` must be at most 10 with timm's operations."""
    settings = experiment.data.augment.randaugment
    if settings is not None and settings.operations == "timm" and settings.magnitude > 10:
        path = ("data", "augment", "randaugment", "magnitude")
        yield Problem(path, f"{settings.magnitude} exceeds 10, the maximum of timm's operations", "write 9")


@rule(
    "schedule.long-warmup",
    "optimization.epochs optimization.steps optimization.schedule.warmup_epochs "
    "optimization.schedule.warmup_steps",
)
def warmup_ends_before_the_run(experiment: Experiment) -> Iterator[Problem]:
    """The warm-up must be shorter than the run."""
    optimization = experiment.optimization
    for unit in ("epochs", "steps"):
        length, warmup = getattr(optimization, unit), getattr(optimization.schedule, f"warmup_{unit}")
        if length is None or warmup is None:
            continue
        if problem := batch_arithmetic.too_long_warmup(optimization.schedule, warmup, length, unit):
            yield problem


@rule("augment.crop", "data.augment.random_resized_crop", "data.augment.crop_padding", "data.image_size")
def crops_fit_together(experiment: Experiment) -> Iterator[Problem]:
    """A random resized crop needs ``image_size``, excludes padding, and has ordered bounds."""
    augment, path = experiment.data.augment, ("data", "augment")
    crop = augment.random_resized_crop
    if crop is None:
        return
    if experiment.data.image_size is None:
        yield Problem((*path, "random_resized_crop"), "needs data.image_size", "write data.image_size: 224")
    if augment.crop_padding:
        remedy = "take one of the two out"
        yield Problem((*path, "crop_padding"), "can't be combined with random_resized_crop", remedy)
    for key, (low, high) in (("scale", crop.scale), ("ratio", crop.ratio)):
        if low > high:
            yield _falling((*path, "random_resized_crop", key), low, high)


@rule("augment.scale", "data.augment.random_scale", "data.augment.random_resized_crop")
def scales_fit_together(experiment: Experiment) -> Iterator[Problem]:
    """``random_scale`` excludes a random resized crop and has ordered bounds."""
    augment, path = experiment.data.augment, ("data", "augment", "random_scale")
    if augment.random_scale is None:
        return
    if augment.random_resized_crop is not None:
        yield Problem(path, "can't be combined with random_resized_crop", "take one of the two out")
    low, high = augment.random_scale
    if low > high:
        yield _falling(path, low, high)


def _falling(path: KeyPath, low: float, high: float) -> Problem:
    return Problem(path, f"starts with the larger bound, {low:g}", f"write [{high:g}, {low:g}]")


@rule("augment.target", "task", "data.augment", "data.image_size", "data.eval_size", "data.eval_crop")
def image_keys_fit_the_target(experiment: Experiment) -> Iterator[Problem]:
    """Masks and boxes move along with the image; keys that move only the image are refused with them."""
    task, data = TASKS.get(experiment.task), experiment.data
    if task is None:  # a plug-in's: the ranks find out
        return
    has_masks = bool({"mask", "boxes"} & set(task.targets))
    if problem := not_for_masks(data) if has_masks else only_for_masks(data):
        yield problem
    if has_masks and data.eval_crop != 1.0:
        message = "crops images without their masks and boxes"
        yield Problem(("data", "eval_crop"), message, "take it out; whole images are evaluated")


@rule("normalize.lengths", "data.normalize")
def normalization_has_equal_lengths(experiment: Experiment) -> Iterator[Problem]:
    """``mean`` and ``std`` must have one value per channel each."""
    normalize = experiment.data.normalize
    if normalize is None or normalize.from_weights:
        return
    if len(normalize.mean) != len(normalize.std):
        message = f"has {len(normalize.std)} values and mean has {len(normalize.mean)}"
        yield Problem(("data", "normalize", "std"), message, "write one value per channel in both")
    elif not normalize.mean:
        yield Problem(("data", "normalize", "mean"), "is empty", "write one value per channel")


@rule("normalize.range", "data.normalize")
def normalization_is_of_values_from_0_to_1(experiment: Experiment) -> Iterator[Problem]:
    """``mean`` and ``std`` are those of values from 0 to 1, not of bytes."""
    normalize = experiment.data.normalize
    for key, values in (("mean", normalize.mean), ("std", normalize.std)) if normalize else ():
        if (highest := max(values, default=0)) > 1:
            scaled = ", ".join(f"{value / 255:.4g}" for value in values)
            message = f"has the value {highest:g}, and pixels are scaled to 0 to 1 before"
            yield Problem(("data", "normalize", key), message, f"write [{scaled}], if it is that of bytes")


#: Providers whose weights may define mean and std.
_NORMALIZING = [name for name, facts in MODELS.items() if facts.preprocessing]


@rule("normalize.weights", "data.normalize", "model.name", "model.pretrained", "model.init_from")
def weights_say_how_to_normalize(experiment: Experiment) -> Iterator[Problem]:
    """``normalize: weights`` needs pretrained weights that define it."""
    normalize, path = experiment.data.normalize, ("data", "normalize")
    if normalize is None or not normalize.from_weights:
        return
    if normalize.mean or normalize.std:
        yield Problem(path, "has mean or std in addition to from_weights", "write normalize: weights")
    elif not experiment.model.name.startswith(tuple(f"{name}/" for name in _NORMALIZING)):
        *others, last = (f"{name}'s" for name in _NORMALIZING)
        message = (
            f"weights of {experiment.model.name} define no mean and std "
            f"(only {', '.join(others)} and {last} do)"
        )
        yield Problem(path, message, "write {mean: […], std: […]}")
    elif experiment.model.pretrained is False and experiment.model.init_from is None:
        message = "weights needs model.pretrained or model.init_from"
        yield Problem(path, message, "write model.pretrained: true, or a path")


#: Paths, and names of runs.
_TEXTS = (
    "data.root", "data.cache", "data.stage", "model.pretrained", "model.init_from", "environment.python",
)  # fmt: skip


@rule("text.unclean", *_TEXTS, "logging.wandb.tags", "environment.container")
def text_has_no_control_characters(experiment: Experiment) -> Iterator[Problem]:
    """Paths and text must not be empty or contain control characters."""
    wandb, container = experiment.logging.wandb, experiment.environment.container
    texts: list[tuple[KeyPath, object]]
    texts = [(tuple(key.split(".")), attrgetter(key)(experiment)) for key in _TEXTS]
    texts += [(("logging", "wandb", "tags", i), tag) for i, tag in enumerate(wandb.tags if wandb else [])]
    if container is not None:
        section: KeyPath = ("environment", "container")
        texts.append(((*section, "image"), container.image))
        texts += [((*section, "mounts", i), mount) for i, mount in enumerate(container.mounts)]
        texts += [((*section, "options", i), option) for i, option in enumerate(container.options)]
    for path, text in texts:
        if isinstance(text, str) and not is_clean(text):
            yield Problem(path, "has a control character or line break", "take it out")
        elif text == "":
            yield Problem(path, "is empty", "write a path, or take the key out")


_PATHS = ("data.root", "data.cache", "model.pretrained", "model.init_from")


@rule("path.variable", *_PATHS, "data.name")
def paths_contain_no_variables(experiment: Experiment) -> Iterator[Problem]:
    """Paths are used as they are, except for ``~``; a data set of the user's own may expand its root."""
    for key in _PATHS:
        text = attrgetter(key)(experiment)
        if not isinstance(text, str) or (key == "data.root" and is_factory(experiment.data.name)):
            continue
        if (problem := unexpanded(tuple(key.split(".")), text)) and not expanded(text).exists():
            yield problem


@rule("weights.not-a-file", "model.pretrained")
def weights_are_a_file(experiment: Experiment) -> Iterator[Problem]:
    """``model.pretrained`` must be true, false, or a file of a known format."""
    weights = experiment.model.pretrained
    if isinstance(weights, str) and weights and not weights.endswith(WEIGHT_FILES):
        message = f"'{shortened(weights)}' is not a file of weights ({', '.join(WEIGHT_FILES)})"
        remedy = "write true, or the path of such a file"
        yield Problem(("model", "pretrained"), message, remedy)


@rule("weights.two-sources", "model.pretrained", "model.init_from")
def weights_come_from_one_place(experiment: Experiment) -> Iterator[Problem]:
    """A model starts from one set of weights."""
    if experiment.model.init_from is not None and experiment.model.pretrained is not False:
        yield Problem(("model", "init_from"), "has no effect beside model.pretrained", "take one of them out")


@rule("weights.no-stage", "model.init_from")
def weights_of_a_stage_need_one(experiment: Experiment) -> Iterator[Problem]:
    """Only a stage of a file, after a training stage, can start from the weights of a stage."""
    if experiment.model.init_from == OF_STAGE:
        yield Problem(
            ("model", "init_from"),
            "there is no training stage before this one whose weights it could load",
            "name this file in `stages` of another file, after that one, or write a run or a file of weights",
        )


@rule("compile.nondeterministic", "compile", "deterministic", "device")
def compiled_code_is_the_same_after_a_resume(experiment: Experiment) -> Iterator[Problem]:
    """Symbolic shapes chosen by torch exclude determinism."""
    on_cpu_by_default = experiment.deterministic is None and experiment.device == "cpu"
    if not (experiment.deterministic or on_cpu_by_default):
        return
    if experiment.compile.enabled and experiment.compile.dynamic is None:
        yield Problem(
            ("compile", "dynamic"),
            "null compiles by the order in which batch sizes come, and a resume during an evaluation changes "
            "it: the run's weights would differ, which deterministic: true excludes",
            "write dynamic: false (all batches of a run have one size), or deterministic: false",
        )


def check_start(
    experiment: Experiment,
    ranks: int | None,
    ranks_per_node: int | None = None,
    fewest_ranks: int | None = None,
    found: int | None = None,
) -> list[Problem]:
    """Return the problems that prevent a start on this number of ranks (None: not known yet).

    ``ranks_per_node``: by default all ranks are on one node. ``fewest_ranks``: of a range of nodes, any of
    which a start may get. ``found``: the size that ``micro_batch_size: auto`` found in the run's first
    attempt; None before that.
    """
    is_auto = experiment.optimization.micro_batch_size == "auto"
    if is_auto and found is None and experiment.device == "cpu":
        return [auto_on_cpu()]
    if ranks is None:
        return []
    per_node = ranks_per_node or ranks
    possible = range(ranks, (fewest_ranks or ranks) - 1, -per_node)
    misfits = (_misfits(experiment, number, per_node, found) for number in possible)
    return next(filter(None, misfits), [])


def _misfits(experiment: Experiment, ranks: int, ranks_per_node: int, found: int | None) -> list[Problem]:
    degrees = find_degrees(experiment.parallel, ranks, ranks_per_node)
    if isinstance(degrees, Problem):
        return [degrees]
    if problems := problems_of_layers(experiment, degrees, ranks_per_node):
        return problems
    is_auto = experiment.optimization.micro_batch_size == "auto"
    if is_auto:  # the minimum that it may find
        experiment = experiment.with_micro_batch_size(found or 1)
    ranks_per_model = degrees.pipeline * degrees.tensor
    if problem := batch_arithmetic.too_few_micro_batches(
        experiment.micro_batches, degrees.data_ranks, ranks_per_model, is_auto=is_auto, found=found
    ):
        return [problem]
    if is_auto and found is None:
        return []
    slots = -(-experiment.micro_batches // degrees.data_ranks)
    if problem := problem_of_schedule(experiment.parallel, degrees.pipeline, slots):
        return [problem]
    if not experiment.parallel.sync_batchnorm:
        return []
    uneven = uneven_sync_batchnorm(experiment.micro_batches, degrees.data_ranks)
    return [] if uneven is None else [uneven]
