"""Whether the model and ``data.normalize`` suit the channels of the images, for data sets whose facts have
their number. For others ``prepare`` and the ranks find out.
"""

from __future__ import annotations

from collections.abc import Iterator

from hpc_train.config.problems import Problem, Rule, rule
from hpc_train.config.schema import Experiment
from hpc_train.data_facts import channels
from hpc_train.data_facts.facts import TASKS, data_facts
from hpc_train.registry import split_name


@rule("model.name", "data.name", "data.args")
def model_takes_the_channels(experiment: Experiment) -> Iterator[Problem]:
    """torchvision's models take gray and color images only."""
    number = _number(experiment)
    if number is not None and (problem := channels.model_problem(experiment.model.name, number)):
        yield problem


@rule("model.name", "model.args", "data.name", "data.args", "task")
def in_chans_is_that_of_the_data(experiment: Experiment) -> Iterator[Problem]:
    """``in_chans`` of timm's models must be the number of channels of the data."""
    number, model = _number(experiment), experiment.model
    # A task of the user's may give the model other channels.
    if number is None or split_name(model.name)[0] != "timm" or experiment.task not in TASKS:
        return
    if model.args.get("in_chans", number) != number:
        message = f"{model.args['in_chans']} channels, and the images of {experiment.data.name} have {number}"
        yield Problem(("model", "args", "in_chans"), message, "take it out; it follows from the data")


@rule("data.name", "data.args", "data.normalize")
def normalization_has_a_value_per_channel(experiment: Experiment) -> Iterator[Problem]:
    """``data.normalize`` must have one value per channel of the images."""
    number, normalize = _number(experiment), experiment.data.normalize
    if number is None or normalize is None or normalize.from_weights:
        return
    if len(normalize.mean) != len(normalize.std):
        return  # a rule of its own
    for key, values in (("mean", normalize.mean), ("std", normalize.std)):
        if values and (problem := channels.normalize_problem(key, values, number)):
            yield problem


def _number(experiment: Experiment) -> int | None:
    return data_facts(experiment.data.name).channels(experiment.data)


RULES: tuple[Rule, ...] = (
    model_takes_the_channels,
    in_chans_is_that_of_the_data,
    normalization_has_a_value_per_channel,
)
