"""Rules on text: which task, data and model work together, and which keys are for images only.

Only built-in parts are checked; for plug-ins the ranks find out.
"""

from __future__ import annotations

from collections.abc import Iterator

from hpc_train.errors import shortened
from hpc_train.experiment.config.explanations import args_problems
from hpc_train.experiment.config.problems import KeyPath, Problem
from hpc_train.experiment.config.schema import Experiment
from hpc_train.experiment.data_facts.built_in import TASKS
from hpc_train.experiment.data_facts.by_name import data_facts, task_facts, task_misfit
from hpc_train.experiment.data_facts.facts import Modality
from hpc_train.experiment.data_facts.image_facts import KEYS_OF_IMAGE_FILES, changed_keys, is_detector
from hpc_train.experiment.validate.base import rule
from hpc_train.experiment.validate.part_rules import own_arguments, rest_not_taken
from hpc_train.paths import expanded
from hpc_train.registry import is_factory, split_name

_TEXT_MODELS = ("gpt",)
_IMAGE_MODELS = ("timm", "torchvision", "smp")
_ARGS: KeyPath = ("data", "args")


def _provider(name: str) -> str:
    return "" if is_factory(name) else split_name(name)[0]


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
    if _provider(model) in _IMAGE_MODELS and _modality(experiment) == "tokens":
        yield Problem(path, f"{shortened(model)} reads images, and {shortened(data)} has tokens", "write gpt")
    if _provider(model) in _TEXT_MODELS and _modality(experiment) == "images":
        yield needs_tokens(shortened(model), shortened(data))


@rule("task.detector", "task", "model.name")
def detectors_are_for_detection(experiment: Experiment) -> Iterator[Problem]:
    """Detection needs a detector; other built-in tasks can't use a detector's outputs."""
    task, model = experiment.task, experiment.model.name
    if task not in TASKS:
        return
    takes_targets, name = task_facts(task).needs_whole_model, shortened(model)
    if takes_targets and _provider(model) in (*_IMAGE_MODELS, *_TEXT_MODELS) and not is_detector(model):
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
    return rest_not_taken(("model", "name"), name) if _provider(name) in _TEXT_MODELS else None


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
