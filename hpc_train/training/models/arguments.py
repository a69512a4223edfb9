"""The arguments in ``model.args``, and the errors for invalid ones. Used by every model plug-in."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable

from hpc_train.errors import BadFileError
from hpc_train.experiment.config import problems
from hpc_train.experiment.config.fields import Arguments
from hpc_train.experiment.config.training_sections import ModelConfig

_UNEXPECTED = re.compile(r"unexpected keyword argument '(\w+)'")


def parameter_names(function: Callable[..., object]) -> list[str]:
    """Return the names that ``function`` (or a class's constructor) takes by keyword."""
    by_keyword = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [name for name, p in inspect.signature(function).parameters.items() if p.kind in by_keyword]


def takes(function: Callable[..., object], name: str) -> bool:
    """Return True if ``function`` takes a keyword argument ``name``, directly or through ``**kwargs``."""
    parameters = inspect.signature(function).parameters.values()
    return name in parameter_names(function) or any(p.kind is p.VAR_KEYWORD for p in parameters)


class UnknownArgumentError(BadFileError):
    """The model takes no argument of this name."""


def unknown_argument(config: ModelConfig, name: str, available: Iterable[str]) -> UnknownArgumentError:
    """Return the error for an argument that ``model.name`` does not take."""
    names = sorted(set(available) - {"self", "num_classes", "weights", "progress"})
    return UnknownArgumentError(
        str(problems.unknown_argument_problem(("model", "args"), config.name, name, names))
    )


def wrong_arguments(config: ModelConfig, error: Exception, names: Callable[[], Iterable[str]]) -> Exception:
    """Return ``error``, raised while building, as a BadFileError; unchanged if ``args`` are empty.

    ``names`` is called for the available arguments only if one is unknown.
    """
    args: Arguments = config.args
    match = _UNEXPECTED.search(str(error))
    if match and match[1] in args:
        return unknown_argument(config, match[1], names())
    if not args:
        return error
    return BadFileError(
        f"model.args: {config.name} can't be built with {args}: {type(error).__name__}: {error}; "
        "fix or omit the argument"
    )
