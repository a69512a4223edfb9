"""Classes by folders, with or without validation images, and lists of images with their targets."""

from __future__ import annotations

import csv
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hpc_train.errors import UsageError, listed, shortened
from hpc_train.experiment.data_facts.data_size import image_paths
from hpc_train.experiment.data_facts.listed_data import SEPARATORS
from hpc_train.experiment.data_facts.root_layout import class_folders, validation_folder
from hpc_train.experiment.data_facts.survey import content

#: Rows of a list that are read.
_MAX_ROWS = 1_000_000
#: Whole numbers with more different values than this are measurements, not classes.
_MAX_NUMBERED_CLASSES = 100
_LABELS = ("label", "class", "category", "labels", "class_name")
_TARGET_NAMES = ("target", *_LABELS, "y", "value")
_NUMBER = re.compile(r"\s*[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?\s*", re.ASCII | re.IGNORECASE)
_VALIDATION_STEMS = ("val", "dev", "test", "eval")


def image_folder(root: Path) -> content.Survey:
    """Return the content of ``root`` with train/<class>/ and val/<class>/."""
    paths = {name: image_paths(root / "train" / name) for name in class_folders(root / "train")}
    if empty := [name for name, files in paths.items() if not files]:
        raise UsageError(f"--root: {root / 'train' / empty[0]} contains no image; add some, or remove it")
    val = validation_folder(root)
    val_counts = {} if val is None else {name: len(image_paths(val / name)) for name in class_folders(val)}
    if unknown := sorted(val_counts.keys() - paths.keys()):
        assert val is not None
        remedy = f"put images of it into {root}/train/{unknown[0]}, or remove it"
        raise UsageError(f"--root: {val / unknown[0]} is a class that train lacks; {remedy}")
    images = content.sampled_images((path for files in paths.values() for path in files), root)
    counts = {name: len(files) for name, files in paths.items()}
    absent = [name for name in paths if val is not None and not val_counts.get(name)]
    extra = [name for name in class_folders(root) if name not in ("train", val and val.name)]
    return content.Survey(
        "classification", "imagefolder", content.channels_args(images), sum(counts.values()), val is not None,
        content.summary_of(
            sum(counts.values()), sum(val_counts.values()), content.class_sizes(counts), images
        ),
        content.remarks_of(
            images, val is not None, *content.rare_classes(counts),
            f"{val and val.name} has no image of {listed(absent, content.MOST_NAMES)}" if absent else "",
            f"not read: {listed(extra, content.MOST_NAMES)}" if extra else "",
        ),
        images,
    )  # fmt: skip


def has_val_classes(root: Path) -> bool:
    """Return True if there are labeled validation images; those of ``test`` may have no classes."""
    val = validation_folder(root)
    return val is not None and bool(class_folders(val))


def class_folders_alone(root: Path) -> content.Survey | None:
    """Return the content of a folder of classes without ``val``, which ``image_list`` reads by new lists.

    The validation images are those of another folder with classes of train, or a fifth of each class. None
    if there are no images.
    """
    train = root / "train" if (root / "train").is_dir() else root
    paths = classes_with_images(train)
    if not paths:
        return None
    names = [name for name in class_folders(root) if train != root and name != "train"]
    others = {name: classes_with_images(root / name) for name in names}
    val = next((name for name in names if others[name] and others[name].keys() <= paths.keys()), None)
    images = content.sampled_images((path for files in paths.values() for path in files), root)
    rows, val_rows, how = _rows_of(paths, root), [], f"the validation images are those in {val}"
    if val is not None:
        val_rows = _rows_of(others[val], root)
    else:
        rows, val_rows, how = content.without_fifth(rows)
    unread = [name for name in names if name != val]
    counts = Counter(name for _, name in rows)
    args = {"path_column": "path", "target_column": "class"} | content.channels_args(images)
    return content.Survey(
        "classification", "image_list", args,
        len(rows), bool(val_rows),
        content.summary_of(len(rows), len(val_rows), content.class_sizes(counts), images),
        content.remarks_of(
            images, bool(val_rows), how, *content.rare_classes(counts),
            f"not read: {listed(unread, content.MOST_NAMES)}" if unread else "",
        ),
        images, new_lists=content.new_lists_of(("path", "class"), rows, val_rows),
    )  # fmt: skip


def classes_with_images(folder: Path) -> dict[str, list[str]]:
    """Return class → paths of its images, for the folders with images."""
    paths = ((name, image_paths(folder / name)) for name in class_folders(folder))
    return {name: files for name, files in paths if files}


def _rows_of(paths: Mapping[str, Sequence[str]], root: Path) -> list[content.Row]:
    return [(path.removeprefix(f"{root}/"), name) for name, files in paths.items() for path in files]


