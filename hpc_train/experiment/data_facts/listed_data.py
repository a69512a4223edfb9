"""Facts about data sets that are listed by files of ``data.root``: image lists, tar shards.

Their arguments, the files that list the samples, the number of samples, and the header of their index: one
file of arrays that ``hpc-train prepare`` writes (``datasets.index_files``) and ranks open. Login nodes read
these, so no torch and no NumPy.
"""

from __future__ import annotations

import csv
import hashlib
import itertools
import json
import math
import re
import struct
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, InstanceOf, ValidationError

from hpc_train.experiment.config.fields import PositiveInt, Section, StoredCount, StoredFields
from hpc_train.experiment.config.training_sections import DataConfig
from hpc_train.experiment.data_facts.data_size import COUNT_LIMIT_S
from hpc_train.experiment.data_facts.file_content import EvenSample, files_digest, resolved
from hpc_train.paths import cache_folder, expanded

#: Magic bytes of an index; the last character before the line end is the version.
INDEX_MAGIC = b"hpc-train index 1\n"
#: Follows the magic bytes: length of the header in bytes, and its hash.
INDEX_LENGTH = struct.Struct("<Q16s")
#: Maximum length; a header lists shards and classes.
_MAX_HEADER_BYTES = 1 << 28
#: Maximum dimensions of an array in an index.
_MAX_DIMENSIONS = 4
#: ``train-{000..099}.tar``: the files of all numbers, with as many digits as the first.
_RANGE = re.compile(r"\{(\d+)\.\.(\d+)\}")
_MAX_DIGITS, _MAX_SHARDS = 9, 1_000_000
#: The character between the cells of a list, by the extension of its file.
SEPARATORS = {".csv": ",", ".tsv": "\t"}


class ImageListArgs(Section):
    """``data.args`` of image_list."""

    train: str = "train.csv"
    """List of the training images, below the root: .csv, .tsv or .parquet, with a header."""
    val: str | None = None
    """List of the validation images. Default: val.csv (with the extension of ``train``), if it exists."""
    path_column: str = "path"
    """Column of the image files, relative to the root."""
    target_column: str | list[str] = "target"
    """Column of the targets, or several of them."""
    target: Literal["class", "classes", "number"] = "class"
    """``class``: one class per image, by name or number. ``classes``: any number of classes per image, one
    column of 0 and 1 per class. ``number``: one number per column (regression)."""
    classes: list[str] | None = None
    """Class names in the order of their numbers. Default: those of the training list, numbers by size, names
    in alphabetical order."""
    num_classes: PositiveInt | None = None
    """Use the numbers in the column as class numbers, from 0 to one less than this."""
    roots: list[str] = []
    """Other folders below which a list may name images, by absolute paths. Default: ``root`` only."""
    channels: Literal[1, 3] = 3
    """Number of channels to which every image is converted."""

    @property
    def columns(self) -> list[str]:
        """Return the columns of the target."""
        return [self.target_column] if isinstance(self.target_column, str) else self.target_column


def _bounded(names: str | list[str]) -> str | list[str]:
    """Return the names of shards. Raises ValueError for an excessive number of files, or a NUL."""
    count = 0
    for name in [names] if isinstance(names, str) else names:
        if "\0" in name:
            raise ValueError(f"{name!r} has a NUL character; take it out")
        ends = _RANGE.findall(name)
        if any(len(end) > _MAX_DIGITS for pair in ends for end in pair):
            raise ValueError(
                f"has a range of numbers of over {_MAX_DIGITS} digits; write the numbers of the files"
            )
        count += math.prod(max(0, int(high) - int(low) + 1) for low, high in ends)
    if count > _MAX_SHARDS:
        raise ValueError(f"names {count:,} files, over {_MAX_SHARDS:,}; write the numbers of the files")
    return names


ShardNames = Annotated[str | list[str], AfterValidator(_bounded)]


class WebdatasetArgs(Section):
    """``data.args`` of webdataset."""

    train: Annotated[ShardNames, Field(examples=["train-{000..099}.tar"])]
    """Tar files of the training samples, below the root: ``train-{000..099}.tar``, or a list of names."""
    val: ShardNames | None = None
    """Tar files of the validation samples. Default: no validation."""
    image: str | None = None
    """Extension of the image, like jpg. Default: the only one of the sample."""
    target_member: Annotated[str, Field(pattern=r"^(cls|txt|json\.[^.]+)$")] = "cls"
    """Extension of the member with the target: ``cls``, ``txt`` or ``json.<field>``."""
    target: Literal["class", "number"] = "class"
    """``class``: a class, by name or number. ``number``: a number, or in a JSON field a list of numbers."""
    classes: list[str] | None = None
    """Class names in the order of their numbers. Default: those of the training samples, numbers by size,
    names in alphabetical order."""
    num_classes: PositiveInt | None = None
    """Use the numbers in the samples as class numbers, from 0 to one less than this."""
    channels: Literal[1, 3] = 3
    """Number of channels to which every image is converted."""


