# ruff: noqa: N803, N806  (shape suffixes)
"""``coco``: ``root/train.json`` in COCO's format, images in ``root/train/``; likewise ``val`` or ``test``.

A target is a dict: ``boxes`` (K, 4) float32, left, top, right, bottom in pixels; ``labels`` (K,) int64, 1…C;
``iscrowd`` (K,) int64; ``image_id`` () int64. Images without boxes are ordinary samples.

The files are parsed once, by ``prepare``, which writes an index; without an index each rank parses them, with
the same result.

Legend: N images, K boxes, of one image or of all, C categories.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np

from hpc_train.console import say
from hpc_train.errors import BadFileError, counted, listed
from hpc_train.experiment.config.training_sections import DataConfig
from hpc_train.experiment.data_facts.data_size import COUNT_LIMIT_S
from hpc_train.experiment.data_facts.image_facts import CocoArgs
from hpc_train.experiment.data_facts.root_layout import annotation_files
from hpc_train.training.datasets.base import DataSource, parse_args, refuse_rest, root_of
from hpc_train.training.datasets.decoding import read_image
from hpc_train.training.datasets.images import PixelRules, image_content
from hpc_train.training.datasets.index_files import Array, Index, Layout, index_of
from hpc_train.training.datasets.joint import MINIMUM_SIDE
from hpc_train.training.datasets.sources.infer import image_info
from hpc_train.training.datasets.sources.named_files import NamedFiles, class_remarks, file_remarks
from hpc_train.training.datasets.sources.values import MAX_INTEGER, text_problem
from hpc_train.training.datasets.token_writing import without_repeated

#: Pixels by which a box may exceed its image, because coordinates are often rounded. It is clipped.
_TOLERANCE = 1.0
#: Maximum side of an image, and coordinate, in pixels: more than any image format supports.
_MAX_SIDE = 2**31 - 1
#: Primes larger than any number of images that can be read within the time limit.
_STRIDES = (7919, 104729)

#: Arrays of a split, in the index.
_ARRAYS = frozenset({"targets", "names", "sides", "starts", "corners", "labels", "crowds"})


class CocoSplit:
    """The images of one JSON file, in its order."""

    def __init__(self, folder: Path, arrays: Mapping[str, Array], channels: int) -> None:
        """``arrays``: arrays of the index; ``names`` and ``targets`` (the ids) of the images, (N,).

        ``sides`` (N, 2) are their width and height. The boxes are grouped by image: ``corners`` (K, 4),
        ``labels`` and ``crowds`` (K,), and the first box of each image, ``starts`` (N + 1,).
        """
        self.channels = channels
        self._folder = os.fspath(folder)
        self._arrays = arrays
        self._names = arrays["names"]

    def __len__(self) -> int:
        return len(self._names)

    def file_content(self, index: int, /) -> tuple[bytes, dict[str, Any]]:
        """Return the content of a sample's file, and its boxes."""
        content = image_content(self._file(index), self._where(index))
        return content, self.target(index)

    def check_sides(self, index: int, height: int, width: int) -> None:
        """Raise BadFileError if the pixels of a sample are not those that its boxes refer to."""
        stated = tuple(self._arrays["sides"][index].tolist())
        if stated != (width, height):
            is_turned = stated == (height, width)
            cause = (
                "perhaps the EXIF orientation was applied before it was annotated: see data.exif_orientation"
                if is_turned
                else ("perhaps it was resized after it was annotated")
            )
            raise BadFileError(
                f"data: {self._file(index)} has {width}x{height} pixels, and {self._where(index)} has "
                f"{stated[0]}x{stated[1]} ({cause}); make pixels and boxes match, and write width and height "
                "of the file"
            )

    def target(self, index: int) -> dict[str, Any]:
        """Return the boxes of a sample; see the module."""
        arrays = self._arrays
        boxes = slice(*arrays["starts"][index : index + 2].tolist())
        return {
            "boxes": arrays["corners"][boxes],
            "labels": arrays["labels"][boxes],
            "iscrowd": arrays["crowds"][boxes],
            "image_id": arrays["targets"][index],
        }

    @property
    def num_boxes(self) -> int:
        """Return the number of boxes of all images."""
        return len(self._arrays["labels"])

    def count_too_small(self, config: DataConfig) -> int:
        """Return the number of boxes that ``joint.Geometry`` drops in training, after the resize alone."""
        canvas = config.height_and_width
        if canvas is None or config.augment.random_resized_crop is not None:
            return 0
        sides_N2, corners_K4 = self._arrays["sides"], self._arrays["corners"]
        scales_N = np.min(np.array([canvas[1], canvas[0]]) / np.maximum(sides_N2, 1), axis=1)
        scales_K = np.repeat(scales_N, np.diff(self._arrays["starts"]))
        shorter_K = np.min(corners_K4[:, 2:] - corners_K4[:, :2], axis=1) * scales_K
        return int(np.count_nonzero((shorter_K < MINIMUM_SIDE) & (self._arrays["crowds"] == 0)))

    def path(self, index: int) -> Path:
        """Return the file of a sample."""
        return Path(self._file(index))

    def _file(self, index: int) -> str:
        return os.path.join(self._folder, os.fsdecode(self._names[index]))  # noqa: PTH118  (as image_list)

    def _where(self, index: int) -> str:
        return f"{self._folder}.json, image {self._arrays['targets'][index]}"


