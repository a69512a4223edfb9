"""Rules on ``model.args`` and ``data.args``: a part must accept the arguments in the file.

The user's own parts are checked when they are called, by ``prepare`` and the ranks.
"""

from __future__ import annotations

from collections.abc import Iterator

from hpc_train.config.problems import KeyPath, Problem
from hpc_train.config.schema import Experiment
from hpc_train.config.section_args import args_problems
from hpc_train.data_facts.by_name import data_facts
from hpc_train.validate import gpt_args, model_facts
from hpc_train.validate.base import Rule, rule
from hpc_train.validate.part_rules import own_arguments

_DATA_ARGS: KeyPath = ("data", "args")
_MODEL_ARGS: KeyPath = ("model", "args")


@rule("data.name", "data.args")
def the_data_set_takes_its_arguments(experiment: Experiment) -> Iterator[Problem]:
    """``data.args`` must be those of the data set."""
    data = experiment.data
    section = data_facts(data.name).args
    if section is not None:
        args = own_arguments(_DATA_ARGS, data.args)
        yield from args_problems(_DATA_ARGS, data.name, section, args)


@rule("model.name", "model.args")
def gpt_takes_its_arguments(experiment: Experiment) -> Iterator[Problem]:
    """``model.args`` must be those of ``gpt``, and its heads must divide its width."""
    model = experiment.model
    if model.name == "gpt":
        yield from gpt_args.args_problems(own_arguments(_MODEL_ARGS, model.args))


@rule("model.name", "model.args")
def the_model_takes_its_arguments(experiment: Experiment) -> Iterator[Problem]:
    """``model.args`` must be those of the model of timm, torchvision or smp; a child process builds it."""
    model = experiment.model
    args = own_arguments(_MODEL_ARGS, model.args)
    if args and model_facts.is_listed(model.name):
        refusal = model_facts.args_refusal(model.name, args)
        if refusal is not None:
            message, _, remedy = refusal.removeprefix("model.args: ").rpartition("; ")
            yield Problem(_MODEL_ARGS, message, remedy)


RULES: tuple[Rule, ...] = (the_data_set_takes_its_arguments, gpt_takes_its_arguments)
#: May start a child process.
MODEL_RULES: tuple[Rule, ...] = (the_model_takes_its_arguments,)
