"""The content of a data root, for ``init``: its data set, samples, classes and image sizes.

Counts come from file names and lists; the rest from the headers of an even sample of files. No torch.
"""

from __future__ import annotations

import csv
import json
import os
import re
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

from hpc_train.config.training_sections import DataConfig
from hpc_train.data_facts.by_name import data_facts
from hpc_train.data_facts.data_size import MAX_ANNOTATIONS_BYTES, image_paths
from hpc_train.data_facts.file_content import EvenSample
from hpc_train.data_facts.image_facts import MASK_MODES, SCALED_MASKS
from hpc_train.data_facts.listed_data import SEPARATORS
from hpc_train.data_facts.raw_tokens import RAW_NAME
from hpc_train.data_facts.root_layout import annotation_files, class_folders, validation_folder
from hpc_train.errors import UsageError, counted, listed, shortened

#: Maximum number of files whose header is read: each costs one or two requests to a file server.
_SAMPLED = 64
#: Time limit for reading masks: a class number that is first read by a rank would end its run.
_MASKS_S = 10.0
#: Core seconds to decode a pixel. Measured: JPEG by simplejpeg, which can reduce it; PNG by Pillow.
_DECODE_S = {"JPEG": 5e-9}
_DECODE_OTHERS_S = 30e-9
_GRAY = frozenset({"1", "L", "LA", "I", "I;16", "I;16B", "F"})
#: A larger text is tokenized once, by ``prepare``, instead of by each rank.
_MAX_TEXT_BYTES = 100 << 20
_VOID = 255
#: Rows of a list that are read.
_MAX_ROWS = 1_000_000
#: Whole numbers with more different values than this are measurements, not classes.
_MAX_NUMBERED_CLASSES = 100
_LABELS = ("label", "class", "category", "labels", "class_name")
_TARGET_NAMES = ("target", *_LABELS, "y", "value")
_NUMBER = re.compile(r"\s*[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?\s*", re.ASCII | re.IGNORECASE)
_VALIDATION_STEMS = ("val", "dev", "test", "eval")
#: Tokens per sequence, and what a short text has for validation.
_MAX_LENGTH, _MIN_LENGTH, _VAL_FRACTION, _MIN_VAL_SEQUENCES = 128, 16, 0.1, 4
_MOST_NAMES = 5
_LAYOUTS = (
    "arrange them as train/<class>/*.jpg and val/<class>/*.jpg; as images with a list train.csv; as "
    "train/images and train/masks; as train.json (COCO) with a folder train; or as a text train.txt"
)


#: A row of a list of images: the path, and the targets.
Row = tuple[str, ...]


@dataclass(frozen=True)
class Images:
    """Facts of a sample of images. Sides are medians in pixels."""

    width: int
    height: int
    is_one_size: bool
    #: 1 if all are gray.
    channels: int
    #: Core seconds to decode one.
    read_s: float
    number: int
    #: Paths of files that can't be opened as images.
    unreadable: tuple[str, ...] = ()

    def __str__(self) -> str:
        """Return size and colors."""
        size = f"{self.width} x {self.height} pixels{'' if self.is_one_size else ' (median)'}"
        return f"{size}, {'gray' if self.channels == 1 else 'color'}"


@dataclass(frozen=True)
class Survey:
    """The content of a data root, as values of ``task`` and ``data``."""

    task: str
    name: str
    args: Mapping[str, Any] = field(default_factory=dict)
    #: N of the training data; None: too many to count.
    samples: int | None = None
    has_val: bool = True
    #: Numbers and sizes, in one line.
    summary: str = ""
    #: What may be a mistake, one line each.
    remarks: Sequence[str] = ()
    images: Images | None = None
    #: Another root than the user's, below or above it.
    root: Path | None = None
    #: The reason for ``args``.
    args_reason: str = ""
    #: Split → rows, with a header, of a list that ``init`` writes; ``data.args.train`` and ``val`` name it.
    new_lists: Mapping[str, Sequence[Row]] = field(default_factory=dict)

    @property
    def lines(self) -> list[str]:
        """Return the summary and the remarks."""
        return [*([self.summary] if self.summary else []), *self.remarks]