def build(rest: str, config: DataConfig, *, download: bool) -> DataSource:
    """Return the two splits; without ``val.json`` and ``test.json`` there is no validation."""
    refuse_rest(config)
    args = parse_args(CocoArgs, config)
    root = root_of(config)
    files = annotation_files(root)
    make = partial(_parsed, root, files, args, has_remarks=download)
    index = index_of(config, list(files.values()), Layout(frozenset(files), _ARRAYS), make, download=download)
    for remark in index.facts.get("remarks", ()) if download else ():
        say(f"data.root: {remark}")
    splits = {
        part: CocoSplit(path.with_suffix(""), dict(index.splits[part]), args.channels)
        for part, path in files.items()
    }
    if download and (count := splits["train"].count_too_small(config)):
        say(
            f"data.image_size: {count} of the {splits['train'].num_boxes} training boxes have a side of less "
            "than 1 pixel in images of this size, and are not trained on; write a larger size"
        )
    if download and config.on_bad_sample == "fail":
        for split in splits.values():
            _check_sides(split, PixelRules.of(config))
    return DataSource(splits["train"], splits.get("val"), image_info(index.class_names, args.channels))


def _check_sides(split: CocoSplit, rules: PixelRules) -> None:
    """Compare the sizes of image files with the JSON file, evenly and within a time limit."""
    deadline, count = time.monotonic() + COUNT_LIMIT_S, len(split)
    step = next((n for n in _STRIDES if math.gcd(n, count) == 1), 1)
    for number in range(count):
        if time.monotonic() > deadline:
            return
        index = number * step % count
        sides = _sides_of_file(split, index, rules)
        if sides is not None:
            split.check_sides(index, *sides)


def _sides_of_file(split: CocoSplit, index: int, rules: PixelRules) -> tuple[int, int] | None:
    """Return height and width; None for an unreadable file, which is reported with its sample."""
    try:
        shape = read_image(split.file_content(index)[0], split.channels, index, rules).shape
    except Exception:  # any error of Pillow
        return None
    return shape[-2], shape[-1]


