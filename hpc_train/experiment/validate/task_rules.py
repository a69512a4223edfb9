"""Rules on the task with its losses and metrics, and on the data and the model that fit it.

Of parts, only built-in ones are checked; for plug-ins the ranks find out. Also remarks on modes that are
probably not intended.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase

from hpc_train.errors import counted, shortened
from hpc_train.experiment.config.explanations import args_problems
from hpc_train.experiment.config.problems import KeyPath, Problem
from hpc_train.experiment.config.schema import Experiment
from hpc_train.experiment.config.synonyms import usual_mode, value_for
from hpc_train.experiment.data_facts.built_in import TASKS
from hpc_train.experiment.data_facts.by_name import (
    data_facts,
    provider_facts,
    target_of,
    task_facts,
    task_misfit,
)
from hpc_train.experiment.data_facts.facts import DiceArgs, Losses, Modality
from hpc_train.experiment.data_facts.image_facts import KEYS_OF_IMAGE_FILES, changed_keys, is_detector
from hpc_train.experiment.validate.base import rule
from hpc_train.experiment.validate.part_rules import own_arguments, rest_not_taken
from hpc_train.paths import expanded
from hpc_train.registry import suggestion

_LOSS = ("optimization", "loss")
#: The prefix of the averaged weights' metrics.
_EMA = "ema_"


@rule("loss.unknown", "task", "optimization.loss")
def the_task_has_the_loss(experiment: Experiment) -> Iterator[Problem]:
    """``optimization.loss`` must be one of the task's, with arguments that it takes."""
    losses, loss = task_facts(experiment.task).losses, experiment.optimization.loss
    if losses is None or loss is None:
        return
    if loss.name not in losses:
        yield _unknown_loss(experiment.task, loss.name, losses)
        return
    yield from args_problems((*_LOSS, "args"), loss.name, losses[loss.name], loss.args)


def _unknown_loss(task: str, name: str, losses: Losses) -> Problem:
    meant = value_for((*_LOSS, "name"), name)
    remedy = suggestion(name, losses, f"write {next(iter(losses))}" if losses else "take it out")
    remedy = f"write {meant}" if meant in losses else remedy
    list_of_losses = f" (it has {', '.join(losses)})" if losses else ""
    return Problem((*_LOSS, "name"), f"{task} has no loss '{shortened(name)}'{list_of_losses}", remedy)


@rule("loss.class-values", "task", "optimization.loss", "model.args", "data.name", "data.args")
def the_loss_has_a_value_per_class(experiment: Experiment) -> Iterator[Problem]:
    """Lists of values per class must have as many as there are classes."""
    data, loss = experiment.data, experiment.optimization.loss
    classes = experiment.model.args.get("num_classes", data_facts(data.name).num_classes(data))
    if loss is None or type(classes) is not int or task_facts(experiment.task).losses is None:
        return
    for name in ("class_weights", "pos_weight"):
        values = loss.args.get(name)
        if not isinstance(values, list) or any(type(value) not in (int, float) for value in values):
            continue  # a rule of its own
        if len(values) not in (0, classes):
            message = f"has {counted(len(values), 'value')} for {classes} classes"
            remedy = "take it out, or write a value per class"
            yield Problem((*_LOSS, "args", name), message, remedy, on_key=True)


@rule("loss.smoothing-classes", "task", "optimization.label_smoothing")
def smoothing_needs_classes(experiment: Experiment) -> Iterator[Problem]:
    """Label smoothing needs a task with classes."""
    if experiment.optimization.label_smoothing > 0 and task_facts(experiment.task).smooths_labels is False:
        message = f"spreads targets over classes, which {experiment.task} does not have"
        yield Problem(("optimization", "label_smoothing"), message, "take it out", on_key=True)