def survey(folder: Path, name: str | None = None, task: str | None = None) -> Survey | None:
    """Return the content of ``folder``; ``name`` (``data.name``) and ``task`` are the user's choices.

    None for other data sets than those of files, and if the folder is not on this machine. Raises UsageError
    if it has no data, or an incomplete layout.
    """
    if not folder.exists():
        return None
    kind = name or _kind(folder, task)
    if kind is None:
        raise UsageError(f"--root: {folder} contains {_entries(folder)}, which no data set reads; {_LAYOUTS}")
    if kind not in _SURVEYS:
        return None
    try:
        if name is None and kind == "imagefolder" and not _has_val_classes(folder):
            return _class_folders(folder)
        return _image_list(folder, task) if kind == "image_list" else _of_kind(kind, folder)
    except OSError as error:
        raise UsageError(f"--root: {error.filename or folder}: {error.strerror}; make it readable") from error


def _of_kind(kind: str, folder: Path) -> Survey | None:
    if (problem := data_facts(kind).layout(folder)) is not None:
        raise UsageError(f"--root: {problem.message}; {problem.remedy}")
    return _SURVEYS[kind](folder)


#: Task → its data sets of files; the first one is the usual one.
_KINDS: Mapping[str, tuple[str, ...]] = {
    "classification": ("imagefolder", "image_list"),
    "regression": ("image_list",),
    "segmentation": ("segmentation_folder",),
    "detection": ("coco",),
    "causal_lm": ("text", "tokens"),
}


def _kind(folder: Path, task: str | None) -> str | None:
    """Return the data set that reads ``folder``, one of the task's; None if there is none."""
    kind = _kind_of_file(folder) if folder.is_file() else _kind_of_folder(folder)
    kinds = _KINDS.get(task or "", ())
    return kinds[0] if kinds and kind not in kinds else kind


def _kind_of_file(path: Path) -> str:
    return "image_list" if path.suffix in SEPARATORS else "text"


def _kind_of_folder(folder: Path) -> str | None:
    train = folder / "train"
    if (folder / "train.json").is_file():
        return "coco"
    if (train / "images").is_dir() and (train / "masks").is_dir():
        return "segmentation_folder"
    if _lists(folder) and not (train.is_dir() and class_folders(train)):
        return "image_list"
    if train.is_dir() and (class_folders(train) or image_paths(train)):
        return "imagefolder"
    if (text := folder / "train.txt").is_file():
        return "text" if text.stat().st_size <= _MAX_TEXT_BYTES else "tokens"
    if any(RAW_NAME.fullmatch(path.name) or path.suffix == ".jsonl" for path in folder.iterdir()):
        return "tokens"
    return "imagefolder" if not train.is_dir() and _classes_with_images(folder) else None


def _entries(folder: Path) -> str:
    names = sorted(path.name + "/" * path.is_dir() for path in folder.iterdir())
    return listed([shortened(name) for name in names], _MOST_NAMES) or "nothing"


def _lists(folder: Path) -> list[Path]:
    """Return the lists in ``folder``, that of the training data first."""
    paths = (path for path in folder.iterdir() if path.suffix in SEPARATORS and path.is_file())
    return sorted(paths, key=lambda path: (not path.stem.lower().startswith("train"), path.name))