def _parsed(root: Path, files: Mapping[str, Path], args: CocoArgs, *, has_remarks: bool) -> Index:
    """Return the files as arrays. Raises BadFileError for the first invalid entry."""
    parsed = {part: _AnnotationFile(root, path, args) for part, path in files.items()}
    train = parsed["train"]
    for file in parsed.values():
        if file.categories != train.categories:
            raise BadFileError(
                f"data.root: the categories in {file.path} differ from those of {train.path}; make ids and "
                "names equal"
            )
    splits, names = {part: file.arrays() for part, file in parsed.items()}, tuple(train.categories.values())
    facts: dict[str, Any] = {}
    if has_remarks:
        unused = sorted(path.name for path in root.glob("*.json") if path not in files.values())
        are = "is" if len(unused) == 1 else "are"
        remarks = [f"{listed(unused, 5)} in {root} {are} not read"] if unused else []
        # train and val may be links to one folder, whose images only the JSON files split.
        by_folder: dict[str, list[tuple[Path, str, list[bytes]]]] = {}
        for part, file in parsed.items():
            entry = file.folder, file.path.name, splits[part]["names"].tolist()
            by_folder.setdefault(os.path.realpath(file.folder), []).append(entry)
        for entries in by_folder.values():
            remarks += file_remarks(entries[0][0], {name: names for _, name, names in entries})
        for file in parsed.values():
            remarks += file.remarks
        remarks += class_remarks(names, {part: split["labels"] - 1 for part, split in splits.items()})
        facts["remarks"] = remarks
    return Index(splits, names, facts)


