"""Rules on text: which task, data and model go together, and which keys are for images alone.

Only parts of this suite are judged; of a plug-in's the worker finds out.
"""

from __future__ import annotations

from collections.abc import Iterator

from hpc_train.config.problems import KeyPath, Problem, Rule, rule, shortened
from hpc_train.config.schema import Experiment
from hpc_train.config.training_sections import AugmentConfig
from hpc_train.registry import is_factory, split_name

_TEXT_DATASETS = ("text",)
_IMAGE_DATASETS = ("digits", "imagefolder", "synthetic", "torchvision")
_TEXT_MODELS = ("gpt",)
_IMAGE_MODELS = ("timm", "torchvision")
_REMEDY = "take it out; it is for images"


def _provider(name: str) -> str:
    return "" if is_factory(name) else split_name(name)[0]


def _reads_text(experiment: Experiment) -> bool:
    return _provider(experiment.data.name) in _TEXT_DATASETS


@rule("task", "data.name")
def task_fits_the_data(experiment: Experiment) -> Iterator[Problem]:
    task, data = experiment.task, experiment.data.name
    if task == "classification" and _reads_text(experiment):
        message = f"classification reads samples of one class each, and data set {shortened(data)} has none"
        yield Problem(("task",), message, "write causal_lm")
    if task == "causal_lm" and _provider(data) in _IMAGE_DATASETS:
        message = f"causal_lm reads sequences of tokens, and {shortened(data)} has images"
        yield Problem(("task",), message, "write classification, or data.name: text")


@rule("model.name", "data.name")
def model_fits_the_data(experiment: Experiment) -> Iterator[Problem]:
    model, data, path = experiment.model.name, experiment.data.name, ("model", "name")
    if _provider(model) in _IMAGE_MODELS and _reads_text(experiment):
        yield Problem(path, f"{shortened(model)} reads images, and {shortened(data)} has tokens", "write gpt")
    if _provider(model) in _TEXT_MODELS and _provider(data) in _IMAGE_DATASETS:
        message = f"{shortened(model)} reads tokens, and {shortened(data)} has images"
        yield Problem(path, message, "write data.name: text, or another model, like timm/resnet50")


@rule("model.name")
def gpt_stands_alone(experiment: Experiment) -> Iterator[Problem]:
    name = experiment.model.name
    if _provider(name) in _TEXT_MODELS and "/" in name:
        yield Problem(("model", "name"), f"{_provider(name)} takes nothing behind it", "write gpt")


@rule(
    "data.name",
    "data.augment",
    "data.image_size",
    "data.eval_crop",
    "data.interpolation",
    "data.normalize",
    "model.channels_last",
)
def text_has_no_keys_of_images(experiment: Experiment) -> Iterator[Problem]:
    if not _reads_text(experiment):
        return
    data = experiment.data
    given: dict[KeyPath, bool] = {
        ("data", "augment"): data.augment != AugmentConfig(),
        ("data", "image_size"): data.image_size is not None,
        ("data", "eval_crop"): data.eval_crop != 1.0,
        ("data", "interpolation"): data.interpolation != "bilinear",
        ("data", "normalize"): data.normalize is not None,
        ("model", "channels_last"): experiment.model.channels_last,
    }
    for path, is_given in given.items():
        if is_given:
            yield Problem(path, "means nothing to text", _REMEDY, on_key=True)


RULES: tuple[Rule, ...] = (
    task_fits_the_data,
    model_fits_the_data,
    gpt_stands_alone,
    text_has_no_keys_of_images,
)