def _sampled_images(paths: Iterable[str | Path]) -> Images | None:
    """Return the facts of an even sample of images, from their headers; None if none can be opened."""
    from PIL import Image

    kept = EvenSample(paths).kept
    opened: list[tuple[int, int, str, float]] = []
    unreadable: list[str] = []
    for path in kept[:: -(-len(kept) // _SAMPLED) or 1]:
        try:
            with Image.open(path) as image:
                pixel_s = _DECODE_S.get(image.format or "", _DECODE_OTHERS_S)
                opened.append((*image.size, image.mode, image.width * image.height * pixel_s))
        except Exception:  # any error of Pillow's formats
            unreadable.append(os.fspath(path))
    if not opened:
        return None
    widths, heights, modes, seconds = zip(*opened, strict=True)
    return Images(
        width=int(statistics.median(widths)),
        height=int(statistics.median(heights)),
        is_one_size=len({*zip(widths, heights, strict=True)}) == 1,
        channels=1 if _GRAY.issuperset(modes) else 3,
        read_s=statistics.mean(seconds),
        number=len(opened),
        unreadable=tuple(unreadable),
    )


def _with_images(images: Images | None, folder: Path) -> Images:
    if images is None:
        raise UsageError(f"--root: no image below {folder} can be opened; check some of its files")
    return images


def _channels(images: Images) -> dict[str, Any]:
    return {"channels": 1} if images.channels == 1 else {}


def _remarks(images: Images, has_val: bool, *others: str) -> list[str]:
    remarks = [remark for remark in others if remark]
    if images.unreadable:
        bad, number = listed(list(images.unreadable), _MOST_NAMES), len(images.unreadable)
        remarks.append(f"{number} of {images.number + number} files of a sample can't be opened: {bad}")
    return remarks + _no_val(has_val)


def _no_val(has_val: bool) -> list[str]:
    return [] if has_val else ["there are no validation data, so runs are not evaluated"]


def _image_folder(root: Path) -> Survey:
    paths = {name: image_paths(root / "train" / name) for name in class_folders(root / "train")}
    if empty := [name for name, files in paths.items() if not files]:
        raise UsageError(f"--root: {root / 'train' / empty[0]} contains no image; add some, or remove it")
    val = validation_folder(root)
    val_counts = {} if val is None else {name: len(image_paths(val / name)) for name in class_folders(val)}
    if unknown := sorted(val_counts.keys() - paths.keys()):
        assert val is not None
        remedy = f"put images of it into {root}/train/{unknown[0]}, or remove it"
        raise UsageError(f"--root: {val / unknown[0]} is a class that train lacks; {remedy}")
    images = _with_images(_sampled_images(path for files in paths.values() for path in files), root)
    counts = {name: len(files) for name, files in paths.items()}
    absent = [name for name in paths if val is not None and not val_counts.get(name)]
    extra = [name for name in class_folders(root) if name not in ("train", val and val.name)]
    return Survey(
        "classification", "imagefolder", _channels(images), sum(counts.values()), val is not None,
        _summary(sum(counts.values()), sum(val_counts.values()), _class_sizes(counts), images),
        _remarks(
            images, val is not None, *_rare(counts),
            f"{val and val.name} has no image of {listed(absent, _MOST_NAMES)}" if absent else "",
            f"not read: {listed(extra, _MOST_NAMES)}" if extra else "",
        ),
        images,
    )  # fmt: skip


def _classes_with_images(folder: Path) -> dict[str, list[str]]:
    paths = ((name, image_paths(folder / name)) for name in class_folders(folder))
    return {name: files for name, files in paths if files}


def _has_val_classes(root: Path) -> bool:
    """Return True if there are labeled validation images; those of ``test`` may have no classes."""
    val = validation_folder(root)
    return val is not None and bool(class_folders(val))


def _class_folders(root: Path) -> Survey | None:
    """Return the content of a folder of classes without ``val``, which ``image_list`` reads by new lists.

    The validation images are those of another folder with classes of train, or a fifth of each class.
    """
    train = root / "train" if (root / "train").is_dir() else root
    paths = _classes_with_images(train)
    if not paths:
        return _of_kind("imagefolder", root)  # with its problem
    names = [name for name in class_folders(root) if train != root and name != "train"]
    others = {name: _classes_with_images(root / name) for name in names}
    val = next((name for name in names if others[name] and others[name].keys() <= paths.keys()), None)
    images = _with_images(_sampled_images(path for files in paths.values() for path in files), root)
    rows, val_rows, how = _rows_of(paths, root), [], f"the validation images are those in {val}"
    if val is not None:
        val_rows = _rows_of(others[val], root)
    else:
        rows, val_rows, how = _without_fifth(rows)
    unread = [name for name in names if name != val]
    counts = Counter(name for _, name in rows)
    return Survey(
        "classification", "image_list", {"path_column": "path", "target_column": "class"} | _channels(images),
        len(rows), bool(val_rows), _summary(len(rows), len(val_rows), _class_sizes(counts), images),
        _remarks(
            images, bool(val_rows), how, *_rare(counts),
            f"not read: {listed(unread, _MOST_NAMES)}" if unread else "",
        ),
        images, new_lists=_new_lists(("path", "class"), rows, val_rows),
    )  # fmt: skip


def _rows_of(paths: Mapping[str, Sequence[str]], root: Path) -> list[Row]:
    return [(path.removeprefix(f"{root}/"), name) for name, files in paths.items() for path in files]


def _new_lists(header: Row, train: Sequence[Row], val: Sequence[Row]) -> dict[str, list[Row]]:
    lists = {"train": [header, *train], "val": [header, *val]}
    return {split: rows for split, rows in lists.items() if len(rows) > 1}


def _without_fifth(rows: Sequence[Row], *, has_classes: bool = True) -> tuple[list[Row], list[Row], str]:
    """Return training rows, validation rows and a remark.

    A fifth is for validation, of each class if there are classes, by a hash of the path.
    """
    groups: dict[Row, list[Row]] = {}
    for row in rows:
        groups.setdefault(row[1:] if has_classes else (), []).append(row)
    val: set[Row] = set()
    for group in groups.values():
        group.sort(key=lambda row: sha256(row[0].encode()).digest())
        val.update(group[: len(group) // 5 or int(len(group) > 2)])
    whose = "of each class " if has_classes else ""
    remark = f"no validation images, so init wrote lists: a fifth {whose}is for validation"
    return [row for row in rows if row not in val], [row for row in rows if row in val], remark


def _summary(train: int, val: int, content: str, images: Images) -> str:
    return f"{counted(train, 'image')} for training, {val:,} for validation, {content}; {images}"


def _class_sizes(counts: Mapping[Any, int]) -> str:
    low, high = min(counts.values()), max(counts.values())
    sizes = f"{low:,}" if low == high else f"{low:,} to {high:,}"
    return f"{len(counts)} classes of {sizes}"


def _rare(counts: Mapping[Any, int]) -> list[str]:
    """Return the remarks on classes that can hardly be learned."""
    single = [str(name) for name, count in counts.items() if count == 1]
    remarks = [f"only 1 image of {listed(single, _MOST_NAMES)}"] if single else []
    return [*remarks, "there is only one class"] if len(counts) == 1 else remarks


def _segmentation_folder(root: Path) -> Survey:
    val = validation_folder(root)
    paths = image_paths(root / "train" / "images")
    images = _with_images(_sampled_images(paths), root / "train" / "images")
    folders = [root / "train" / "masks", *([] if val is None else [val / "masks"])]
    masks = [path for folder in folders for path in image_paths(folder)]
    values, number_read = _mask_values(masks)
    args, reason = _mask_args(values)
    is_part = "" if number_read == len(masks) else f" in {number_read:,} of {len(masks):,} masks"
    num_val = 0 if val is None else len(image_paths(val / "images"))
    content = f"masks of the values {_ranges(values)}{is_part}"
    return Survey(
        "segmentation", "segmentation_folder", {**args, **_channels(images)}, len(paths), val is not None,
        _summary(len(paths), num_val, content, images), _remarks(images, val is not None), images,
        args_reason=reason,
    )  # fmt: skip


def _mask_values(masks: Sequence[str]) -> tuple[list[int], int]:
    """Return the pixel values of masks, sorted, and the number of masks read within the time limit."""
    from PIL import Image

    values: set[int] = set()
    deadline, number_read = time.monotonic() + _MASKS_S, 0
    step = next((n for n in (997, 499, 97, 7) if len(masks) % n), 1)
    for number in range(len(masks)):
        path = masks[number * step % len(masks)]
        with suppress(OSError, ValueError), Image.open(path) as image:
            if image.mode not in MASK_MODES:
                raise UsageError(
                    f"--root: the mask {path} has colors (mode {image.mode}); save one class number per "
                    "pixel as gray or palette PNG"
                )
            factor = SCALED_MASKS.get(str(image.tile[0][3]), 1) if image.tile else 1
            colors: Any = image.getcolors(1 << 16)
            values.update(value // factor for _, value in colors)
        number_read += 1
        if time.monotonic() > deadline:
            break
    if not values:
        raise UsageError(f"--root: no mask of {len(masks)} can be opened; check masks/ for PNG files")
    return sorted(values), number_read


def _mask_args(values: Sequence[int]) -> tuple[dict[str, Any], str]:
    """Return ``data.args`` for these pixel values, and the reason."""
    numbers = [value for value in values if value != _VOID] or list(values)
    if max(numbers) < max(2, 2 * len(numbers)) and (len(numbers) > 1 or _VOID not in values):
        classes = max(2, max(numbers) + 1)
        void = "255 is ignored" if _VOID in values else "write ignore_index if a value means unlabeled"
        return {"num_classes": classes}, f"{void}"
    return {
        "num_classes": len(values), "mask_values": list(values),
    }, "the class numbers are the places in mask_values"  # fmt: skip


def _ranges(values: Sequence[int]) -> str:
    if list(values) == list(range(values[0], values[-1] + 1)):
        return f"{values[0]} to {values[-1]}"
    return listed(list(map(str, values)), 12)


def _coco(root: Path) -> Survey | None:
    files = annotation_files(root)
    if any(path.stat().st_size > MAX_ANNOTATIONS_BYTES for path in files.values()):
        return None
    try:
        return _of_annotations({part: json.loads(path.read_bytes()) for part, path in files.items()}, root)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        why = f"{type(error).__name__}: {shortened(str(error))}"
        raise UsageError(
            f"--root: {root}/train.json or val.json is not in the format of COCO ({why}); write it again"
        ) from error


def _of_annotations(documents: Mapping[str, Any], root: Path) -> Survey:
    train, has_val = documents["train"], "val" in documents
    folder = root / "train"
    images = _with_images(_sampled_images(folder / entry["file_name"] for entry in train["images"]), folder)
    counts = Counter(entry["category_id"] for entry in train["annotations"])
    names = {entry["id"]: str(entry["name"]) for entry in train["categories"]}
    missing = [name for number, name in names.items() if not counts[number]]
    bad = sum(map(_bad_boxes, documents.values()))
    boxes = f"{counts.total():,} boxes of {len(names)} classes"
    num_val = len(documents["val"]["images"]) if has_val else 0
    return Survey(
        "detection", "coco", _channels(images) | ({"bad_boxes": "drop"} if bad else {}),
        len(train["images"]), has_val, _summary(len(train["images"]), num_val, boxes, images),
        _remarks(
            images, has_val,
            f"no box of {listed(missing, _MOST_NAMES)}" if missing else "",
            f"dropped: {bad:,} of all boxes, outside of their image or without area" if bad else "",
        ),
        images,
    )  # fmt: skip


def _bad_boxes(document: Mapping[str, Any]) -> int:
    """Return the number of boxes that exceed their image by over a pixel, or have no area in it."""
    sides = {entry["id"]: (entry["width"], entry["height"]) for entry in document["images"]}
    number = 0
    for annotation in document["annotations"]:
        (left, top, width, height), (right, bottom) = annotation["bbox"], sides[annotation["image_id"]]
        is_inside = min(left, top) >= -1 and left + width <= right + 1 and top + height <= bottom + 1
        has_area = min(left + width, right) > max(left, 0) and min(top + height, bottom) > max(top, 0)
        number += not (is_inside and has_area)
    return number


def _image_list(folder: Path, task: str | None = None) -> Survey:
    root = folder.parent if folder.is_file() else folder
    lists = [folder, *(path for path in _lists(root) if path != folder)] if folder.is_file() else _lists(root)
    if not lists:
        raise UsageError(f"--root: {root} contains {_entries(root)}, and no list .csv or .tsv; {_LAYOUTS}")
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
        rows, val_rows, remark = _without_fifth(rows, has_classes=kind == "class")
        remarks.append(remark)
        new_lists = _new_lists(tuple(columns), rows, val_rows)
    else:
        new_lists = {}
        args |= {"train": os.path.relpath(lists[0], base), "val": os.path.relpath(val, base)}
    content = f"{listed(columns[1:], 3)} as {kind}"
    if kind == "class":
        content, more = _class_remarks(rows, val_rows, args)
        remarks += more
    images = _with_images(_sampled_images(base / row[0] for row in rows), base)
    return Survey(
        "regression" if kind == "number" else "classification", "image_list", args | _channels(images),
        len(rows), bool(val_rows), _summary(len(rows), len(val_rows), content, images),
        _remarks(images, bool(val_rows), *remarks), images, base if base != folder else None,
        f"columns of {lists[0].name}: {listed(list(table[0]), _MOST_NAMES)}", new_lists,
    )  # fmt: skip


def _class_remarks(
    rows: Sequence[Row], val_rows: Sequence[Row], args: dict[str, Any]
) -> tuple[str, list[str]]:
    """Return the classes in words, and remarks; add ``classes`` to ``args`` if train lacks some."""
    counts, val_classes = Counter(row[1] for row in rows), {row[1] for row in val_rows}
    remarks = _rare(counts)
    if val_classes and (absent := sorted(counts.keys() - val_classes)):
        remarks.append(f"no validation image of {listed(absent, _MOST_NAMES)}")
    if only_val := sorted(val_classes - counts.keys()):
        args["classes"] = sorted(counts.keys() | val_classes, key=_by_size)
        remarks.append(f"no training image of {listed(only_val, _MOST_NAMES)}")
    return _class_sizes(counts), remarks


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
    tried = rows[:: -(-len(rows) // _SAMPLED)]
    for folder in folders:
        for column in rows[0]:
            cells = [row[column] for row in tried]
            if sum(bool(cell) and (folder / cell).is_file() for cell in cells) * 2 > len(cells):
                return folder, column
    raise UsageError(
        f"--root: no column of {path} ({listed(list(rows[0]), _MOST_NAMES)}) names image files below {root}; "
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
    """Return ``data.args.target``: ``class``, ``classes`` or ``number``."""
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


def _text(root: Path) -> Survey:
    has_val_file = root.is_dir() and (root / "val.txt").is_file()
    file = root / "train.txt" if root.is_dir() else root
    length = _MAX_LENGTH
    while length > _MIN_LENGTH and file.stat().st_size * _VAL_FRACTION < _MIN_VAL_SEQUENCES * length:
        length //= 2
    args = {"sequence_length": length} | ({} if has_val_file else {"val_fraction": _VAL_FRACTION})
    read = root if has_val_file else file
    samples = data_facts("text").num_samples(DataConfig(name="text", root=str(read), args=args))
    summary = "" if samples is None else f"{counted(samples, 'sequence')} of {length} characters for training"
    remark = "the last tenth of the text is for validation"
    return Survey(
        "causal_lm", "text", args, samples, True, summary, [] if has_val_file else [remark],
        root=None if read == root else read,
    )  # fmt: skip


def _tokens(root: Path) -> Survey:
    args: dict[str, Any] = {"sequence_length": _MAX_LENGTH}
    summary = "files of tokens, such as nanoGPT's"
    if has_text := any(path.suffix in (".jsonl", ".txt") for path in root.iterdir()):
        args["tokenizer"] = "bytes"
        summary = "a text, which `hpc-train prepare` tokenizes once"
    samples = data_facts("tokens").num_samples(DataConfig(name="tokens", root=str(root), args=args))
    if samples is not None:
        summary += f": {counted(samples, 'sequence')} of {_MAX_LENGTH} tokens for training"
    has_val = any(path.name.startswith("val") or "_val" in path.name for path in root.iterdir())
    reason = "tokenizer: gpt2 has shorter sequences, but needs hpc-train[lm]" if has_text else ""
    return Survey(
        "causal_lm", "tokens", args, samples, has_val, summary, _no_val(has_val), args_reason=reason
    )


_SURVEYS: Mapping[str, Callable[[Path], Survey | None]] = {
    "imagefolder": _image_folder,
    "image_list": _image_list,
    "segmentation_folder": _segmentation_folder,
    "coco": _coco,
    "text": _text,
    "tokens": _tokens,
}
