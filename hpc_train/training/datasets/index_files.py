"""The index of a data set that is listed by files: arrays with one or more numbers per sample, in one file.

    magic │ size and hash of the header │ header, JSON: classes; offset and hash of each array │ arrays

``hpc-train prepare`` writes it once; each rank reads it into memory, instead of parsing lists or the headers
of tar files. Its name and header are defined in ``data_facts.listed_data``.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import xxhash

from hpc_train.console import say
from hpc_train.errors import BadFileError
from hpc_train.experiment.config.training_sections import DataConfig
from hpc_train.experiment.data_facts import listed_data, root_layout
from hpc_train.run.files import open_regular, replacing
from hpc_train.run.storage_errors import storage_error

Array = np.ndarray[Any, Any]
#: Name of an array → pattern of its NumPy dtype.
_TYPES = {
    "targets": r"<i8|<f4",
    "ends": "<i8",
    "bytes": r"\|u1",
    "lines": "<i8",
    "shards": "<i4",
    "offsets": "<i8",
    "sizes": "<i8",
    "names": r"\|S\d{1,6}|<f8",  # <f8: without any name
    "sides": "<i8",
    "corners": "<f4",
    "labels": "<i8",
    "crowds": "<i8",
    "starts": "<i8",
}
#: Arrays with one row more than there are samples, and arrays with any number of rows.
_ONE_MORE, _ANY_NUMBER = {"ends", "starts"}, {"bytes", "corners", "labels", "crowds"}


@dataclass(frozen=True)
class Index:
    """The content of an index: the arrays of each split by name, and facts about all of them."""

    splits: Mapping[str, Mapping[str, Array]]
    class_names: tuple[str, ...] = ()
    #: Other JSON values that a data set stores.
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Layout:
    """The splits that the index of a data set must have, and the arrays of each split."""

    splits: frozenset[str]
    arrays: frozenset[str]

    def fits(self, splits: Mapping[str, listed_data.StoredSplit]) -> bool:
        """Return True if the header of an index has these splits and arrays."""
        return splits.keys() == self.splits and all(
            self.arrays <= split.arrays.keys() for split in splits.values()
        )


def packed_texts(texts: list[bytes]) -> dict[str, Array]:
    """Return texts as two arrays: ``ends`` (N + 1,), and all ``bytes``.

    Arrays, not lists: reference counts would copy a list's memory into every loader process.
    """
    ends = np.zeros(len(texts) + 1, dtype=np.int64)
    np.cumsum([len(text) for text in texts], out=ends[1:])
    return {"ends": ends, "bytes": np.frombuffer(b"".join(texts), dtype=np.uint8)}


def text_at(arrays: Mapping[str, Array], index: int) -> str:
    """Return text ``index`` of ``packed_texts``, as a path."""
    begin, end = arrays["ends"][index : index + 2]
    return os.fsdecode(arrays["bytes"][begin:end].tobytes())


def open_index(data: DataConfig, files: Sequence[Path], layout: Layout) -> Index | None:
    """Return the up-to-date index of ``files``; None if there is none, or it is damaged.

    An index without the splits and arrays of ``layout`` is damaged. Raises OSError if a file is not here, or
    the disk fails.
    """
    path = listed_data.index_path(data, files)
    header, start = listed_data.index_header(path) or (None, 0)
    if header is None or not layout.fits(header.splits):
        return None
    with open_regular(path) as file:
        try:
            splits = {name: _read_arrays(file, start, split) for name, split in header.splits.items()}
        except _DamagedError:
            return None
    return Index(splits, tuple(header.class_names), header.facts)


class _DamagedError(Exception):
    """An array differs from the one that was written."""


def _read_arrays(file: BinaryIO, start: int, split: listed_data.StoredSplit) -> dict[str, Array]:
    """Return the arrays of a split. Raises _DamagedError unless types and numbers of rows are right."""
    arrays = {key: _read_array(file, start, key, entry) for key, entry in split.arrays.items()}
    rows = {key: len(array) - (key in _ONE_MORE) for key, array in arrays.items() if key not in _ANY_NUMBER}
    if "targets" not in rows or set(rows.values()) != {split.samples}:
        raise _DamagedError
    return arrays


def _read_array(file: BinaryIO, start: int, key: str, entry: listed_data.StoredArray) -> Array:
    is_typed = re.fullmatch(_TYPES.get(key, ""), entry.dtype)
    # Checked before reading: a wrong size would be allocated.
    if not is_typed or start + entry.offset + entry.nbytes > os.fstat(file.fileno()).st_size:
        raise _DamagedError
    dtype = np.dtype(entry.dtype)
    if not dtype.itemsize or math.prod(entry.shape) * dtype.itemsize != entry.nbytes:
        raise _DamagedError
    file.seek(start + entry.offset)
    content = file.read(entry.nbytes)
    if xxhash.xxh3_128_hexdigest(content) != entry.xxh3_128:
        raise _DamagedError
    return np.frombuffer(content, dtype).reshape(entry.shape)


def index_of(
    data: DataConfig, files: Sequence[Path], layout: Layout, make: Callable[[], Index], *, download: bool
) -> Index:
    """Return the index of ``files``, or the result of ``make``; with ``download`` it is written."""
    if download:
        return ensure_index(data, files, layout, make)
    return open_index(data, files, layout) or _made(files, make)


def _made(files: Sequence[Path], make: Callable[[], Index]) -> Index:
    """Return the result of ``make``. Raises BadFileError for a file that is a pointer of Git LFS."""
    for path in files:
        if (why := root_layout.why_not_read(path)) is not None:
            raise BadFileError(f"data.root: {path} {why}; put the file itself there")
    return make()


def ensure_index(data: DataConfig, files: Sequence[Path], layout: Layout, make: Callable[[], Index]) -> Index:
    """Return the index of ``files``; if there is none, write the one that ``make`` returns.

    For ``prepare``. Raises BadFileError if the files change meanwhile, StorageError if the disk refuses it.
    """
    path = listed_data.index_path(data, files)
    if (existing := open_index(data, files, layout)) is not None:
        say(f"data.root: the index {path} is intact and up to date")
        return existing
    index = _made(files, make)
    if listed_data.index_path(data, files) != path:
        raise BadFileError(
            f"data.root: the files in {data.root} changed while they were indexed; run prepare again"
        )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _write(path, index)
    except OSError as error:
        raise storage_error(error, path.parent) from error
    say(f"data.root: the index {path} is written, {path.stat().st_size} bytes")
    return index


def _write(path: Path, index: Index) -> None:
    arrays = [np.ascontiguousarray(array) for split in index.splits.values() for array in split.values()]
    ends = itertools.accumulate((array.nbytes for array in arrays), initial=0)
    entries = (_entry(array, begin) for array, begin in zip(arrays, ends, strict=False))
    splits = {
        name: {"samples": len(split["targets"]), "arrays": {key: next(entries) for key in split}}
        for name, split in index.splits.items()
    }
    header = {"splits": splits, "class_names": index.class_names, "facts": dict(index.facts)}
    text = json.dumps(header).encode()
    with replacing(path, sync=True) as file:
        file.write(
            listed_data.INDEX_MAGIC
            + listed_data.INDEX_LENGTH.pack(len(text), listed_data.header_digest(text))
            + text
        )
        for array in arrays:
            file.write(array.tobytes())


def _entry(array: Array, offset: int) -> dict[str, Any]:
    """Return the header's description of an array; ``offset`` counts from the end of the header."""
    return {
        "offset": offset,
        "nbytes": array.nbytes,
        "dtype": array.dtype.str,
        "shape": array.shape,
        "xxh3_128": xxhash.xxh3_128_hexdigest(array.tobytes()),
    }