class _AnnotationFile:
    """A JSON file while it is read; only arrays are kept of it."""

    def __init__(self, root: Path, path: Path, args: CocoArgs) -> None:
        self.path = path
        self.folder = path.with_suffix("")
        #: Sentences about entries that may be mistakes.
        self.remarks: list[str] = []
        self._names = NamedFiles(root, args.roots, self.folder)
        self._args = args
        self._document = self._read()
        #: Id → name, by id.
        self.categories = self._categories()

    def arrays(self) -> dict[str, Array]:
        """Return the arrays of ``CocoSplit``. Raises BadFileError for the first invalid entry."""
        image_ids, names, sides = self._images(self._document["images"])
        boxes = self._boxes(image_ids, sides)
        return {"names": names, "targets": image_ids, "sides": sides.astype(np.int64), **boxes}

    def _read(self) -> dict[str, list[dict[str, Any]]]:
        try:
            document = json.loads(self.path.read_bytes(), object_pairs_hook=without_repeated)
        except (ValueError, RecursionError) as error:
            raise self._error(f"is not valid JSON ({error})", "write it again, or get it again") from error
        for key in ("images", "annotations", "categories"):
            entries = document.get(key) if isinstance(document, dict) else None
            if not (isinstance(entries, list) and all(isinstance(entry, dict) for entry in entries)):
                raise self._error(f"has no list {key!r}", "write it in the format of COCO")
        return document

    def _categories(self) -> dict[int, str]:
        names: dict[int, str] = {}
        for category in self._document["categories"]:
            number, name = category.get("id"), category.get("name")
            if not _is_integer(number) or not isinstance(name, str) or text_problem(name) or number in names:
                raise self._error(
                    f"has the category {category!r:.60}", "give each an id of its own, an integer, and a name"
                )
            names[number] = name
        if not names:
            raise self._error("has no categories", "write what its category_id refer to")
        return dict(sorted(names.items()))

    def _images(self, images: list[dict[str, Any]]) -> tuple[Array, Array, Array]:
        """Return ids (N,), file names (N,) and sides (N, 2), width and height."""
        existing = _files(self.folder)
        ids: set[int] = set()
        names: list[bytes] = []
        for image in images:
            number, name = image.get("id"), image.get("file_name")
            sides = image.get("width"), image.get("height")
            if not _is_integer(number) or number in ids:
                raise self._error(f"has the image {image!r:.80}", "give each an id of its own, an integer")
            if not isinstance(name, str) or None in sides:
                raise self._error(
                    f"has the image {number} without file_name, width and height", "write them, in pixels"
                )
            if not all(_is_integer(side) and 0 < side <= _MAX_SIDE for side in sides):
                raise self._error(
                    f"has the image {number} of {sides[0]!r:.40} x {sides[1]!r:.40} pixels (width x height)",
                    "write whole numbers from 1",
                )
            names.append(self._names.checked(name, f"{self.path}, image {number}"))
            # Files behind a link to a folder are not in this listing.
            if name not in existing and not (self.folder / name).is_file():
                raise self._error(
                    f"has the image {number}, whose file {self.folder / name} does not exist",
                    "fix file_name, or remove the image and its annotations",
                )
            ids.add(number)
        return (
            np.array([image["id"] for image in images], dtype=np.int64),
            np.array(names),
            np.array([[image["width"], image["height"]] for image in images], dtype=np.float64).reshape(
                -1, 2
            ),
        )

    def _boxes(self, image_ids: Array, sides_N2: Array) -> dict[str, Array]:
        annotations = self._document["annotations"]
        place = {number: place for place, number in enumerate(image_ids.tolist())}
        label = {number: label for label, number in enumerate(self.categories, start=1)}
        rows: list[tuple[float, ...]] = []
        for annotation in annotations:
            image, category = annotation.get("image_id"), annotation.get("category_id")
            if not _is_integer(image) or image not in place:
                raise self._bad(annotation, "which is none of its images", "fix image_id")
            if not _is_integer(category) or category not in label:
                raise self._bad(
                    annotation, f"with the unknown category_id {category!r:.40}", "add the category"
                )
            crowd = annotation.get("iscrowd", 0)
            if not isinstance(crowd, (int, float)) or crowd not in (0, 1):
                raise self._bad(annotation, f"with iscrowd {crowd!r:.40}", "write 0 or 1")
            rows.append((place[image], label[category], crowd, *self._box(annotation)))
        repeated = len(rows) - len(set(rows))
        if repeated:
            self.remarks.append(f"{self.path.name} has {counted(repeated, 'annotation')} more than once")
        if ignored := sum(bool(annotation.get("ignore")) for annotation in annotations):
            self.remarks.append(
                f"{self.path.name} has {counted(ignored, 'annotation')} with the key ignore, which is not "
                "read; for boxes that are not trained on, and need not be detected, write iscrowd: 1"
            )
        table = np.array(rows, dtype=np.float64).reshape(-1, 7)
        corners_K4 = np.concatenate([table[:, 3:5], table[:, 3:5] + table[:, 5:7]], axis=1)
        is_kept = self._check(annotations, table, corners_K4, sides_N2)
        places_K = table[:, 0].astype(np.int64)
        sides_K4 = np.tile(sides_N2[places_K], 2)
        order = np.argsort(places_K, kind="stable")
        order = order[is_kept[order]]
        counts = np.bincount(places_K[order], minlength=len(image_ids))
        return {
            "corners": np.clip(corners_K4, 0, sides_K4)[order].astype(np.float32),
            "labels": table[order, 1].astype(np.int64),
            "crowds": table[order, 2].astype(np.int64),
            "starts": np.concatenate([[0], np.cumsum(counts)]),
        }

    def _box(self, annotation: dict[str, Any]) -> list[float]:
        box = annotation.get("bbox")
        is_box = (
            isinstance(box, list) and len(box) == 4 and all(type(number) in (int, float) for number in box)
        )
        if not is_box or not all(abs(number) <= _MAX_SIDE for number in box or ()):
            raise self._bad(
                annotation, f"with the bbox {box!r:.60}", "write [left, top, width, height] in pixels"
            )
        return [float(number) for number in box or ()]

    def _check(
        self, annotations: list[dict[str, Any]], table: Array, corners_K4: Array, sides_N2: Array
    ) -> Array:
        """Return (K,) bool, True for boxes to keep. Raises BadFileError for the first invalid box."""
        sides_K2 = sides_N2[table[:, 0].astype(np.int64)]
        is_inside: Array = np.all(
            (corners_K4[:, :2] >= -_TOLERANCE) & (corners_K4[:, 2:] <= sides_K2 + _TOLERANCE), axis=1
        )
        # Clipped, and in the dtype of the targets.
        clipped = np.clip(corners_K4, 0, np.tile(sides_K2, 2)).astype(np.float32)
        has_area = (clipped[:, 2:] > clipped[:, :2]).all(axis=1)
        is_right: Array = np.asarray(is_inside & has_area)
        if (corners_K4[:, 2:] <= 1).all() and (corners_K4 % 1).any():
            box = annotations[0]["bbox"]
            problem = f"with the bbox {box}, a fraction of the image like that of all others"
            raise self._bad(annotations[0], problem, "write [left, top, width, height] in pixels")
        boxes_K4 = table[:, 3:7]
        if _areas_are_of_corners(annotations, boxes_K4):
            problem = (
                f"with the bbox {annotations[0]['bbox']} and the area {annotations[0]['area']}, which is "
                "that of left, top, right, bottom, like the areas of all others"
            )
            raise self._bad(annotations[0], problem, "write [left, top, width, height] in pixels")
        if is_right.all():
            return is_right
        are_corners = np.all(
            (boxes_K4[:, 2:] > boxes_K4[:, :2]) & (boxes_K4[:, 2:] <= sides_K2 + _TOLERANCE), axis=1
        )
        hint = "; all boxes of the file would fit as left, top, right, bottom" if are_corners.all() else ""
        first = int(np.argmin(is_right))
        if self._args.bad_boxes == "fail":
            width, height = sides_K2[first].astype(int).tolist()
            problem = f"outside of its {width}x{height} pixels" if not is_inside[first] else "without area"
            raise self._bad(
                annotations[first],
                f"with the bbox {annotations[first]['bbox']} (left, top, width, height) {problem}{hint}",
                "fix it, or write data.args: {bad_boxes: drop}",
            )
        dropped = len(is_right) - int(is_right.sum())
        self.remarks.append(
            f"{self.path.name}: {dropped} of {len(is_right)} boxes are dropped, without area or outside of "
            f"their images (first: the annotation {annotations[first].get('id')!r:.40}){hint}"
        )
        return is_right

    def _bad(self, annotation: dict[str, Any], problem: str, remedy: str) -> BadFileError:
        number, image = annotation.get("id"), annotation.get("image_id")
        return self._error(f"has the annotation {number!r:.40} of image {image!r:.40}, {problem}", remedy)

    def _error(self, problem: str, remedy: str) -> BadFileError:
        return BadFileError(f"data.root: {self.path} {problem}; {remedy}")


def _areas_are_of_corners(annotations: list[dict[str, Any]], boxes_K4: Array) -> bool:
    """Return True if all annotations have the area of (left, top, right, bottom), not of width and height."""
    areas = [annotation.get("area") for annotation in annotations]
    if not areas or not all(type(area) in (int, float) for area in areas):
        return False
    areas_K = np.array([float(min(area or 0, _MAX_SIDE**2)) for area in areas])
    widths_K2, corners_K2 = boxes_K4[:, 2:], boxes_K4[:, 2:] - boxes_K4[:, :2]
    stated, other = (
        np.isclose(areas_K, sides_K2.prod(axis=1), rtol=0.01, atol=1) for sides_K2 in (corners_K2, widths_K2)
    )
    return bool((corners_K2 > 0).all() and stated.all() and not other.any())


def _is_integer(value: Any) -> TypeGuard[int]:
    return type(value) is int and abs(value) <= MAX_INTEGER


def _files(folder: Path) -> set[str]:
    """Return the files below ``folder``, relative to it. One listing is faster than a check per file."""
    files: set[str] = set()
    for parent, _, names in os.walk(folder):
        inner = os.path.relpath(parent, folder)
        files.update(names if inner == "." else (f"{inner}/{name}" for name in names))
    return files
