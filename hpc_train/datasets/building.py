"""Builds the DataSource from the ``data:`` section. Called by ranks and by ``hpc-train prepare``."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

from hpc_train.config.training_sections import DataConfig
from hpc_train.data_facts.facts import missing_root
from hpc_train.datasets.base import AnySplit, ArraySplit, DatasetBuilder, DataSource
from hpc_train.datasets.images import ImageSplit
from hpc_train.datasets.sources.factory import build_by_factory
from hpc_train.datasets.types import DataInfo
from hpc_train.errors import BadFileError
from hpc_train.registry import is_factory, load, split_name


def build_source(config: DataConfig, *, download: bool = False) -> DataSource:
    """Return the data set that the file names, images as tensors with ``info.channels`` channels.

    With ``download`` (only in ``prepare``) missing data are fetched. Raises BadFileError if the file is
    wrong.
    """
    if problem := missing_root(config):
        raise problem.as_error()
    source = _build(config, download)
    if len(source.train) == 0:
        raise BadFileError("data: the training data are empty")
    if source.val is not None and len(source.val) == 0:
        raise BadFileError("data: the validation data are empty; add samples, or omit them")
    val = None if source.val is None else _as_tensors(source.val, source.info)
    return replace(source, train=_as_tensors(source.train, source.info), val=val)


def _build(config: DataConfig, download: bool) -> DataSource:
    if is_factory(config.name):
        return build_by_factory(config)
    provider, rest = split_name(config.name)
    builder = cast(DatasetBuilder, load("datasets", provider))
    return builder(rest, config, download=download)


def _as_tensors(split: AnySplit, info: DataInfo) -> AnySplit:
    if isinstance(split, ArraySplit):
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