@rule("loss.smoothing-dice", "task", "optimization.loss", "optimization.label_smoothing")
def smoothing_needs_cross_entropy(experiment: Experiment) -> Iterator[Problem]:
    """Label smoothing changes the cross entropy, which ``dice`` alone does not have."""
    losses, loss = task_facts(experiment.task).losses, experiment.optimization.loss
    if experiment.optimization.label_smoothing == 0 or losses is None or loss is None:
        return
    if losses.get(loss.name) is DiceArgs and loss.args.get("cross_entropy", 0) == 0:
        message = "has no effect on dice, which has no cross entropy"
        remedy = "take it out, or write optimization.loss: {name: dice, args: {cross_entropy: 1}}"
        yield Problem(("optimization", "label_smoothing"), message, remedy, on_key=True)


@rule("loss.mixing", "task data.name optimization.mixup optimization.cutmix optimization.micro_batch_size")
def samples_can_be_mixed(experiment: Experiment) -> Iterator[Problem]:
    """mixup and CutMix need a task with soft targets, and pairs of samples in a micro-batch."""
    optimization = experiment.optimization
    for key in ("mixup", "cutmix"):
        if getattr(optimization, key) == 0:
            continue
        path, modality = ("optimization", key), data_facts(experiment.data.name).modality
        if task_facts(experiment.task).mixes_targets is False:
            message = f"mixes targets, which {experiment.task} can't"
            yield Problem(path, message, "take it out", on_key=True)
        elif key == "cutmix" and modality not in ("images", None):
            message = f"cuts out parts of images, and {shortened(experiment.data.name)} has {modality}"
            yield Problem(path, message, "take it out, or write mixup", on_key=True)
        elif optimization.micro_batch_size == 1:
            message = "mixes the samples of a micro-batch, which has one"
            yield Problem(path, message, "write a larger optimization.micro_batch_size", on_key=True)
        elif optimization.micro_batch_size == "auto":
            message = "mixes the samples of a micro-batch, and auto would make its size depend on memory"
            yield Problem(path, message, "write a number for optimization.micro_batch_size", on_key=True)


@rule("metric.without-ema", "checkpoint.best", "early_stopping", "optimization.ema")
def ema_metrics_need_an_average(experiment: Experiment) -> Iterator[Problem]:
    """Metrics with the prefix ``ema_`` need ``optimization.ema``."""
    for path, metric in _followed_metrics(experiment):
        if metric.startswith(_EMA) and experiment.optimization.ema is None:
            message = f"{metric} is a metric of the EMA weights, and there is no optimization.ema"
            yield Problem(path, message, f"write {metric.removeprefix(_EMA)}, or add optimization.ema")


@rule("early-stopping.unlimited", "early_stopping")
def early_stopping_has_a_limit(experiment: Experiment) -> Iterator[Problem]:
    """``early_stopping`` needs ``patience`` or ``median_after``."""
    stopping = experiment.early_stopping
    if stopping is not None and stopping.patience is None and stopping.median_after is None:
        yield Problem(("early_stopping", "patience"), "is missing", "write patience: 5, or median_after: 3")


@rule("metric.unknown", "task", "data.name", "data.args", "checkpoint.best", "early_stopping")
def followed_metrics_are_the_tasks(experiment: Experiment) -> Iterator[Problem]:
    """``checkpoint.best.metric`` and ``early_stopping.metric`` must be metrics of the task."""
    return _unknown_metrics(experiment, _followed_metrics(experiment))


@rule("sweep.unknown-metric", "task", "data.name", "data.args", "sweep.search")
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
    metric_patterns = facts.metrics_with(target)
    for path, metric in metrics:
        name = metric.removeprefix(_EMA)
        if metric_patterns and not any(fnmatchcase(name, pattern) for pattern in metric_patterns):
            message = f"{shortened(metric)} is not a metric of {experiment.task}"
            if name in facts.metrics:
                message += f" (target: {target})"
            whole = [pattern for pattern in metric_patterns if not pattern.endswith("*")]
            names = ", ".join(pattern.replace("*", "<class>") for pattern in metric_patterns)
            meant = value_for(path, name)
            remedy = suggestion(name, whole, f"write one of {names}")
            yield Problem(path, message, f"write {meant}" if meant in whole else remedy)


