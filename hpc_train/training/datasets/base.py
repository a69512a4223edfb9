"""The protocol of a data set plug-in, and the checks of ``data.args`` that the built-in data sets share."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar, runtime_checkable

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from hpc_train.errors import BadFileError
from hpc_train.experiment.config.explanations import args_problems
from hpc_train.experiment.config.fields import Section
from hpc_train.experiment.config.training_sections import DataConfig
from hpc_train.experiment.validate.part_rules import rest_not_taken
from hpc_train.paths import expanded
from hpc_train.training.datasets.types import DataInfo, Tensors

#: The type of an image: PIL, uint8 (C, H, W), or float (C, H, W) that is already normalised; or a row of
#: features, float (F,).
RawImage = Image.Image | Tensor | np.ndarray[Any, Any]

#: The model's input for one sample: an image, a row of features, or several inputs as a dict or tuple.
RawInput = RawImage | dict[str, Any] | tuple[Any, ...]

#: A number, or an array of the same shape for all samples, or a dict or tuple of these. Dtype and shape reach
#: the task unchanged. If samples differ in shape (boxes), the task's ``target_spec`` has ``is_ragged``.
RawTarget = (
    Tensor | np.ndarray[Any, Any] | np.generic | Image.Image | int | float | Sequence[Any] | Mapping[str, Any]
)


class Split(Protocol):
    """One part of a data set: sample i is always the same (inputs, target)."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> tuple[RawInput, RawTarget]: ...


@runtime_checkable
class ArraySplit(Protocol):
    """A split that is read in whole batches, several times faster than sample by sample.

    It needs no ``__getitem__``. Sequences can only be read this way.
    """

    def __len__(self) -> int: ...

    def batch(self, indices: Tensor) -> tuple[Tensors, Tensors]:
        """Return inputs (B, …) and targets (B, …) of ``indices`` (B,) int64, tensors or structures of them.

        A single tensor of inputs is images (B, C, H, W) uint8 or float, rows of features (B, F) float, or
        tokens (B, T) int64. Targets have the dtype and shape that the task needs; they are a list of B
        tensors if the task accepts targets that differ in shape.
        """


@runtime_checkable
class FileSplit(Protocol):
    """A split of image files; the loader decodes only the resolution that a batch needs."""

    #: 1 or 3; other images are converted.
    channels: int

    def __len__(self) -> int: ...

    def file_content(self, index: int, /) -> tuple[bytes | bytearray, RawTarget]:
        """Return the undecoded content of the file of sample ``index``, and the sample's target."""


AnySplit = Split | ArraySplit | FileSplit


@dataclass(frozen=True)
class TensorSplit:
    """Images in memory, (N, C, H, W) uint8, and their targets, (N, …) of any dtype."""

    images: Tensor
    targets: Tensor

    def __post_init__(self) -> None:
        assert self.images.dtype == torch.uint8 and self.images.dim() == 4
        assert self.targets.shape[:1] == self.images.shape[:1]

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int, /) -> tuple[RawImage, RawTarget]:
        return self.images[index], self.targets[index]

    def batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Return copies of the images and targets of ``indices``, (B,) int64."""
        return self.images.index_select(0, indices), self.targets.index_select(0, indices)


@dataclass(frozen=True)
class DataSource:
    """The result of a data set plug-in. Without ``val`` the run is not evaluated."""

    train: AnySplit
    val: AnySplit | None
    info: DataInfo
    #: Compares files with their stored hashes before a run reads them; called once per node, with a function
    #: that receives the fraction done. Raises BadFileError. None: each read is checked, or there is no hash.
    verify: Callable[[Callable[[float], None]], None] | None = None
    #: Lines on unread content of the data's files, for ``prepare`` and the log of a run.
    notices: tuple[str, ...] = ()
    #: The data from which a pack was written, if available: they are inspected instead of the pack.
    packed_from: DataSource | None = None


class DatasetBuilder(Protocol):
    """The plug-in: a function."""

    def __call__(self, rest: str, config: DataConfig, *, download: bool) -> DataSource:
        """Open the data; ``rest`` is the part of the name after ``provider/``.

        ``download`` is true only in ``hpc-train prepare``: otherwise the network must not be used. Raises
        BadFileError, starting with a key path (``data.root: …; …``), if the file requests something that does
        not exist.
        """


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
