"""``image_list``: images and their targets from a CSV, TSV or Parquet file with one row per image.

A list is parsed once, by ``prepare``, which writes an index; without an index each rank parses it, with the
same result. Rows keep their order.
"""

from __future__ import annotations

import csv
import os
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from hpc_train.console import say
from hpc_train.errors import BadFileError, listed, shortened
from hpc_train.experiment.config.training_sections import DataConfig
from hpc_train.experiment.data_facts.data_size import IMAGE_EXTENSIONS
from hpc_train.experiment.data_facts.listed_data import SEPARATORS, ImageListArgs, list_files
from hpc_train.training.datasets.base import DataSource, RawTarget, parse_args, refuse_rest, root_of
from hpc_train.training.datasets.images import image_content
from hpc_train.training.datasets.index_files import Array, Index, Layout, index_of, packed_texts, text_at
from hpc_train.training.datasets.sources.infer import image_info
from hpc_train.training.datasets.sources.named_files import (
    NamedFiles,
    class_remarks,
    file_remarks,
    target_remarks,
)
from hpc_train.training.datasets.sources.values import ClassNumbers, Place, Targets, as_number, number_of

_PARQUET = ".parquet"
#: Characters that separate cells in other lists, and their names.
_OTHER_SEPARATORS = {";": "semicolons", "\t": "tabs", ",": "commas", "|": "vertical bars"}
_SEPARATOR_NAMES = {".csv": "commas", ".tsv": "tabs"}
#: Arrays of a split, in the index.
ARRAYS = frozenset({"targets", "lines", "ends", "bytes"})


class ListedImages:
    """A ``FileSplit`` of the images in a list."""

    def __init__(self, root: Path, listing: Path, arrays: dict[str, Array], channels: int) -> None:
        """``arrays``: of the index; paths as ``packed_texts``, ``lines`` (N,) and ``targets`` (N, …)."""
        self._root, self._list = os.fspath(root), listing
        self._arrays, self._targets = arrays, arrays["targets"]
        self.channels = channels

    def __len__(self) -> int:
        return len(self._targets)

    def file_content(self, index: int, /) -> tuple[bytes, RawTarget]:
        """Return the content of the image file, and the row's target: int64 (), or float32 () or (K,)."""
        row = f"{self._list}:{self._arrays['lines'][index]}"
        return image_content(self._file(index), row), self._targets[index]

    def path(self, index: int) -> Path:
        """Return the file of a sample."""
        return Path(self._file(index))

    def _file(self, index: int) -> str:
        return os.path.join(self._root, text_at(self._arrays, index))  # noqa: PTH118  (Path: half as long as decoding)


def build(rest: str, config: DataConfig, *, download: bool) -> DataSource:
    """Return the images of the lists; without a list of validation images there is no validation."""
    refuse_rest(config)
    args = parse_args(ImageListArgs, config)
    root = root_of(config)
    lists = list_files(root, args)
    for split, path in lists.items():
        _check_file(split, path)
    make = partial(_parsed, root, lists, args, has_remarks=download)
    index = index_of(config, list(lists.values()), Layout(frozenset(lists), ARRAYS), make, download=download)
    for remark in index.facts.get("remarks", ()) if download else ():
        say(f"data.root: {remark}")
    splits = {
        split: ListedImages(root, path, dict(index.splits[split]), args.channels)
        for split, path in lists.items()
    }
    num_classes = len(args.columns) if args.target == "number" else len(index.class_names)
    shape = index.splits["train"]["targets"].shape[1:]
    info = image_info(index.class_names, args.channels, num_classes, shape)
    return DataSource(splits["train"], splits.get("val"), info)


def _check_file(split: str, path: Path) -> None:
    if path.suffix not in (*SEPARATORS, _PARQUET):
        raise BadFileError(
            f"data.args.{split}: {shortened(path.name)} is not a .csv, .tsv or .parquet file; convert it"
        )
    if not path.is_file():
        raise BadFileError(
            f"data.root: {path} is not a file on this machine; fix data.root, or name the list in "
            f"data.args.{split}"
        )


def _parsed(root: Path, lists: dict[str, Path], args: ImageListArgs, *, has_remarks: bool) -> Index:
    """Return the lists as arrays. Raises BadFileError with file and line for the first bad row."""
    targets, files = _Targets(args), NamedFiles(root, args.roots)
    names: dict[str, list[bytes]] = {}
    splits: dict[str, dict[str, Array]] = {}
    for split, path in lists.items():
        title = os.path.relpath(path, root)
        title += f" for {split}" if title in names else ""
        names[title], splits[split] = _parse(path, args, targets, files)
    facts: dict[str, Any] = {}
    if has_remarks:
        train = lists["train"]
        beside = sorted(path.name for path in train.parent.glob(f"*{train.suffix}") if path.is_file())
        others = [name for name in beside if train.parent / name not in lists.values()]
        remarks = [f"{listed(others, 5)} beside {train.name} are not read"] if others else []
        remarks += file_remarks(root, names)
        targets_of = (split["targets"].tolist() for split in splits.values())
        remarks += target_remarks(zip(chain(*names.values()), chain(*targets_of), strict=True))
        if args.target == "class":
            remarks += class_remarks(
                targets.names, {split: arrays["targets"] for split, arrays in splits.items()}
            )
        facts["remarks"] = remarks + targets.remarks
    return Index(splits, targets.names, facts)


