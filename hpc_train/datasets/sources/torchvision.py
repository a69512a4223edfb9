"""``torchvision/<class>``: the data sets of ``torchvision.datasets``, by their class's name.

A class whose constructor takes ``train=`` provides its training and test split; one that takes ``split=`` its
``train`` and its ``val``, ``valid`` or ``test``.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from types import ModuleType
from typing import Any

import PIL
import torch
import torchvision.datasets
from PIL import EpsImagePlugin, Image

from hpc_train.config.training_sections import DataConfig
from hpc_train.datasets.arguments import call
from hpc_train.datasets.base import DataSource
from hpc_train.datasets.images import PixelRules, open_lazily
from hpc_train.datasets.sources.in_memory import in_memory
from hpc_train.datasets.sources.infer import infer_info
from hpc_train.datasets.sources.torchvision_masks import MASKED_SETS
from hpc_train.errors import BadFileError
from hpc_train.paths import expanded
from hpc_train.validate.part_rules import unlisted

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
