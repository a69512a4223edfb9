"""``huggingface``: images of a data set of Hugging Face's ``datasets``, in the Arrow files that it saves.

``data.root`` is a folder written by ``save_to_disk``. ``huggingface/<name>`` names a data set of the hub:
``prepare`` downloads it and saves it to ``data.root``, if that does not exist. Ranks use no network; they map
the Arrow files, so the processes of a node share their memory.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from hpc_train.console import say
from hpc_train.errors import BadFileError, listed, shortened
from hpc_train.experiment.config.training_sections import DataConfig
from hpc_train.experiment.data_facts.listed_data import HuggingFaceArgs
from hpc_train.experiment.data_facts.root_layout import why_not_read
from hpc_train.run.files import read_text
from hpc_train.training.datasets.base import DataSource, RawTarget, parse_args, root_of
from hpc_train.training.datasets.images import image_content
from hpc_train.training.datasets.sources.infer import image_info
from hpc_train.training.datasets.sources.named_files import NamedFiles, class_remarks
from hpc_train.training.datasets.sources.values import ClassNumbers, Place, numbers_of, rounding_remarks

_VAL_SPLITS = ("validation", "valid", "val", "test")
#: The value of a ClassLabel if the class is unknown.
_NO_CLASS = -1
#: Larger numbers are ids, not classes: a model has an output for each class.
_MAX_CLASSES = 1 << 24
_ROWS_AT_ONCE = 10_000
#: File of ``datasets`` with the names of the splits, which are folders.
_SPLITS_FILE = "dataset_dict.json"


@dataclass
class HuggingFaceImages:
    """A ``FileSplit`` of a split's images, which are stored as files."""

    rows: Rows
    #: Image and target.
    columns: tuple[str, str]
    #: The class of a target; None: the target itself.
    numbers: Mapping[Any, int] | None
    files: NamedFiles
    channels: int
    has_classes: bool

    def __len__(self) -> int:
        return len(self.rows.data)

    def file_content(self, index: int, /) -> tuple[bytes, RawTarget]:
        """Return the image's file, and the row's target: int64 (), or float32 () or (K,)."""
        row = self.rows.data[index]
        image, target = (row[column] for column in self.columns)
        if image is None or target is None:
            raise ValueError(f"the row has no {self.columns[0 if image is None else 1]}")
        return self._content(image, index), self._as_target(target, index)

    def _content(self, image: dict[str, Any], index: int) -> bytes:
        content, name = image["bytes"], image["path"]
        if content is not None:
            return bytes(content)
        if name is None:
            raise ValueError(f"the row has no {self.columns[0]}")
        where = self.rows.place(index)
        return image_content(self.files.path(self.files.checked(name, where)), where)

    def _as_target(self, target: Any, index: int) -> RawTarget:
        if not self.has_classes:
            place = _place(self.rows.place(index), self.columns[1])
            return np.asarray(numbers_of(target, place, None), dtype=np.float32)
        return np.int64(target if self.numbers is None else self.numbers.get(target, _NO_CLASS))


@dataclass(frozen=True)
class Rows:
    """The rows of a split, and their names in messages."""

    data: Any
    root: Path
    split: str

    def place(self, index: int) -> str:
        """Return the name of a row."""
        return f"{self.root}: row {index} of the split {self.split} (the first is 0)"

    def cells(self, column: str) -> Iterator[tuple[int, Any]]:
        """Yield index and value of each row of a column."""
        selected = self.data.select_columns([column])
        for start in range(0, len(selected), _ROWS_AT_ONCE):
            yield from enumerate(selected[start : start + _ROWS_AT_ONCE][column], start)


@dataclass(frozen=True)
class _FirstRow:
    """The first row with a value, searched only when a message names it."""

    rows: Rows
    column: str
    value: Any

    def __str__(self) -> str:
        def is_same(cell: Any) -> bool:
            return cell is self.value or cell == self.value or (cell != cell and self.value != self.value)

        return self.rows.place(next(n for n, cell in self.rows.cells(self.column) if is_same(cell)))


