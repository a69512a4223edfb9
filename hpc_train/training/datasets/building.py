"""Builds the DataSource from the ``data:`` section. Called by ranks and by ``hpc-train prepare``."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

from torch.utils.data import IterableDataset

from hpc_train.errors import BadFileError
from hpc_train.experiment.config.training_sections import DataConfig
from hpc_train.experiment.data_facts.by_name import misplaced, missing_root
from hpc_train.experiment.data_facts.image_facts import changed_keys
from hpc_train.registry import is_factory, load, split_name
from hpc_train.training.datasets.base import AnySplit, ArraySplit, DatasetBuilder, DataSource, FileSplit, call
from hpc_train.training.datasets.images import ImageSplit
from hpc_train.training.datasets.packed import PackedPixels
from hpc_train.training.datasets.sources.infer import infer_info
from hpc_train.training.datasets.types import DataInfo


def build_source(config: DataConfig, *, download: bool = False) -> DataSource:
    """Return the experiment's data set, with images as tensors of ``info.channels`` channels.

    With ``download`` (only in ``prepare``) missing data are fetched. Raises BadFileError if the file is
    wrong.
    """
    if problem := missing_root(config) or misplaced(config):
        raise problem.as_error()
    source = _build(config, download)
    if len(source.train) == 0:
        raise BadFileError("data: the training data are empty")
    if source.val is not None and len(source.val) == 0:
        raise BadFileError("data: the validation data are empty; add samples, or omit them")
    _refuse_keys_of_files(config, source.train)
    val = None if source.val is None else _as_tensors(source.val, source.info)
    return replace(source, train=_as_tensors(source.train, source.info), val=val)


def _build(config: DataConfig, download: bool) -> DataSource:
    if is_factory(config.name):
        return build_by_factory(config)
    provider, rest = split_name(config.name)
    builder = cast(DatasetBuilder, load("datasets", provider))
    return builder(rest, config, download=download)


def _refuse_keys_of_files(config: DataConfig, split: AnySplit) -> None:
    """Raise BadFileError for keys of image files if the data set returns decoded images."""
    if isinstance(split, (FileSplit, PackedPixels)):
        return
    for key in changed_keys(config):
        raise BadFileError(
            f"data.{key}: applies to image files, and {config.name} returns decoded images; take it out, and "
            "convert them in the data set"
        )


def _as_tensors(split: AnySplit, info: DataInfo) -> AnySplit:
    if isinstance(split, (ArraySplit, FileSplit)):
        return split
    if not hasattr(split, "__getitem__"):
        raise BadFileError(
            f"data.name: {type(split).__name__} has neither __getitem__ nor batch; write one of them"
        )
    if info.sequence_length is not None:
        raise BadFileError(
            f"data.name: {type(split).__name__} has sequences but no method batch to read them; "
            "write one that returns inputs and targets (B, T) int64"
        )
    return ImageSplit(split, info.channels)


def build_by_factory(config: DataConfig) -> DataSource:
    """Return the data of ``package.module:factory``, user code.

    Called as ``factory(root=data.root, **data.args)``, without ``root`` if the file has none. It returns a
    DataSource, or (train, val), or only a training set; each has ``__len__`` and ``__getitem__`` → (image,
    target), or ``__len__`` and ``batch``.
    """
    factory = load("datasets", config.name)
    if not callable(factory):
        raise BadFileError(
            f"data.name: {config.name!r} is {type(factory).__name__}; name a function or a class"
        )
    root = {} if config.root is None else {"root": config.root}
    result = call("data.args", config.name, factory, **root, **config.args)
    if isinstance(result, DataSource):
        return result
    train, val = _pair(config.name, result)
    return DataSource(train, val, infer_info(config.name, train, val))


def _pair(name: str, result: Any) -> tuple[Any, Any]:
    train, val = result if isinstance(result, tuple) and len(result) == 2 else (result, None)
    for split in (train, *([] if val is None else [val])):
        is_readable = isinstance(split, ArraySplit) or hasattr(split, "__getitem__")
        # An IterableDataset inherits ``__getitem__``, which only raises.
        is_other = isinstance(split, (tuple, dict, IterableDataset))
        is_split = hasattr(split, "__len__") and is_readable and not is_other
        if not is_split:
            length = f" of {len(split)}" if isinstance(split, (tuple, dict)) else ""
            raise BadFileError(
                f"data.name: {name} returned {type(split).__name__}{length}; return a DataSource, "
                "(train, val) or train, each with __len__ and __getitem__, or with __len__ and batch"
            )
    return train, val
