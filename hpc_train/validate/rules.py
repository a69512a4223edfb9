"""Constraints between keys, and features that this version can't run yet.

Each rule names the keys that it reads. Rules on Slurm, on names of parts and on sweeps are in their own
modules; ``check`` applies all of them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import lru_cache
from itertools import islice

from hpc_train.config.problems import MAX_PROBLEMS, KeyPath, Problem, is_clean
from hpc_train.config.schema import Experiment
from hpc_train.data_facts.built_in import TASKS
from hpc_train.data_facts.by_name import target_of, task_facts
from hpc_train.data_facts.joint_keys import not_for_masks, only_for_masks
from hpc_train.errors import shortened
from hpc_train.registry import suggestion
from hpc_train.topology.batch_arithmetic import too_long_warmup, undivided_batch, undivided_repeats
from hpc_train.validate import (
    argument_rules,
    compatibility,
    data_rules,
    image_rules,
    layer_rules,
    loss_rules,
    part_rules,
    slurm_rules,
    smp_rules,
    start_rules,
    sweep_rules,
    tracking_uris,
)
from hpc_train.validate.base import Rule, rule

check_start = start_rules.check_start
#: The prefix of the averaged weights' metrics.
_EMA = "ema_"


def check(
    experiment: Experiment, failed: Collection[KeyPath] = (), *, check_names: bool = True
) -> list[Problem]:
    """Return the problems across keys. Rules that read a key of ``failed`` are skipped."""
    return [
        replace(problem, reads=each.reads)
        for each in _applicable(frozenset(failed), check_names)
        for problem in islice(each.find(experiment), MAX_PROBLEMS + 1)
    ]


@lru_cache(maxsize=8)
def _applicable(failed: frozenset[KeyPath], check_names: bool) -> list[Rule]:
    """Return the rules that read no key of ``failed``; the same ones for all runs of a sweep."""
    rules = (*RULES, *slurm_rules.RULES, *sweep_rules.RULES, *part_rules.RULES, *data_rules.RULES)
    rules += (*image_rules.RULES, *layer_rules.RULES, *loss_rules.RULES, *smp_rules.RULES)
    rules += (*compatibility.RULES, *tracking_uris.RULES, *argument_rules.RULES)
    if check_names:
        rules += (
            *part_rules.NAME_RULES,
            *smp_rules.NAME_RULES,
            *argument_rules.MODEL_RULES,
            *layer_rules.MODEL_RULES,
            *compatibility.MODEL_RULES,
            *image_rules.MODEL_RULES,
        )
    return [each for each in rules if each.can_judge(failed)]


@rule("optimization.epochs", "optimization.steps")
def length_is_given_once(experiment: Experiment) -> Iterator[Problem]:
    """Exactly one of ``epochs`` and ``steps`` must be given."""
    optimization = experiment.optimization
    if optimization.epochs is None and optimization.steps is None:
        remedy = "write epochs: 30 or steps: 12000"
        yield Problem(("optimization", "epochs"), "is missing, and so is optimization.steps", remedy)
    if optimization.epochs is not None and optimization.steps is not None:
        yield _beside(("optimization", "steps"), "optimization.epochs")


def _beside(path: KeyPath, other: str) -> Problem:
    return Problem(path, f"can't be combined with {other}", "keep one of the two")


@rule("optimization.global_batch_size", "optimization.micro_batch_size")
def micro_batches_divide_the_batch(experiment: Experiment) -> Iterator[Problem]:
    """``micro_batch_size`` must divide ``global_batch_size``."""
    batch, micro = experiment.optimization.global_batch_size, experiment.optimization.micro_batch_size
    if micro != "auto" and (problem := undivided_batch(batch, micro)):
        yield problem


@rule("data.augment.repeats", "optimization.global_batch_size")
def repeats_divide_the_batch(experiment: Experiment) -> Iterator[Problem]:
    """``data.augment.repeats`` must divide ``global_batch_size``."""
    if problem := undivided_repeats(
        experiment.optimization.global_batch_size, experiment.data.augment.repeats
    ):
        yield problem


@rule("data.augment.randaugment")
def timms_magnitudes_end_at_ten(experiment: Experiment) -> Iterator[Problem]:
    """``data.augment.randaugment.magnitude`` must be at most 10 with timm's operations."""
    given = experiment.data.augment.randaugment
    if given is not None and given.operations == "timm" and given.magnitude > 10:
        path = ("data", "augment", "randaugment", "magnitude")
        yield Problem(path, f"{given.magnitude} exceeds 10, the maximum of timm's operations", "write 9")


@rule("checkpoint.every_min", "checkpoint.every_steps")
def checkpoints_come_by_time_or_steps(experiment: Experiment) -> Iterator[Problem]:
    """``checkpoint.every_min`` excludes ``every_steps``."""
    if experiment.checkpoint.every_min is not None and experiment.checkpoint.every_steps is not None:
        yield _beside(("checkpoint", "every_steps"), "checkpoint.every_min")