def build(rest: str, config: DataConfig, *, download: bool) -> DataSource:
    """Return the configured splits. ``rest``: the name of a data set of the hub, or empty."""
    args = parse_args(HuggingFaceArgs, config)
    library = _library()
    root = root_of(config)
    if rest and download and not root.exists():
        _save(library, rest, args, root)
    splits = _splits(library, root, rest, args, has_remarks=download)
    columns = _columns(library, splits["train"].data, args)
    _check_columns(library, splits, columns)
    names, numbers = _classes(library, splits, columns[1], args)
    has_classes = args.target == "class"
    files = NamedFiles(root, args.roots)
    images = {
        name: HuggingFaceImages(
            replace(rows, data=_raw(library, rows.data, columns)),
            columns,
            numbers[name],
            files,
            args.channels,
            has_classes=has_classes,
        )
        for name, rows in splits.items()
    }
    shape: tuple[int, ...] = ()
    if not has_classes:
        index, cell = next(splits["train"].cells(columns[1]))
        place = _place(splits["train"].place(index), columns[1])
        shape = np.shape(numbers_of(cell, place, None))
    if download:
        _check_targets(splits, columns[1], len(names), shape, config)
    if download and has_classes:
        for remark in class_remarks(names, _present_classes(splits, columns[1], numbers)):
            say(f"data.root: {remark}")
    num_classes = len(names) if has_classes else math.prod(shape)
    info = image_info(names, args.channels, num_classes, shape)
    return DataSource(images["train"], images.get("val"), info)


def _place(where: object, column: str) -> Place:
    return Place(where, column, has_classes_key=False)


def _library() -> Any:
    try:
        import datasets
    except ModuleNotFoundError as error:
        raise BadFileError(
            f"data.name: huggingface needs {error.name}; pip install 'hpc-train[hf]'"
        ) from error
    return datasets


def _save(library: Any, name: str, args: HuggingFaceArgs, root: Path) -> None:
    """Download a data set of the hub and save it to ``root``, which exists only once it is complete."""
    temporary = root.with_name(f".{root.name}.{os.getpid()}")
    library.config.HF_DATASETS_TRUST_REMOTE_CODE = (
        False  # datasets 3 asks on stdin to run a script of the hub
    )
    try:
        library.load_dataset(name, args.config, revision=args.revision).save_to_disk(str(temporary))
        temporary.rename(root)
    except ValueError as error:  # an unknown configuration or revision
        raise BadFileError(f"data.name: huggingface/{name} can't be loaded: {error}; fix it") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    say(f"data.root: {root}: {name} of the hub is saved")


