"""``torchvision/<class>``: the data sets of ``torchvision.datasets``, by their class's name.

A class whose constructor takes ``train=`` provides its training and test split; one that takes ``split=`` its
``train`` and its ``val``, ``valid`` or ``test``. Data sets with all images in one array (CIFAR, MNIST, SVHN,
…) are read as whole batches. The files of ``Cityscapes`` and ``VOCSegmentation``, with a class per pixel, are
read like those of ``segmentation_folder``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import PIL
import torch
import torchvision.datasets
from PIL import EpsImagePlugin, Image
from torch import Tensor
from torchvision.datasets import Cityscapes

from hpc_train.errors import BadFileError
from hpc_train.experiment.config.training_sections import DataConfig
from hpc_train.experiment.validate.part_rules import unlisted
from hpc_train.paths import expanded
from hpc_train.training.datasets.base import AnySplit, DataSource, TensorSplit, call
from hpc_train.training.datasets.images import PixelRules, as_tensor, open_lazily
from hpc_train.training.datasets.sources.infer import all_targets, image_info, infer_info
from hpc_train.training.datasets.sources.segmentation_folder import MaskedFiles
from hpc_train.training.datasets.targets import as_target

# For EPS Pillow starts a program. torchvision's classes are restricted below; this is a second safeguard.
EpsImagePlugin.gs_binary = False

_TRAIN_SPLITS = ("train", "trainval", "train-standard")
_VAL_SPLITS = ("val", "valid", "test")


class _Pillow(ModuleType):
    """A module of Pillow with some names replaced."""

    def __init__(self, module: ModuleType, **replaced: Any) -> None:
        super().__init__(module.__name__)
        self._module = module
        vars(self).update(replaced)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def _restrict_formats() -> None:
    """Restrict the modules of ``torchvision.datasets``, which open files themselves, to ``FORMATS``."""
    image = _Pillow(Image, open=open_lazily)
    replaced = {"Image": (Image, image), "PIL": (PIL, _Pillow(PIL, Image=image))}
    for module in vars(torchvision.datasets).values():
        for name, (original, restricted) in replaced.items():
            if isinstance(module, ModuleType) and vars(module).get(name) is original:
                setattr(module, name, restricted)


_restrict_formats()


def build(rest: str, config: DataConfig, *, download: bool) -> DataSource:
    """Return training and validation data; in memory if torchvision keeps them there."""
    cls = _class(rest)
    root = expanded(config.root or ".")
    if rest in MASKED_SETS:
        return _masked(rest, cls, root, config, download)
    train, val = _parts(rest, cls, root, config.args, download)
    info = infer_info(rest, train, val)
    return DataSource(in_memory(train), None if val is None else in_memory(val), info)


def _class(name: str) -> Any:
    value = getattr(torchvision.datasets, name, None) if name else None
    if inspect.isclass(value) and issubclass(value, torch.utils.data.Dataset):
        return value
    names = sorted(torchvision.datasets.__all__)
    raise unlisted(("data", "name"), "torchvision", "data set for this", name, names).as_error()


def _parameters(cls: Any) -> set[str]:
    """Return the constructor's parameters, including those it passes to its base class by ``**kwargs``."""
    names: set[str] = set()
    for owner in cls.__mro__:
        if "__init__" not in vars(owner):
            continue
        parameters = inspect.signature(owner.__init__).parameters.values()
        names |= {parameter.name for parameter in parameters}
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
            break
    return names


def _masked(name: str, cls: Any, root: Path, config: DataConfig, download: bool) -> DataSource:
    masked_set = MASKED_SETS[name]
    args = config.args | masked_set.fixed | ({"download": download} if "download" in _parameters(cls) else {})
    train, val = (
        _construct(name, cls, root, {**args, masked_set.split_argument: part}) for part in ("train", "val")
    )
    return masked_set.source(train, val, PixelRules.of(config))


def _parts(name: str, cls: Any, root: Path, args: dict[str, Any], download: bool) -> tuple[Any, Any]:
    parameters = _parameters(cls)
    if "download" in parameters:
        args = {**args, "download": download}
    if "train" in parameters:
        return tuple(_construct(name, cls, root, {**args, "train": is_train}) for is_train in (True, False))
    if "split" not in parameters:
        raise BadFileError(
            f"data.name: torchvision/{name} does not separate training from validation data; write a factory "
            "(package.module:factory) that returns both"
        )
    train = _first_split(name, cls, root, args, _TRAIN_SPLITS)
    if train is None:
        raise BadFileError(f"data.name: torchvision/{name} has no split called train; write a factory")
    return train, _first_split(name, cls, root, args, _VAL_SPLITS)


def _first_split(name: str, cls: Any, root: Path, args: dict[str, Any], splits: tuple[str, ...]) -> Any:
    for split in splits:
        try:
            return _construct(name, cls, root, {**args, "split": split})
        except ValueError as error:
            if f"'{split}'" not in str(error):
                raise BadFileError(f"data.args: torchvision/{name}: {error}") from error
    return None


