"""Checks ``data.args`` against a data set's section, or against a function's signature."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from hpc_train.errors import BadFileError
from hpc_train.experiment.config.explanations import args_problems
from hpc_train.experiment.config.fields import Section
from hpc_train.experiment.config.training_sections import DataConfig
from hpc_train.experiment.validate.part_rules import rest_not_taken
from hpc_train.paths import expanded

AnySection = TypeVar("AnySection", bound=Section)
_Result = TypeVar("_Result")


def parse_args(section: type[AnySection], config: DataConfig) -> AnySection:
    """Return ``data.args`` as a checked section. Raises BadFileError with one line per mistake."""
    if problems := args_problems(("data", "args"), config.name, section, config.args):
        raise BadFileError([str(problem) for problem in problems])
    return section.model_validate(config.args)


def root_of(config: DataConfig) -> Path:
    """Return the folder of a data set that needs one; not checked to exist."""
    assert config.root is not None, "DataFacts say that it is needed"
    return expanded(config.root)


def refuse_rest(config: DataConfig) -> None:
    """Raise BadFileError if a name has a part after the slash but its data set has no parts."""
    if problem := rest_not_taken(("data", "name"), config.name):
        raise problem.as_error()


def call(key: str, name: str, function: Callable[..., _Result], /, *positional: Any, **args: Any) -> _Result:
    """Call ``function``. Raises BadFileError for ``key`` if the arguments don't fit its signature."""
    try:
        inspect.signature(function).bind(*positional, **args)
    except TypeError as error:
        raise BadFileError(
            f"{key}: {name} can't be called with these arguments: {error}; "
            f"its signature is {name}{inspect.signature(function)}"
        ) from error
    except ValueError:  # the signature is unknown: the call itself reports errors
        pass
    return function(*positional, **args)