@rule("evaluation.every_epochs", "evaluation.every_steps")
def evaluations_come_by_epochs_or_steps(experiment: Experiment) -> Iterator[Problem]:
    """``evaluation.every_epochs`` excludes ``every_steps``."""
    if experiment.evaluation.every_epochs is not None and experiment.evaluation.every_steps is not None:
        yield _beside(("evaluation", "every_steps"), "evaluation.every_epochs")


@rule("optimization.schedule.warmup_epochs", "optimization.schedule.warmup_steps")
def warmup_is_given_once(experiment: Experiment) -> Iterator[Problem]:
    """``warmup_epochs`` excludes ``warmup_steps``."""
    schedule = experiment.optimization.schedule
    if schedule.warmup_epochs is not None and schedule.warmup_steps is not None:
        yield _beside(("optimization", "schedule", "warmup_steps"), "optimization.schedule.warmup_epochs")


@rule(
    "optimization.epochs",
    "optimization.steps",
    "optimization.schedule.warmup_epochs",
    "optimization.schedule.warmup_steps",
)
def warmup_ends_before_the_run(experiment: Experiment) -> Iterator[Problem]:
    """The warm-up must be shorter than the run."""
    optimization = experiment.optimization
    for unit in ("epochs", "steps"):
        length, warmup = getattr(optimization, unit), getattr(optimization.schedule, f"warmup_{unit}")
        if length is None or warmup is None:
            continue
        if problem := too_long_warmup(optimization.schedule, warmup, length, unit):
            yield problem


@rule("data.augment.policy", "data.augment.randaugment")
def one_policy_augments(experiment: Experiment) -> Iterator[Problem]:
    """``policy`` and ``randaugment`` exclude each other."""
    augment = experiment.data.augment
    if augment.policy is not None and augment.randaugment is not None:
        path = ("data", "augment", "policy")
        yield Problem(path, "can't be combined with randaugment", "take one of the two out")


@rule("data.augment.random_resized_crop", "data.augment.crop_padding", "data.image_size")
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


@rule("data.augment.random_scale", "data.augment.random_resized_crop")
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


@rule("task", "data.augment", "data.image_size", "data.eval_size", "data.eval_crop")
def image_keys_fit_the_target(experiment: Experiment) -> Iterator[Problem]:
    """Masks and boxes move along with the image; keys that move only the image are refused with them."""
    task, data = TASKS.get(experiment.task), experiment.data
    if task is None:  # a plug-in's: the ranks find out
        return
    if not {"mask", "boxes"} & set(task.targets):
        if problem := only_for_masks(data):
            yield problem
        return
    if problem := not_for_masks(data):
        yield problem
    if data.eval_crop != 1.0:
        message = "crops images without their masks and boxes"
        yield Problem(("data", "eval_crop"), message, "take it out; whole images are evaluated")


@rule("data.normalize")
def normalization_has_equal_lengths(experiment: Experiment) -> Iterator[Problem]:
    """``mean`` and ``std`` must have one value per channel each."""
    normalize = experiment.data.normalize
    if normalize is None or normalize.from_weights:
        return
    if len(normalize.mean) != len(normalize.std):
        yield Problem(
            ("data", "normalize", "std"),
            f"has {len(normalize.std)} values and mean has {len(normalize.mean)}",
            "write one value per channel in both",
        )
    elif not normalize.mean:
        yield Problem(("data", "normalize", "mean"), "is empty", "write one value per channel")


@rule("data.normalize", "model.name", "model.pretrained", "model.init_from")
def weights_say_how_to_normalize(experiment: Experiment) -> Iterator[Problem]:
    """``normalize: weights`` needs pretrained weights that define it."""
    normalize, path = experiment.data.normalize, ("data", "normalize")
    if normalize is None or not normalize.from_weights:
        return
    if normalize.mean or normalize.std:
        yield Problem(path, "has mean or std in addition to from_weights", "write normalize: weights")
    elif not experiment.model.name.startswith(("timm/", "torchvision/", "smp/")):
        others = "only timm's, torchvision's and smp's do"
        message = f"weights of {experiment.model.name} define no mean and std ({others})"
        yield Problem(path, message, "write {mean: […], std: […]}")
    elif experiment.model.pretrained is False and experiment.model.init_from is None:
        message = "weights needs model.pretrained or model.init_from"
        yield Problem(path, message, "write model.pretrained: true, or a path")


@rule(
    "data.root",
    "data.cache",
    "data.stage",
    "model.pretrained",
    "model.init_from",
    "environment.python",
    "environment.container",
    "logging.wandb.tags",
)
def text_has_no_control_characters(experiment: Experiment) -> Iterator[Problem]:
    """Paths and text must not be empty or contain control characters."""
    wandb = experiment.logging.wandb
    texts: list[tuple[KeyPath, object]] = [
        (("data", "root"), experiment.data.root),
        (("data", "cache"), experiment.data.cache),
        (("data", "stage"), experiment.data.stage),
        (("model", "pretrained"), experiment.model.pretrained),
        (("model", "init_from"), experiment.model.init_from),
        (("environment", "python"), experiment.environment.python),
        (("environment", "container"), experiment.environment.container),
    ]
    texts += [(("logging", "wandb", "tags", i), tag) for i, tag in enumerate(wandb.tags if wandb else [])]
    for path, text in texts:
        if isinstance(text, str) and not is_clean(text):
            yield Problem(path, "has a control character or line break", "take it out")
        elif text == "":
            yield Problem(path, "is empty", "write a path, or take the key out")