class HuggingFaceArgs(Section):
    """``data.args`` of huggingface."""

    config: str | None = None
    """Configuration of a data set of the hub. Default: its only one."""
    revision: str | None = None
    """Branch, tag or commit of a data set of the hub. Default: its newest."""
    train: str = "train"
    """Split of the training samples."""
    val: str | None = None
    """Split of the validation samples. Default: validation, valid, val or test, the first that exists."""
    image_column: str | None = None
    """Column of the images. Default: the only column of images."""
    target_column: str | None = None
    """Column of the targets. Default: the only column of class labels, else ``label``."""
    target: Literal["class", "number"] = "class"
    """``class``: a class, by label, number or name. ``number``: a number, or a list of them."""
    roots: list[str] = []
    """Other folders below which the data set may name images, by absolute paths. Default: ``root`` only."""
    channels: Literal[1, 3] = 3
    """Number of channels to which every image is converted."""


def list_files(root: Path, args: ImageListArgs) -> dict[str, Path]:
    """Return split → the file that lists its images."""
    files = {"train": root / args.train}
    val = root / (args.val or f"val{files['train'].suffix}")
    if args.val is not None or val.is_file():
        files["val"] = val
    return files


def shard_files(root: Path, args: WebdatasetArgs) -> dict[str, list[Path]]:
    """Return split → its tar files, in the order of ``data.args``."""
    names_by_split = {"train": args.train, "val": args.val}
    return {split: _shards(root, names) for split, names in names_by_split.items() if names is not None}


def _shards(root: Path, shards: str | list[str]) -> list[Path]:
    names = [shards] if isinstance(shards, str) else shards
    return [root / name for pattern in names for name in _expanded(pattern)]


def _expanded(name: str) -> Iterator[str]:
    parts = _RANGE.split(name)
    texts, ends = parts[::3], zip(parts[1::3], parts[2::3], strict=True)
    ranges = [[str(n).zfill(len(low)) for n in range(int(low), int(high) + 1)] for low, high in ends]
    for numbers in itertools.product(*ranges):
        yield "".join(text + number for text, number in itertools.zip_longest(texts, numbers, fillvalue=""))


def image_list_files(data: DataConfig) -> list[Path]:
    """Return the lists of ``image_list``; empty if the arguments are invalid."""
    with suppress(ValidationError):
        args = ImageListArgs.model_validate(data.args)
        return [] if data.root is None else list(list_files(expanded(data.root), args).values())
    return []


def webdataset_files(data: DataConfig) -> list[Path]:
    """Return the shards of ``webdataset``; empty if the arguments are invalid."""
    with suppress(ValidationError):
        args = WebdatasetArgs.model_validate(data.args)
        shards = {} if data.root is None else shard_files(expanded(data.root), args)
        return [path for paths in shards.values() for path in paths]
    return []


def arrow_files(data: DataConfig) -> list[Path]:
    """Return the Arrow files of ``huggingface``, as ``save_to_disk`` writes them."""
    return [] if data.root is None else sorted(expanded(data.root).rglob("*.arrow"))


def count_listed(data: DataConfig) -> int | None:
    """Return N of ``image_list``, from its index or counted; None if it is not here or takes too long."""
    files = image_list_files(data)
    if not files or (counted := _indexed(data, files)) is not None:
        return counted if files else None
    separator = SEPARATORS.get(files[0].suffix)
    return None if separator is None else _count_rows(files[0], separator)


def _count_rows(path: Path, separator: str) -> int | None:
    deadline, count = time.monotonic() + COUNT_LIMIT_S, -1  # the header
    if not path.is_file():  # a pipe would block
        return None
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            for row in csv.reader(file, delimiter=separator):
                count += bool(row)
                if count % 4096 == 0 and time.monotonic() > deadline:
                    return None
    except (OSError, ValueError, csv.Error):
        return None
    return count if count > 0 else None


def count_shards(data: DataConfig) -> int | None:
    """Return N of ``webdataset`` from its index; None if ``prepare`` has not indexed these shards."""
    files = webdataset_files(data)
    return _indexed(data, files) if files else None


