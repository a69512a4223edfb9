"""``package.module:factory``: a user's own data set.

Called as ``factory(root=data.root, **data.args)``, without ``root`` if the file has none. It returns a
DataSource, or (train, val), or only a training set; each has ``__len__`` and ``__getitem__`` → (image,
target), or ``__len__`` and ``batch``.
"""

from __future__ import annotations

from typing import Any

from hpc_train.config.training_sections import DataConfig
from hpc_train.datasets.arguments import call
from hpc_train.datasets.base import ArraySplit, DataSource
from hpc_train.datasets.sources.infer import count_channels, count_classes, name_classes
from hpc_train.datasets.sources.statistics import mean_and_std
from hpc_train.datasets.types import DataInfo
from hpc_train.errors import BadFileError
from hpc_train.registry import load


def build_by_factory(config: DataConfig) -> DataSource:
    """Return what the factory called ``data.name`` returns."""
    factory = load("datasets", config.name)
    if not callable(factory):
        raise BadFileError(
            f"data.name: {config.name!r} is {type(factory).__name__}; name a function or a class"
        )
    root = {} if config.root is None else {"root": config.root}
    made = call(config.name, factory, **root, **config.args)
    if isinstance(made, DataSource):
        return made
    train, val = _pair(config.name, made)
    channels = count_channels(train)
    num_classes = count_classes(train, val)
    mean, std = mean_and_std(config.name, channels)
    info = DataInfo(num_classes, channels, mean, std, name_classes(train, num_classes))
    return DataSource(train, val, info)


def _pair(name: str, made: Any) -> tuple[Any, Any]:
    train, val = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    for split in (train, val):
        is_readable = isinstance(split, ArraySplit) or hasattr(split, "__getitem__")
        if split is not None and not (hasattr(split, "__len__") and is_readable):
            raise BadFileError(
                f"data.name: {name} returned {type(split).__name__}; return a DataSource, (train, val) or "
                "train, each with __len__ and __getitem__, or with __len__ and batch"
            )
    return train, val