@rule("checkpoint.best", "early_stopping", "optimization.ema")
def ema_metrics_need_an_average(experiment: Experiment) -> Iterator[Problem]:
    """Metrics with the prefix ``ema_`` need ``optimization.ema``."""
    for path, metric in _followed_metrics(experiment):
        if metric.startswith(_EMA) and experiment.optimization.ema is None:
            message = f"{metric} is a metric of the EMA weights, and there is no optimization.ema"
            yield Problem(path, message, f"write {metric.removeprefix(_EMA)}, or add optimization.ema")


@rule("early_stopping")
def early_stopping_has_a_limit(experiment: Experiment) -> Iterator[Problem]:
    """``early_stopping`` needs ``patience`` or ``median_after``."""
    stopping = experiment.early_stopping
    if stopping is not None and stopping.patience is None and stopping.median_after is None:
        yield Problem(("early_stopping", "patience"), "is missing", "write patience: 5, or median_after: 3")


@rule("task", "data.name", "data.args", "checkpoint.best", "early_stopping")
def followed_metrics_are_the_tasks(experiment: Experiment) -> Iterator[Problem]:
    """``checkpoint.best.metric`` and ``early_stopping.metric`` must be metrics of the task."""
    return _unknown_metrics(experiment, _followed_metrics(experiment))


@rule("task", "data.name", "data.args", "sweep.search")
def searched_metric_is_the_tasks(experiment: Experiment) -> Iterator[Problem]:
    """``sweep.search.metric`` must be a metric of the task, if it is one of evaluations."""
    search = experiment.sweep.search
    metric = "train/" if search is None else search.metric.removeprefix("val/")
    is_evaluated = not metric.startswith("train/")
    return _unknown_metrics(experiment, [(("sweep", "search", "metric"), metric)] if is_evaluated else [])


def _unknown_metrics(experiment: Experiment, metrics: Iterable[tuple[KeyPath, str]]) -> Iterator[Problem]:
    facts, target = task_facts(experiment.task), target_of(experiment.data)
    loss = experiment.optimization.loss
    if target == "classes" and loss is not None and loss.name == "cross_entropy":
        target = "class"  # the targets are shares of the classes, and the class with the largest is predicted
    known = facts.metrics_with(target)
    for path, metric in metrics:
        name = metric.removeprefix(_EMA)
        if known and not any(fnmatchcase(name, each) for each in known):
            message = f"{shortened(metric)} is not a metric of {experiment.task}"
            if name in facts.metrics:
                message += f" (target: {target})"
            whole = [each for each in known if not each.endswith("*")]
            names = ", ".join(each.replace("*", "<class>") for each in known)
            yield Problem(path, message, suggestion(name, whole, f"write one of {names}"))


def _followed_metrics(experiment: Experiment) -> Iterator[tuple[KeyPath, str]]:
    if (best := experiment.checkpoint.best) is not None:
        yield ("checkpoint", "best", "metric"), best.metric
    if (stopping := experiment.early_stopping) is not None:
        yield ("early_stopping", "metric"), stopping.metric


@rule("model.pretrained")
def weights_are_a_file(experiment: Experiment) -> Iterator[Problem]:
    """``model.pretrained`` must be true, false, or a file of a known format."""
    given = experiment.model.pretrained
    if isinstance(given, str) and given and not given.endswith((".safetensors", ".pth")):
        remedy = "write true, false, or a path with that extension"
        message = f"'{shortened(given)}' is not a path to a .safetensors or .pth file"
        yield Problem(("model", "pretrained"), message, remedy)


@rule("model.pretrained", "model.init_from")
def weights_come_from_one_place(experiment: Experiment) -> Iterator[Problem]:
    """A model starts from one set of weights."""
    if experiment.model.init_from is not None and experiment.model.pretrained is not False:
        yield Problem(("model", "init_from"), "has no effect beside model.pretrained", "take one of them out")


@rule("compile", "deterministic", "device")
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


RULES: tuple[Rule, ...] = (
    length_is_given_once,
    micro_batches_divide_the_batch,
    repeats_divide_the_batch,
    timms_magnitudes_end_at_ten,
    checkpoints_come_by_time_or_steps,
    evaluations_come_by_epochs_or_steps,
    warmup_is_given_once,
    warmup_ends_before_the_run,
    crops_fit_together,
    scales_fit_together,
    image_keys_fit_the_target,
    one_policy_augments,
    normalization_has_equal_lengths,
    weights_say_how_to_normalize,
    text_has_no_control_characters,
    weights_are_a_file,
    ema_metrics_need_an_average,
    early_stopping_has_a_limit,
    followed_metrics_are_the_tasks,
    searched_metric_is_the_tasks,
    weights_come_from_one_place,
    compiled_code_is_the_same_after_a_resume,
)
