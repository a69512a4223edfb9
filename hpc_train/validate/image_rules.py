"""Whether the model takes images of their size and channels, and ``data.normalize`` has as many values.

Checked if the file or the facts of the data set give the size or the number of channels; for others
``prepare`` and the ranks find out.
"""

from __future__ import annotations

from collections.abc import Iterator

from hpc_train.config.problems import KeyPath, Problem
from hpc_train.config.schema import Experiment
from hpc_train.data_facts import channels
from hpc_train.data_facts.built_in import TASKS
from hpc_train.data_facts.by_name import data_facts
from hpc_train.errors import shortened
from hpc_train.registry import split_name
from hpc_train.validate import model_facts
from hpc_train.validate.base import Rule, rule
from hpc_train.validate.smp_rules import is_smp

_IMAGE_SIZE: KeyPath = ("data", "image_size")
#: As that of ``data.image_size``.
_MAX_SIZE = 8192


@rule("model.name", "model.args", "data.name", "data.image_size", "data.eval_size", "data.args", "task")
def images_fit_the_model(experiment: Experiment) -> Iterator[Problem]:
    """The model must accept images of the size in the file, or of the data set's own.

    A child process runs the forward of a model of timm, torchvision or smp on the meta device.
    """
    if not model_facts.is_listed(experiment.model.name):
        return
    key = _key_of_size(experiment)
    size = _own_size(experiment) if key is None else _written_size(experiment, key)
    if size is not None and (problem := _size_problem(experiment, key, size)):
        yield problem
    # Models of other providers for masks take any size.
    sides = experiment.data.eval_height_and_width if experiment.data.eval_size is not None else None
    if sides is None or not is_smp(experiment.model.name):
        return
    if problem := _size_problem(experiment, ("data", "eval_size"), _square_or_sides(sides)):
        yield problem


def _size_problem(experiment: Experiment, key: KeyPath | None, size: int | list[int]) -> Problem | None:
    """Return the problem with the size under ``key``; None as key: that of the data set."""
    model = experiment.model
    answer = model_facts.facts(model.name, model.args, image_size=size)
    refusal, fitting = answer.get("size_refusal"), answer.get("fitting_size")
    if not isinstance(refusal, str) or not isinstance(fitting, (int, list)):
        return None
    name, why = shortened(model.name), shortened(refusal).rstrip(".")
    sides = f"{size}×{size}" if isinstance(size, int) else "×".join(map(str, size))
    message = f"{name} can't take images of {sides} ({why})"
    if key is None:
        data = shortened(experiment.data.name)
        message = f"is missing, and {name} can't take the {sides} images of {data} ({why})"
    or_argument = f", or model.args: {{img_size: {size}}}" if answer.get("takes_img_size") is True else ""
    return Problem(key or _IMAGE_SIZE, message, f"write {shortened(str(fitting))}{or_argument}")


def _key_of_size(experiment: Experiment) -> KeyPath | None:
    """Return the key of the file that sets the image size; None if the data set's own size counts."""
    data = experiment.data
    if data.image_size is not None:
        return _IMAGE_SIZE
    argument = data_facts(data.name).image_size_argument
    return None if argument is None or argument not in data.args else ("data", "args", argument)


def _written_size(experiment: Experiment, key: KeyPath) -> int | list[int] | None:
    data = experiment.data
    if key == _IMAGE_SIZE and is_smp(experiment.model.name) and data.height_and_width is not None:
        return _square_or_sides(data.height_and_width)
    size = data.image_size if key == _IMAGE_SIZE else data.args[str(key[-1])]
    return size if type(size) is int and 0 < size <= _MAX_SIZE else None


def _square_or_sides(sides: tuple[int, int]) -> int | list[int]:
    height, width = sides
    return height if height == width else [height, width]


def _own_size(experiment: Experiment) -> int | None:
    # A task of the user's may resize the images before the model takes them.
    return data_facts(experiment.data.name).image_size(experiment.data) if experiment.task in TASKS else None


@rule("model.name", "data.name", "data.args")
def model_takes_the_channels(experiment: Experiment) -> Iterator[Problem]:
    """torchvision's models take gray and color images only."""
    number = _num_channels(experiment)
    if number is not None and (problem := channels.model_problem(experiment.model.name, number)):
        yield problem


@rule("model.name", "model.args", "data.name", "data.args", "task")
def in_chans_is_that_of_the_data(experiment: Experiment) -> Iterator[Problem]:
    """``in_chans`` of timm's models must be the number of channels of the data."""
    number, model = _num_channels(experiment), experiment.model
    # A task of the user's may give the model other channels.
    if number is None or split_name(model.name)[0] != "timm" or experiment.task not in TASKS:
        return
    if model.args.get("in_chans", number) != number:
        message = f"{model.args['in_chans']} channels, and the images of {experiment.data.name} have {number}"
        yield Problem(("model", "args", "in_chans"), message, "take it out; it follows from the data")


@rule("data.name", "data.args", "data.normalize")
def normalization_has_a_value_per_channel(experiment: Experiment) -> Iterator[Problem]:
    """``data.normalize`` must have one value per channel of the images."""
    number, normalize = _num_channels(experiment), experiment.data.normalize
    if number is None or normalize is None or normalize.from_weights:
        return
    if len(normalize.mean) != len(normalize.std):
        return  # a rule of its own
    for key, values in (("mean", normalize.mean), ("std", normalize.std)):
        if values and (problem := channels.normalize_problem(key, values, number)):
            yield problem


def _num_channels(experiment: Experiment) -> int | None:
    return data_facts(experiment.data.name).channels(experiment.data)


RULES: tuple[Rule, ...] = (
    model_takes_the_channels,
    in_chans_is_that_of_the_data,
    normalization_has_a_value_per_channel,
)
#: May start a child process.
MODEL_RULES: tuple[Rule, ...] = (images_fit_the_model,)
