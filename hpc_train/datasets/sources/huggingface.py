"""``huggingface``: images of a data set of Hugging Face's ``datasets``, in the Arrow files that it saves.

``data.root`` is a folder written by ``save_to_disk``. ``huggingface/<name>`` names a data set of the hub:
``prepare`` downloads it and saves it to ``data.root``, if that does not exist. Ranks use no network; they map
the Arrow files, so all of a node share their memory.
"""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hpc_train.config.training_sections import DataConfig
from hpc_train.console import say
from hpc_train.data_facts.listed_data import HuggingFaceArgs
from hpc_train.datasets.arguments import parse_args, root_of
from hpc_train.datasets.base import DataSource, RawTarget
from hpc_train.datasets.sources.infer import mean_and_std
from hpc_train.datasets.types import DataInfo
from hpc_train.errors import BadFileError, shortened

_VAL_SPLITS = ("validation", "valid", "val", "test")
#: What a ClassLabel has where the class is not known.
_NO_CLASS = -1


class HuggingFaceImages:
    """A ``FileSplit`` of a split's images, which are stored as files."""

    def __init__(
        self,
        rows: Any,
        columns: tuple[str, str],
        numbers: dict[Any, int] | None,
        channels: int,
        *,
        has_classes: bool,
    ) -> None:
        """``columns``: image and target. ``numbers``: the class of a target; None: the target itself."""
        self._rows = rows
        self._image, self._target = columns
        self._has_classes = has_classes
        self._numbers = numbers
        self.channels = channels

    def __len__(self) -> int:
        return len(self._rows)

    def file_content(self, index: int, /) -> tuple[bytes, RawTarget]:
        """Return the image's file, and the row's target: int64 (), or float32 () or (K,)."""
        row = self._rows[index]
        image, target = row[self._image], row[self._target]
        if image is None or target is None:
            raise ValueError(f"the row has no {self._image if image is None else self._target}")
        content = image["bytes"]
        if content is None:
            content = Path(image["path"]).read_bytes()
        return content, self._as_target(target)

    def _as_target(self, target: Any) -> RawTarget:
        if not self._has_classes:
            return np.asarray(target, dtype=np.float32)
        return np.int64(target if self._numbers is None else self._numbers.get(target, _NO_CLASS))


def build(rest: str, config: DataConfig, *, download: bool) -> DataSource:
    """Return the splits that the arguments name. ``rest``: the name of a data set of the hub, or nothing."""
    args = parse_args(HuggingFaceArgs, config)
    library = _library()
    root = root_of(config)
    if rest and download and not root.exists():
        _save(library, rest, args, root)
    splits = _splits(library, root, rest, args)
    columns = _columns(library, splits["train"], args)
    names, numbers = _classes(library, splits, columns[1], args)
    has_classes = args.target == "class"
    made = {
        name: HuggingFaceImages(
            _raw(library, rows, columns), columns, numbers[name], args.channels, has_classes=has_classes
        )
        for name, rows in splits.items()
    }
    mean, std = mean_and_std(args.channels)
    shape = () if has_classes else _shape_of_targets(made["train"])
    num_classes = len(names) if has_classes else math.prod(shape)
    info = DataInfo(num_classes, args.channels, mean, std, names, target_shape=shape)
    return DataSource(made["train"], made.get("val"), info)


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


def _splits(library: Any, root: Path, rest: str, args: HuggingFaceArgs) -> dict[str, Any]:
    """Return the rows for training and, if there are any, for validation."""
    if not root.is_dir():
        remedy = "run `hpc-train prepare` with this file" if rest else "fix the path"
        raise BadFileError(f"data.root: {root} is not a folder on this machine; {remedy}")
    try:
        found = library.load_from_disk(str(root))
    except (FileNotFoundError, ValueError) as error:
        raise BadFileError(
            f"data.root: {root} has no data set of Hugging Face: {error}; write one by save_to_disk"
        ) from error
    if not hasattr(found, "keys"):
        found = {args.train: found}
    val = args.val or next((name for name in _VAL_SPLITS if name in found), None)
    wanted = {"train": args.train} | ({} if val is None else {"val": val})
    for key, name in wanted.items():
        if name not in found:
            raise BadFileError(
                f"data.args.{key}: {root} has no split {shortened(name)!r}; write one of {', '.join(found)}"
            )
    return {key: found[name] for key, name in wanted.items()}


def _columns(library: Any, rows: Any, args: HuggingFaceArgs) -> tuple[str, str]:
    """Return the columns of image and target."""
    features = rows.features
    images = [name for name, feature in features.items() if isinstance(feature, library.Image)]
    labels = [name for name, feature in features.items() if isinstance(feature, library.ClassLabel)]
    image = _column("image_column", args.image_column, images, features)
    others = labels or [name for name in ("label",) if name in features]
    return image, _column("target_column", args.target_column, others, features)


def _column(key: str, given: str | None, candidates: Sequence[str], features: Any) -> str:
    known = ", ".join(features)
    if given is not None and given not in features:
        raise BadFileError(f"data.args.{key}: there is no column {shortened(given)!r}; write one of {known}")
    if given is None and len(candidates) != 1:
        raise BadFileError(
            f"data.args.{key}: is missing, and {len(candidates)} columns may be meant; write one of {known}"
        )
    return given or candidates[0]


def _classes(
    library: Any, splits: dict[str, Any], column: str, args: HuggingFaceArgs
) -> tuple[tuple[str, ...], dict[str, dict[Any, int] | None]]:
    """Return the class names, and of each split the numbers of the targets that are not class numbers."""
    feature = splits["train"].features[column]
    unchanged: dict[str, dict[Any, int] | None] = dict.fromkeys(splits)
    if args.target == "number":
        return (), unchanged
    if isinstance(feature, library.ClassLabel):
        names = tuple(feature.names)
        return names, {key: _renumbered(library, rows, column, names) for key, rows in splits.items()}
    found = {value for rows in splits.values() for value in rows.unique(column)}
    if all(type(value) is int and value >= 0 for value in found):
        return tuple(map(str, range(max(found, default=-1) + 1))), unchanged
    if all(type(value) is str for value in found):
        names = tuple(sorted(found))
        return names, {key: {name: number for number, name in enumerate(names)} for key in splits}
    raise BadFileError(
        f"data.args.target_column: the column {column} ({feature}) has no classes; write another one, or "
        "data.args.target: number"
    )


def _renumbered(library: Any, rows: Any, column: str, names: tuple[str, ...]) -> dict[Any, int] | None:
    """Return a split's number of a class → its place in ``names``, the classes of training; None if equal."""
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
    """Return the rows with the two columns, and images as the files that they are stored as."""
    if not isinstance(rows.features[columns[0]], library.Image):
        raise BadFileError(
            f"data.args.image_column: the column {columns[0]} has no images; write another one"
        )
    return rows.select_columns(list(columns)).cast_column(columns[0], library.Image(decode=False))


def _shape_of_targets(split: HuggingFaceImages) -> tuple[int, ...]:
    """Return () or (K,), the shape of the first sample's target."""
    return np.asarray(split.file_content(0)[1]).shape
