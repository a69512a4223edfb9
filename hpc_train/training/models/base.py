"""The protocol of a model plug-in, and the errors for invalid arguments in ``model.args``."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable
from typing import NamedTuple, Protocol

from torch import nn

from hpc_train.errors import BadFileError
from hpc_train.experiment.config import problems
from hpc_train.experiment.config.fields import Arguments
from hpc_train.experiment.config.training_sections import ModelConfig
from hpc_train.training.datasets.types import DataInfo


class ModelBuilder(Protocol):
    """The plug-in itself: a function."""

    def __call__(self, rest: str, config: ModelConfig, info: DataInfo, *, download: bool) -> nn.Module:
        """Return the model on the CPU in float32; ``rest`` is the part of the name after ``provider/``.

        Weights are random, drawn from torch's default generator (seeded by the caller), or, with
        ``config.pretrained``, loaded and the head replaced for ``info.num_classes``. ``download`` is true
        only in ``hpc-train prepare``. Raises BadFileError, starting with a key path (``model.args: …; …``).
        """


class Preprocessing(NamedTuple):
    """How images were prepared when a model's pretrained weights were trained."""

    #: One value per channel, for pixels in [0, 1].
    mean: list[float]
    std: list[float]
    #: None if the weights were not trained on images cropped this way: the file's value applies.
    interpolation: str | None = None
    eval_crop: float | None = None


class WeightsPreprocessing(Protocol):
    """A provider's function for ``data.normalize: weights``."""

    def __call__(self, rest: str, config: ModelConfig, *, download: bool) -> Preprocessing:
        """Return the preprocessing of the model's pretrained weights; use the network only with ``download``.

        Raises BadFileError if there are no such weights, or if they define none that is supported.
        """


def no_preprocessing(problem: str) -> BadFileError:
    """Return the error for pretrained weights that define no supported preprocessing."""
    return BadFileError(f"data.normalize: {problem}; write {{mean: […], std: […]}}")


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


def no_weights(whose: str, reason: object) -> BadFileError:
    """Return the error for weights of a hub that can't be fetched or are not cached."""
    return BadFileError(
        f"model.pretrained: the weights of {whose} are not available: {reason}; "
        "run `hpc-train prepare FILE` on a machine with network, or give a path"
    )