def _splits(
    library: Any, root: Path, rest: str, args: HuggingFaceArgs, *, has_remarks: bool
) -> dict[str, Rows]:
    """Return the rows for training and, if there are any, for validation."""
    if not root.is_dir():
        remedy = "run `hpc-train prepare` with this file" if rest else "fix the path"
        raise BadFileError(f"data.root: {root} is not a folder on this machine; {remedy}")
    _check_data_files(root)
    try:
        splits = library.load_from_disk(str(root))
    except (FileNotFoundError, ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise BadFileError(
            f"data.root: {root} has no data set of Hugging Face: {error}; write one by save_to_disk"
        ) from error
    if not hasattr(splits, "keys"):
        splits = {args.train: splits}
    val = args.val or next((name for name in _VAL_SPLITS if name in splits), None)
    wanted = {"train": args.train} | ({} if val is None else {"val": val})
    for key, name in wanted.items():
        if name not in splits:
            raise BadFileError(
                f"data.args.{key}: {root} has no split {shortened(name)!r}; write one of {', '.join(splits)}"
            )
    unused = [name for name in splits if name not in wanted.values()]
    if has_remarks and unused:
        say(f"data.root: {root}: splits that are not read: {listed(unused, 5)}")
    if has_remarks and val == args.train:
        say(
            f"data.root: {root}: train and val are both the split {val}, so validation data are training data"
        )
    # A format that was set when the data were saved would hide columns, or return tensors.
    return {key: Rows(splits[name].with_format(None), root, name) for key, name in wanted.items()}


def _check_data_files(root: Path) -> None:
    """Raise BadFileError unless the data set consists of regular files below ``root``."""
    for name in _splits_of(root):
        NamedFiles(root, ()).checked(name, str(root / _SPLITS_FILE))
    for state in sorted((*root.glob("state.json"), *root.glob("*/state.json"))):
        try:
            files = [entry["filename"] for entry in json.loads(read_text(state))["_data_files"]]
        except (ValueError, LookupError, TypeError, RecursionError) as error:
            raise BadFileError(
                f"data.root: {state} is damaged ({error}); write the data set again by save_to_disk"
            ) from error
        names = NamedFiles(state.parent, ())
        for name in files:
            path = Path(names.path(names.checked(name, str(state))))
            if (why := why_not_read(path)) is not None:
                raise BadFileError(f"data.root: {path} {why}; write the data set again by save_to_disk")


def _splits_of(root: Path) -> list[Any]:
    try:
        splits = json.loads(read_text(root / _SPLITS_FILE))["splits"]
        return list(splits)
    except (FileNotFoundError, ValueError, LookupError, TypeError, RecursionError):
        return []  # a single split, or damaged, which ``datasets`` reports


def _columns(library: Any, rows: Any, args: HuggingFaceArgs) -> tuple[str, str]:
    features = rows.features
    images = [name for name, feature in features.items() if isinstance(feature, library.Image)]
    labels = [name for name, feature in features.items() if isinstance(feature, library.ClassLabel)]
    image = _column("image_column", args.image_column, images, features)
    others = labels or [name for name in ("label",) if name in features]
    return image, _column("target_column", args.target_column, others, features)


def _column(key: str, configured: str | None, candidates: Sequence[str], features: Any) -> str:
    names = ", ".join(features)
    if configured is not None and configured not in features:
        raise BadFileError(
            f"data.args.{key}: there is no column {shortened(configured)!r}; write one of {names}"
        )
    if configured is None and len(candidates) != 1:
        raise BadFileError(
            f"data.args.{key}: is missing, and {len(candidates)} columns may be meant; write one of {names}"
        )
    return configured or candidates[0]


def _check_columns(library: Any, splits: Mapping[str, Rows], columns: tuple[str, str]) -> None:
    """Raise BadFileError unless both splits have both columns, with targets of the same kind."""
    kinds: dict[str, str] = {}
    for rows in splits.values():
        features = rows.data.features
        for column in columns:
            if column not in features:
                raise BadFileError(
                    f"data.root: {rows.root}: the split {rows.split} has no column {shortened(column)!r}; "
                    "save both splits with the same columns"
                )
        kinds[rows.split] = _kind(library, features[columns[1]])
    if len(set(kinds.values())) > 1:
        both = " and ".join(f"{kind} in {split}" for split, kind in kinds.items())
        raise BadFileError(
            f"data.root: {splits['train'].root}: the column {columns[1]} has {both}; save both splits with "
            "the same features"
        )


def _kind(library: Any, feature: Any) -> str:
    if isinstance(feature, library.ClassLabel):
        return "class labels"
    dtype = str(getattr(feature, "dtype", type(feature).__name__))
    return next((kind for kind in ("int", "float", "string") if kind in dtype), dtype)


def _classes(
    library: Any, splits: Mapping[str, Rows], column: str, args: HuggingFaceArgs
) -> tuple[tuple[str, ...], dict[str, Mapping[Any, int] | None]]:
    """Return the class names, and for each split the numbers of targets that are not class numbers."""
    feature = splits["train"].data.features[column]
    unchanged: dict[str, Mapping[Any, int] | None] = dict.fromkeys(splits)
    if args.target == "number":
        return (), unchanged
    if isinstance(feature, library.ClassLabel):
        names = tuple(feature.names)
        return names, {key: _renumbered(library, rows.data, column, names) for key, rows in splits.items()}
    try:
        values = {key: rows.data.unique(column) for key, rows in splits.items()}
    except (TypeError, ValueError, NotImplementedError) as error:  # lists
        raise _no_classes(column, feature) from error
    if any(isinstance(value, float) and math.isfinite(value) and value % 1 for value in values["train"]):
        raise _no_classes(column, feature)
    if all(type(value) is int or value is None for value in values["train"]):
        return _numbered(splits, column, values), unchanged
    classes = ClassNumbers(None, None)
    numbers: dict[str, Mapping[Any, int] | None] = {}
    for key, rows in splits.items():
        cells = values[key]
        class_numbers = np.array(
            [classes.number(cell, _place(_FirstRow(rows, column, cell), column)) for cell in cells], np.int64
        )
        numbers[key] = dict(
            zip(
                cells,
                classes.finish(class_numbers).tolist() if key == "train" else class_numbers.tolist(),
                strict=True,
            )
        )
    return classes.names, numbers


def _present_classes(
    splits: Mapping[str, Rows], column: str, numbers: Mapping[str, Mapping[Any, int] | None]
) -> dict[str, np.ndarray[Any, Any]]:
    """Return the class numbers that occur in each split."""
    present = {}
    for key, rows in splits.items():
        mapping, values = numbers[key], rows.data.unique(column)
        classes = values if mapping is None else [mapping[value] for value in values if value in mapping]
        present[key] = np.array([number for number in classes if number is not None], np.int64)
    return present


def _no_classes(column: str, feature: Any) -> BadFileError:
    return BadFileError(
        f"data.args.target_column: the column {column} ({feature}) has no classes; write another one, or "
        "data.args.target: number"
    )


def _numbered(
    splits: Mapping[str, Rows], column: str, values: Mapping[str, Sequence[Any]]
) -> tuple[str, ...]:
    """Return the names of classes that are numbers, from 0 to the largest in the training split."""
    count = 1 + max((value for value in values["train"] if value is not None), default=-1)
    for key, rows in splits.items():
        for value in values[key]:
            place = _place(_FirstRow(rows, column, value), column)
            if value is None:
                raise place.missing(value)
            if not 0 <= value < _MAX_CLASSES:
                rule = f"not a class number, 0 to {_MAX_CLASSES - 1}"
                raise place.error(value, rule, "write class numbers from 0, or names")
            if value >= count:
                rule = f"a class that the training split lacks (its largest is {count - 1})"
                raise place.error(value, rule, "fix it, or save both splits with the same class labels")
    return tuple(map(str, range(count)))


def _check_targets(
    splits: Mapping[str, Rows], column: str, num_classes: int, shape: tuple[int, ...], config: DataConfig
) -> None:
    """Raise BadFileError for the first row without a target, unless such rows are replaced."""
    if config.on_bad_sample == "skip":
        return
    for rows in splits.values():
        numbers = []
        for index, cell in rows.cells(column):
            place = _place(rows.place(index), column)
            if cell is None or (num_classes and cell == _NO_CLASS):
                raise place.missing(cell)
            if not num_classes:
                numbers.append(numbers_of(cell, place, shape[0] if shape else 0))
        for remark in rounding_remarks(numbers) if numbers else ():
            say(f"data.root: {rows.root}: {remark}")


def _renumbered(library: Any, rows: Any, column: str, names: tuple[str, ...]) -> dict[Any, int] | None:
    """Return a split's class number → its index in ``names``, the training classes; None if equal."""
    feature = rows.features[column]
    if not isinstance(feature, library.ClassLabel) or tuple(feature.names) == names:
        return None
    if unknown := [name for name in feature.names if name not in names]:
        raise BadFileError(
            f"data.args.val: its column {column} has the class {shortened(unknown[0])!r}, which that of the "
            "training data lacks; save both splits with the same class names"
        )
    return {number: names.index(name) for number, name in enumerate(feature.names)}


def _raw(library: Any, rows: Any, columns: tuple[str, str]) -> Any:
    """Return the rows with the two columns, and images as the stored files."""
    if not isinstance(rows.features[columns[0]], library.Image):
        raise BadFileError(
            f"data.args.image_column: the column {columns[0]} has no images; write another one"
        )
    return rows.select_columns(list(columns)).cast_column(columns[0], library.Image(decode=False))