def _followed_metrics(experiment: Experiment) -> Iterator[tuple[KeyPath, str]]:
    for path, metric, _ in _modes(experiment):
        if path[0] != "sweep":
            yield (*path, "metric"), metric


def remarks(experiment: Experiment) -> Iterator[Problem]:
    """Yield remarks on each ``mode`` for which a worse value of the task's metric is better."""
    metrics = task_facts(experiment.task).metrics
    for path, metric, mode in _modes(experiment):
        name = metric.rpartition("/")[2].removeprefix("ema_")
        # The task's own metric names: a class may be called error.
        usual = next((usual_mode(pattern) for pattern in metrics if fnmatchcase(name, pattern)), None)
        if usual is not None and mode != usual:
            lower = "lower" if mode == "min" else "higher"
            message = f"{mode} takes a {lower} {metric} for the better one"
            remedy = f"write {usual}, unless that is what you want"
            yield Problem((*path, "mode"), message, remedy, code="metric.mode")


def _modes(experiment: Experiment) -> Iterator[tuple[KeyPath, str, str]]:
    """Yield the sections that look for the best value of a metric, with the metric and its mode."""
    if (best := experiment.checkpoint.best) is not None:
        yield ("checkpoint", "best"), best.metric, best.mode
    if (stopping := experiment.early_stopping) is not None:
        yield ("early_stopping",), stopping.metric, stopping.mode
    if (search := experiment.sweep.search) is not None:
        yield ("sweep", "search"), search.metric, search.mode


_ARGS: KeyPath = ("data", "args")


def _modality(experiment: Experiment) -> Modality | None:
    return data_facts(experiment.data.name).modality


@rule("task.data", "task", "data.name")
def task_fits_the_data(experiment: Experiment) -> Iterator[Problem]:
    """The task must be able to read the inputs and targets of the data set."""
    data = experiment.data.name
    if misfit := task_misfit(experiment.task, shortened(data), data_facts(data)):
        yield Problem(("task",), *misfit)


@rule("model.data", "model.name", "data.name")
def model_fits_the_data(experiment: Experiment) -> Iterator[Problem]:
    """``gpt`` needs text; models of timm, torchvision and smp need images."""
    model, data, path = experiment.model.name, experiment.data.name, ("model", "name")
    modalities = provider_facts(model).modality, _modality(experiment)
    if modalities == ("images", "tokens"):
        yield Problem(path, f"{shortened(model)} reads images, and {shortened(data)} has tokens", "write gpt")
    if modalities == ("tokens", "images"):
        yield needs_tokens(shortened(model), shortened(data))


@rule("task.detector", "task", "model.name")
def detectors_are_for_detection(experiment: Experiment) -> Iterator[Problem]:
    """Detection needs a detector; other built-in tasks can't use a detector's outputs."""
    task, model = experiment.task, experiment.model.name
    if task not in TASKS:
        return
    takes_targets, name = task_facts(task).needs_whole_model, shortened(model)
    if takes_targets and provider_facts(model).modality is not None and not is_detector(model):
        remedy = "write a detector, like torchvision/fasterrcnn_resnet50_fpn_v2"
        yield Problem(("model", "name"), f"{name} returns no boxes, and {task} needs them", remedy)
    if is_detector(model) and not takes_targets:
        yield Problem(("task",), f"{task} can't use {name}, which returns boxes", "write detection")


def needs_tokens(model: str, data: str) -> Problem:
    """Return the problem with images for a model of tokens. Ranks check this, too."""
    message = f"{model} reads tokens, and {data} has images"
    return Problem(("model", "name"), message, "write data.name: text, or another model, like timm/resnet50")