def _parse(
    path: Path, args: ImageListArgs, targets: _Targets, files: NamedFiles
) -> tuple[list[bytes], dict[str, Array]]:
    names: list[bytes] = []
    lines: list[int] = []
    values: list[Any] = []
    for line, name, cells in _rows(path, args):
        where = f"{path}:{line}"
        if name is None or name == "":
            raise BadFileError(f"data.root: {where} has no {args.path_column}; fill it in, or remove the row")
        names.append(files.checked(name, where))
        lines.append(line)
        values.append(targets.value(cells, where))
    if not names:
        raise BadFileError(f"data.root: {path} has no rows below its header; add some")
    arrays = {"lines": np.array(lines, np.int64), "targets": targets.array(values)}
    return names, packed_texts(names) | arrays


class _Targets(Targets):
    """Converts the cells of the target columns."""

    def __init__(self, args: ImageListArgs) -> None:
        self._args = args
        columns = args.columns
        if args.target == "class" and len(columns) != 1:
            raise BadFileError(
                f"data.args.target_column: {len(columns)} columns are not one class; write one column, or "
                "data.args.target: classes or number"
            )
        if args.target != "class" and (args.classes or args.num_classes):
            raise BadFileError(
                "data.args.classes: is for data.args.target: class, since the columns are the others' names; "
                "take it out"
            )
        super().__init__(
            ClassNumbers(args.classes, args.num_classes) if args.target == "class" else None, tuple(columns)
        )

    def value(self, cells: Sequence[Any], where: str) -> int | float | list[float]:
        """Return the target of one row; a class's number is preliminary until ``array``."""
        places = [Place(where, column) for column in self._args.columns]
        if self._classes is not None:
            return self._classes.number(cells[0], places[0])
        numbers = [self._number(cell, place) for cell, place in zip(cells, places, strict=True)]
        return numbers[0] if self._args.target == "number" and len(numbers) == 1 else numbers

    def _number(self, cell: Any, place: Place) -> float:
        if self._args.target == "classes" and as_number(cell) not in (0, 1):
            raise place.error(
                cell,
                "and data.args.target: classes needs 0 or 1",
                "fix it, or write data.args.target: number",
            )
        return number_of(cell, place)


def _rows(path: Path, args: ImageListArgs) -> Iterator[tuple[int, Any, list[Any]]]:
    """Yield the line, the image's path and the target's cells of each row."""
    if path.suffix == _PARQUET:
        yield from _parquet_rows(path, args)
        return
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.reader(file, delimiter=SEPARATORS[path.suffix], strict=True)
            header = next(reader, [])
            places = [_place(path, header, args, column) for column in (args.path_column, *args.columns)]
            for row in reader:
                if not row:
                    continue
                if len(row) != len(header):
                    raise BadFileError(
                        f"data.root: {path}:{reader.line_num} has {len(row)} cells, and the header "
                        f"{len(header)}; fix the row"
                    )
                yield reader.line_num, row[places[0]], [row[place] for place in places[1:]]
    except UnicodeDecodeError as error:
        raise BadFileError(f"data.root: {path} is not UTF-8 text ({error.reason}); convert it") from error
    except csv.Error as error:
        raise BadFileError(f"data.root: {path}:{reader.line_num}: {error}; fix the row") from error


def _place(path: Path, header: Sequence[str], args: ImageListArgs, column: str) -> int:
    """Return the index of the column. Raises BadFileError if it does not occur exactly once."""
    if header.count(column) == 1:
        return header.index(column)
    key = "path_column" if column == args.path_column else "target_column"
    names = ", ".join(map(shortened, header[:10])) or "nothing"
    how = "has no column" if column not in header else "has twice the column"
    if (problem := _header_problem(path, header, column, args)) is not None:
        raise BadFileError(f"data.root: {path} {problem}")
    raise BadFileError(
        f"data.args.{key}: {path} {how} {shortened(column)!r} (its header: {names}); write one of the header"
    )


def _header_problem(path: Path, header: Sequence[str], column: str, args: ImageListArgs) -> str | None:
    """Return the problem of a list without a usable header, with its remedy; None if its names differ."""
    needed = [args.path_column, *args.columns]
    if path.suffix == _PARQUET or column in header:
        return None
    for separator, name in _OTHER_SEPARATORS.items():
        if len(header) == 1 and column in header[0].split(separator):
            return (
                f"has cells separated by {name}; write it with {_SEPARATOR_NAMES[path.suffix]} between cells"
            )
    if column in [cell.strip() for cell in header]:
        return f"has blanks around {column!r} in its header; remove the blanks around all cells"
    if any(cell.lower().endswith(IMAGE_EXTENSIONS) for cell in header):
        separator = SEPARATORS[path.suffix]
        return (
            f"has no header, but {listed(list(header), 5)}; add the line {separator.join(needed)} at its top"
        )
    if header and header[0].lstrip().startswith("#"):
        return "begins with a comment; remove the lines above its header"
    return None


def _parquet_rows(path: Path, args: ImageListArgs) -> Iterator[tuple[int, Any, list[Any]]]:
    """Yield rows like ``_rows``; the line counts rows from 1."""
    try:
        from pyarrow import ArrowException, parquet
    except ModuleNotFoundError as error:
        raise BadFileError(
            f"data.root: {path} needs pyarrow; pip install 'hpc-train[parquet]', or convert it to .csv"
        ) from error
    columns = [args.path_column, *args.columns]
    try:
        with parquet.ParquetFile(path) as file:
            header = file.schema_arrow.names
            for column in columns:
                _place(path, header, args, column)
            line = 0
            for batch in file.iter_batches(columns=columns):
                cells = [batch.column(column).to_pylist() for column in columns]
                for name, *values in zip(*cells, strict=True):
                    line += 1
                    yield line, name, values
    except UnicodeDecodeError as error:
        raise BadFileError(
            f"data.root: {path} has text that is not UTF-8 ({error.reason}) below row {line}; write it again"
        ) from error
    except (ArrowException, OverflowError) as error:
        raise BadFileError(
            f"data.root: {path} is not a readable Parquet file: {error}; write it again"
        ) from error