def _indexed(data: DataConfig, files: Sequence[Path]) -> int | None:
    try:
        header = index_header(index_path(data, files))
    except OSError:
        return None
    return None if header is None else header[0].splits["train"].samples


def listed_images(data: DataConfig) -> list[str]:
    """Return an even sample of the image names in the lists of ``image_list``, in order.

    Empty if the arguments are invalid, or reading the lists takes too long. Raises OSError, ValueError or
    csv.Error for a list that can't be read, ImportError for a Parquet file without pyarrow.
    """
    deadline = time.monotonic() + COUNT_LIMIT_S
    sample: EvenSample[str] = EvenSample()
    for path in image_list_files(data):
        column = str(data.args.get("path_column", ImageListArgs.model_fields["path_column"].default))
        for number, name in enumerate(_column(path, column)):
            sample.add(name)
            if number % 4096 == 0 and time.monotonic() > deadline:
                return []
    return sample.kept


def _column(path: Path, column: str) -> Iterator[str]:
    if path.suffix not in SEPARATORS:
        from pyarrow import parquet

        for batch in parquet.ParquetFile(path).iter_batches(columns=[column]):
            yield from map(str, batch.column(0).to_pylist())
        return
    with path.open(newline="", encoding="utf-8-sig") as file:
        rows = csv.reader(file, delimiter=SEPARATORS[path.suffix])
        place = next(rows, []).index(column)
        yield from (row[place] for row in rows if len(row) > place)


def index_path(data: DataConfig, files: Sequence[Path]) -> Path:
    """Return the path of the index of ``files``, which need not exist.

    It is below ``data.cache``, else in the user's cache folder. Its name is a hash of the arguments and of
    resolved location, modification time and content of the files (``file_content``), so changed files and
    files of another folder have another index. Raises OSError if a file is not here.
    """
    times = [path.stat().st_mtime_ns for path in files]
    facts = [data.name, data.args, resolved(files), times, files_digest(files)]
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:20]
    folder = cache_folder() / "indexes" if data.cache is None else expanded(data.cache)
    return folder / f"{digest}.index"


class StoredArray(StoredFields):
    """An array in an index: its place after the header, its NumPy dtype and its hash."""

    offset: StoredCount
    nbytes: StoredCount
    dtype: str
    shape: Annotated[list[StoredCount], Field(min_length=1, max_length=_MAX_DIMENSIONS)]
    xxh3_128: str


class StoredSplit(StoredFields):
    """A split in an index."""

    samples: StoredCount
    arrays: dict[str, StoredArray]


class IndexHeader(StoredFields):
    """The header of an index."""

    splits: dict[str, StoredSplit]
    #: Names may have half characters, which are not valid text.
    class_names: list[InstanceOf[str]]
    facts: dict[str, Any]


def index_header(path: Path) -> tuple[IndexHeader, int] | None:
    """Return an index's header and the offset of its arrays; None without a valid one. Raises OSError."""
    if not path.is_file():  # a pipe would block
        return None
    try:
        with path.open("rb") as file:
            start = file.read(len(INDEX_MAGIC) + INDEX_LENGTH.size)
            if not start.startswith(INDEX_MAGIC) or len(start) < len(INDEX_MAGIC) + INDEX_LENGTH.size:
                return None
            nbytes, digest = INDEX_LENGTH.unpack(start[len(INDEX_MAGIC) :])
            text = file.read(nbytes) if nbytes <= _MAX_HEADER_BYTES else b""
    except FileNotFoundError:
        return None
    if header_digest(text) != digest:
        return None
    try:
        header = IndexHeader.model_validate(json.loads(text))
    except (ValueError, RecursionError):
        return None
    is_valid = "train" in header.splits and isinstance(header.facts.get("remarks", []), list)
    return (header, len(start) + nbytes) if is_valid else None


def header_digest(text: bytes) -> bytes:
    """Return the hash of a header, 16 bytes."""
    return hashlib.blake2b(text, digest_size=16).digest()


def has_index(data: DataConfig, files: Sequence[Path]) -> bool:
    """Return True if ``files`` have an up-to-date index. Raises OSError if a file is not here."""
    return index_header(index_path(data, files)) is not None


def without_index(data: DataConfig, files: Sequence[Path]) -> tuple[str, str]:
    """Return message and remedy for ``files`` without an undamaged index."""
    message = f"{data.root} has {len(files)} files without an index, or changed or moved since it was written"
    return message, "run `hpc-train prepare` with this file, which writes it"