@rule("model.gpt-suffix", "model.name")
def gpt_stands_alone(experiment: Experiment) -> Problem | None:
    """``gpt`` and ``text`` take no name after a slash."""
    name = experiment.model.name
    return rest_not_taken(("model", "name"), name) if provider_facts(name).modality == "tokens" else None


_KEYS_OF_IMAGES = ("transform", "augment", "image_size", "eval_crop", "interpolation", "normalize")


@rule(
    "data.not-for-text",
    "data.name",
    *(f"data.{key}" for key in (*_KEYS_OF_IMAGES, *KEYS_OF_IMAGE_FILES)),
    "model.channels_last",
)
def text_has_no_keys_of_images(experiment: Experiment) -> Iterator[Problem]:
    """Image settings do not apply to text."""
    if _modality(experiment) != "tokens":
        return
    data = experiment.data
    paths = [("data", key) for key in changed_keys(data, (*_KEYS_OF_IMAGES, *KEYS_OF_IMAGE_FILES))]
    paths += [("model", "channels_last")] if experiment.model.channels_last else []
    for path in paths:
        yield Problem(
            path, f"does not apply to {shortened(data.name)}", "take it out; it is for images", on_key=True
        )


@rule("data.value-range", "data.value_range")
def value_range_ascends(experiment: Experiment) -> Iterator[Problem]:
    """The value of black must be below that of white."""
    value_range = experiment.data.value_range
    if value_range is not None and value_range[0] >= value_range[1]:
        message = f"{list(value_range)} is empty, since black must be below white"
        yield Problem(("data", "value_range"), message, "write [black, white], such as [0, 4095]")


@rule("data.cache", "data.name", "data.cache")
def only_image_folders_are_packed(experiment: Experiment) -> Iterator[Problem]:
    """``data.cache`` is for image folders, and is a folder itself."""
    data, path = experiment.data, ("data", "cache")
    if data.cache is None:
        return
    facts = data_facts(data.name)
    if not facts.is_packable and facts.index is None:
        message = f"packs image folders, and {shortened(data.name)} is not one"
        yield Problem(path, message, "take it out, or write data.name: imagefolder", on_key=True)
    elif expanded(data.cache).is_file():
        yield Problem(path, f"{shortened(data.cache)} is a file", "write a folder; prepare creates it")


@rule("data.cache-pixels", "data.cache", "data.cache_pixels")
def only_packs_have_pixels(experiment: Experiment) -> Iterator[Problem]:
    """``data.cache_pixels`` is about the pack of ``data.cache``, and needs one."""
    data, is_packable = experiment.data, data_facts(experiment.data.name).is_packable
    if data.cache_pixels and (data.cache is None or not is_packable):
        message = "says what the packed file of data.cache contains, and there is none"
        remedy = "write data.cache too, or take it out" if is_packable else "take it out"
        yield Problem(("data", "cache_pixels"), message, remedy, on_key=True)


@rule("data.stage", "data.cache", "data.stage")
def only_packs_are_staged(experiment: Experiment) -> Iterator[Problem]:
    """``data.stage`` copies the pack of ``data.cache``."""
    data = experiment.data
    if data.stage is False:
        return
    facts = data_facts(data.name)
    if facts.listing is not None or facts.index is not None:
        message = f"copies a packed image folder, and {shortened(data.name)} is not one"
        yield Problem(("data", "stage"), message, "take it out", on_key=True)
    elif data.cache is None:
        message = "copies the packed file of data.cache, and there is none"
        yield Problem(("data", "stage"), message, "write data.cache too, or take it out", on_key=True)


@rule("data.arguments", "data.name", "data.args")
def the_data_set_takes_its_arguments(experiment: Experiment) -> Iterator[Problem]:
    """``data.args`` must be those of the data set."""
    data = experiment.data
    section = data_facts(data.name).args
    if section is not None:
        args = own_arguments(_ARGS, data.args)
        yield from args_problems(_ARGS, data.name, section, args)