def image_list(folder: Path, task: str | None = None) -> content.Survey:
    """Return the content of a list, or of a folder with one; ``task`` decides about numbers."""
    root = folder.parent if folder.is_file() else folder
    lists = (
        [folder, *(path for path in lists_in(root) if path != folder)] if folder.is_file() else lists_in(root)
    )
    if not lists:
        names = content.entries(root)
        raise UsageError(f"--root: {root} contains {names}, and no list .csv or .tsv; {content.LAYOUTS}")
    table = _rows(lists[0])
    base, path_column = _path_column(root, lists[0], table)
    columns = [path_column, *_target_columns(table[0], path_column)]
    val = next((path for path in lists[1:] if _is_validation(path, columns)), None)
    rows, val_rows = ([tuple(row[name] for name in columns) for row in part] for part in
                      (table, [] if val is None else _rows(val)))  # fmt: skip
    kind = _target_kind([cell for row in rows for cell in row[1:]], columns[1:], task)
    args: dict[str, Any] = {"path_column": path_column}
    args["target_column"] = columns[1] if len(columns) == 2 else columns[1:]
    if kind != "class":
        args["target"] = kind
    if Path(rows[0][0]).is_absolute():
        args["roots"] = [os.path.commonpath([Path(row[0]).parent for row in rows + val_rows])]
    remarks: list[str] = []
    if val is None:
        rows, val_rows, remark = content.without_fifth(rows, has_classes=kind == "class")
        remarks.append(remark)
        new_lists = content.new_lists_of(tuple(columns), rows, val_rows)
    else:
        new_lists = {}
        args |= {"train": os.path.relpath(lists[0], base), "val": os.path.relpath(val, base)}
    targets = f"{listed(columns[1:], 3)} as {kind}"
    if kind == "class":
        targets, more = _class_remarks(rows, val_rows, args)
        remarks += more
    images = content.sampled_images((base / row[0] for row in rows), base)
    return content.Survey(
        "regression" if kind == "number" else "classification", "image_list",
        args | content.channels_args(images), len(rows), bool(val_rows),
        content.summary_of(len(rows), len(val_rows), targets, images),
        content.remarks_of(images, bool(val_rows), *remarks), images, base if base != folder else None,
        f"columns of {lists[0].name}: {listed(list(table[0]), content.MOST_NAMES)}", new_lists,
    )  # fmt: skip


def lists_in(folder: Path) -> list[Path]:
    """Return the lists in ``folder``, that of the training data first."""
    paths = (path for path in folder.iterdir() if path.suffix in SEPARATORS and path.is_file())
    return sorted(paths, key=lambda path: (not path.stem.lower().startswith("train"), path.name))


def _class_remarks(
    rows: Sequence[content.Row], val_rows: Sequence[content.Row], args: dict[str, Any]
) -> tuple[str, list[str]]:
    """Return the classes in words, and remarks; add ``classes`` to ``args`` if train lacks some."""
    counts, val_classes = Counter(row[1] for row in rows), {row[1] for row in val_rows}
    remarks = content.rare_classes(counts)
    if val_classes and (absent := sorted(counts.keys() - val_classes)):
        remarks.append(f"no validation image of {listed(absent, content.MOST_NAMES)}")
    if only_val := sorted(val_classes - counts.keys()):
        args["classes"] = sorted(counts.keys() | val_classes, key=_by_size)
        remarks.append(f"no training image of {listed(only_val, content.MOST_NAMES)}")
    return content.class_sizes(counts), remarks


def _by_size(name: str) -> tuple[float, str]:
    return (float(name) if _NUMBER.fullmatch(name) else 0.0, name)


def _rows(path: Path) -> list[dict[str, str]]:
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file, delimiter=SEPARATORS[path.suffix], restval="")
            rows = [row for row, _ in zip(reader, range(_MAX_ROWS), strict=False)]
    except (UnicodeDecodeError, csv.Error) as error:
        raise UsageError(f"--root: {path} is not a list in UTF-8 ({error}); convert it") from error
    if not rows or None in rows[0]:
        raise UsageError(f"--root: {path} has no rows of as many cells as its header; write one per image")
    return rows


def _path_column(root: Path, path: Path, rows: Sequence[Mapping[str, str]]) -> tuple[Path, str]:
    """Return the folder and the column that together name image files."""
    folders = [root, *sorted(entry for entry in root.iterdir() if entry.is_dir())]
    tried = rows[:: -(-len(rows) // content.SAMPLED)]
    for folder in folders:
        for column in rows[0]:
            cells = [row[column] for row in tried]
            if sum(bool(cell) and (folder / cell).is_file() for cell in cells) * 2 > len(cells):
                return folder, column
    columns = listed(list(rows[0]), content.MOST_NAMES)
    raise UsageError(
        f"--root: no column of {path} ({columns}) names image files below {root}; "
        "write a column path with their paths, relative to that folder"
    )


def _target_columns(row: Mapping[str, str], path_column: str) -> list[str]:
    others = [name for name in row if name != path_column]
    if not others:
        raise UsageError(f"--root: the list has no column but {path_column}; write a column target")
    by_name = {name.lower(): name for name in reversed(others)}
    if "x" in by_name:  # coordinates
        by_name.pop("y", None)
    likely = next((by_name[name] for name in _TARGET_NAMES if name in by_name), None)
    if likely is not None:
        return [likely]
    numbers = [name for name in others if _NUMBER.fullmatch(row[name])]
    return others if len(numbers) == len(others) else [next(name for name in others if name not in numbers)]


def _target_kind(cells: Sequence[str], columns: Sequence[str], task: str | None) -> str:
    different = set(cells)
    if not all(map(_NUMBER.fullmatch, different)):
        if task == "regression":
            text = next(cell for cell in cells if not _NUMBER.fullmatch(cell))
            raise UsageError(f"--task: regression needs numbers, and the list has {shortened(text)!r}")
        return "class"
    if task == "regression":
        return "number"
    if len(columns) > 1:
        return "classes" if task or all(float(cell) in (0, 1) for cell in different) else "number"
    is_whole = all(float(cell).is_integer() for cell in different)
    is_repeated = len(different) <= min(_MAX_NUMBERED_CLASSES, len(cells) / 2)
    return "class" if task or (is_whole and (is_repeated or columns[0].lower() in _LABELS)) else "number"


def _is_validation(path: Path, columns: Sequence[str]) -> bool:
    return path.stem.lower().startswith(_VALIDATION_STEMS) and not {*columns} - _rows(path)[0].keys()