def _construct(name: str, cls: Any, root: Path, args: dict[str, Any]) -> Any:
    if args.get("download"):
        root.mkdir(parents=True, exist_ok=True)
    try:
        return call("data.args", f"torchvision/{name}", cls, str(root), **args)
    except (RuntimeError, FileNotFoundError, NotADirectoryError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        fix = (
            "run `hpc-train prepare FILE` on a machine with network"
            if "download" in args
            else "put it there manually"
        )
        raise BadFileError(f"data.root: torchvision/{name} is not in {root} ({reason}); {fix}") from error


_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def in_memory(split: Any) -> AnySplit:
    """Return a TensorSplit of the same samples if ``split`` has them in ``data``; else ``split`` itself.

    The array is compared with the results of ``__getitem__`` for the first and the last sample, in each
    layout that the shape allows.
    """
    images, targets = _bytes(getattr(split, "data", None), len(split)), all_targets(split)
    if images is None or targets is None:
        return split
    for candidate in _layouts(images):
        if all(_agrees(split, candidate, targets, index) for index in {0, len(split) - 1}):
            return TensorSplit(candidate.contiguous(), targets)
    return split


def _bytes(data: Any, count: int) -> Tensor | None:
    if isinstance(data, np.ndarray):
        data = torch.from_numpy(data) if data.dtype == np.uint8 else None
    if not isinstance(data, Tensor) or data.dtype != torch.uint8 or count == 0 or len(data) != count:
        return None
    return data


def _layouts(images: Tensor) -> list[Tensor]:
    """Return the array as (N, C, H, W) in each way that its shape allows."""
    if images.dim() == 3:
        return [images[:, None]]
    if images.dim() != 4:
        return []
    return [images.permute(0, 3, 1, 2), images]


def _agrees(split: Any, images: Tensor, targets: Tensor, index: int) -> bool:
    image, target = split[index]
    return torch.equal(as_tensor(image), images[index]) and _is_class(target, int(targets[index]))


def _is_class(target: Any, number: int) -> bool:
    """Return True if ``__getitem__`` returns that class; with a ``target_transform`` it may not."""
    try:
        value = as_target(target)
    except (TypeError, ValueError, RuntimeError):
        return False
    return value.shape == () and value.dtype in _INTEGERS and int(value) == number


_CHANNELS, _IGNORED = 3, 255
_VOC_CLASSES = (
    "background", "aeroplane", "bicycle", "bird", "boat", "bottle", "bus", "car", "cat", "chair", "cow",
    "diningtable", "dog", "horse", "motorbike", "person", "pottedplant", "sheep", "sofa", "train",
    "tvmonitor",
)  # fmt: skip


@dataclass(frozen=True)
class MaskedSet:
    """The names that a class of torchvision has for its splits and files."""

    #: The argument that selects ``train`` or ``val``.
    split_argument: str
    class_names: tuple[str, ...]
    #: torchvision's split → the masks' files, in the order of ``images``.
    masks: Callable[[Any], Iterable[str]]
    #: Arguments that the user can't set.
    fixed: dict[str, Any] = field(default_factory=dict)
    #: Number in a mask → class, (256,) uint8; None: they are the same.
    classes: Tensor | None = None

    def source(self, train: Any, val: Any, rules: PixelRules) -> DataSource:
        """Return the data of torchvision's two splits."""
        info = image_info(self.class_names, _CHANNELS, ignore_index=_IGNORED)
        return DataSource(self._files(train, rules), self._files(val, rules), info)

    def _files(self, split: Any, rules: PixelRules) -> MaskedFiles:
        return MaskedFiles(split.images, self.masks(split), _CHANNELS, rules, self.classes)


def _evaluated_cityscapes() -> tuple[tuple[str, ...], Tensor]:
    """Return the names of Cityscapes' 19 evaluated classes, and the number in a file → class."""
    evaluated = sorted(
        (entry for entry in Cityscapes.classes if not entry.ignore_in_eval), key=lambda c: c.train_id
    )
    classes = torch.full((256,), _IGNORED, dtype=torch.uint8)
    for entry in evaluated:
        classes[entry.id] = entry.train_id
    return tuple(entry.name for entry in evaluated), classes


_CITYSCAPES_CLASSES, _CITYSCAPES_CLASS_OF = _evaluated_cityscapes()
#: torchvision's class → its splits and files.
MASKED_SETS = {
    "Cityscapes": MaskedSet(
        "split",
        _CITYSCAPES_CLASSES,
        lambda split: [targets[0] for targets in split.targets],
        {"target_type": "semantic"},
        _CITYSCAPES_CLASS_OF,
    ),
    "VOCSegmentation": MaskedSet("image_set", _VOC_CLASSES, lambda split: split.masks),
}
