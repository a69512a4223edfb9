# ruff: noqa: N803, N806  (shape suffixes)
"""``coco``: ``root/train.json`` in COCO's format, images in ``root/train/``; likewise ``val`` or ``test``.

A target is a dict: ``boxes`` (K, 4) float32, left, top, right, bottom in pixels; ``labels`` (K,) int64, 1…C;
``iscrowd`` (K,) int64; ``image_id`` () int64. Images without boxes are samples like all others.

The files are parsed once, by ``prepare``, which writes an index; without one each rank parses them, with the
same result.

Legend: N images, K boxes, of one image or of all, C categories.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from hpc_train.config.training_sections import DataConfig
from hpc_train.data_facts.image_args import CocoArgs
from hpc_train.data_facts.root_layout import annotation_files
from hpc_train.datasets.arguments import parse_args, refuse_rest, root_of
from hpc_train.datasets.base import DataSource
from hpc_train.datasets.index_files import Array, Index, index_of
from hpc_train.datasets.sources.infer import mean_and_std
from hpc_train.datasets.types import DataInfo
from hpc_train.errors import BadFileError

#: Pixels by which a box may exceed its image: coordinates are often rounded. It is clipped.
_TOLERANCE = 1.0


class CocoSplit:
    """The images of one JSON file, in its order."""

    def __init__(self, folder: Path, arrays: Mapping[str, Array], channels: int) -> None:
        """``arrays``: of the index; ``names`` and ``targets``, which are the ids, of the images (N,).

        Of the boxes, those of an image next to each other: ``corners`` (K, 4), ``labels`` and ``crowds``
        (K,), and where those of image i begin, ``starts`` (N + 1,).
        """
        self.channels = channels
        self._folder = os.fspath(folder)
        self._arrays = arrays
        self._names = arrays["names"]

    def __len__(self) -> int:
        return len(self._names)

    def file_content(self, index: int, /) -> tuple[bytes, dict[str, Any]]:
        """Return what the file of a sample contains, and its boxes."""
        with open(self._file(index), "rb", buffering=0) as file:  # noqa: PTH123  (as imagefolder)
            return file.read(), self.target(index)

    def target(self, index: int) -> dict[str, Any]:
        """Return the boxes of a sample; see the module."""
        arrays = self._arrays
        own = slice(*arrays["starts"][index : index + 2].tolist())
        return {
            "boxes": arrays["corners"][own],
            "labels": arrays["labels"][own],
            "iscrowd": arrays["crowds"][own],
            "image_id": arrays["targets"][index],
        }

    def path(self, index: int) -> Path:
        """Return the file of a sample."""
        return Path(self._file(index))

    def _file(self, index: int) -> str:
        return f"{self._folder}/{os.fsdecode(self._names[index])}"


def build(rest: str, config: DataConfig, *, download: bool) -> DataSource:
    """Return the two splits; without ``val.json`` and ``test.json`` there is no validation."""
    refuse_rest(config)
    args = parse_args(CocoArgs, config)
    files = annotation_files(root_of(config))
    index = index_of(config, list(files.values()), lambda: _parsed(files, args), download=download)
    splits = {
        part: CocoSplit(path.with_suffix(""), dict(index.splits[part]), args.channels)
        for part, path in files.items()
    }
    mean, std = mean_and_std(args.channels)
    info = DataInfo(len(index.class_names), args.channels, mean, std, index.class_names)
    return DataSource(splits["train"], splits.get("val"), info)


def _parsed(files: Mapping[str, Path], args: CocoArgs) -> Index:
    """Return the files as arrays. Raises BadFileError for the first entry that is wrong."""
    parsed = {part: _AnnotationFile(path, args) for part, path in files.items()}
    train = parsed["train"]
    for each in parsed.values():
        if each.categories != train.categories:
            raise BadFileError(
                f"data.root: the categories in {each.path} differ from those of {train.path}; make ids and "
                "names equal"
            )
    return Index({part: each.arrays() for part, each in parsed.items()}, tuple(train.categories.values()))


class _AnnotationFile:
    """A JSON file while it is read; only arrays are kept of it."""

    def __init__(self, path: Path, args: CocoArgs) -> None:
        self.path = path
        self._args = args
        self._document = self._read()
        #: Id → name, by id.
        self.categories = self._categories()

    def arrays(self) -> dict[str, Array]:
        """Return the arrays of ``CocoSplit``. Raises BadFileError for the first entry that is wrong."""
        image_ids, names, sides = self._images(self._document["images"])
        return {"names": names, "targets": image_ids, **self._boxes(image_ids, sides)}

    @property
    def _folder(self) -> Path:
        return self.path.with_suffix("")

    def _read(self) -> dict[str, list[dict[str, Any]]]:
        try:
            document = json.loads(self.path.read_bytes())
        except (ValueError, RecursionError) as error:
            raise self._error(f"is not valid JSON ({error})", "write it again, or get it again") from error
        for key in ("images", "annotations", "categories"):
            entries = document.get(key) if isinstance(document, dict) else None
            if not (isinstance(entries, list) and all(isinstance(each, dict) for each in entries)):
                raise self._error(f"has no list {key!r}", "write it in the format of COCO")
        found: dict[str, list[dict[str, Any]]] = document
        return found

    def _categories(self) -> dict[int, str]:
        found: dict[int, str] = {}
        for each in self._document["categories"]:
            number, name = each.get("id"), each.get("name")
            if type(number) is not int or not isinstance(name, str) or number in found:
                raise self._error(
                    f"has the category {each!r:.60}", "give each an id of its own, an integer, and a name"
                )
            found[number] = name
        if not found:
            raise self._error("has no categories", "write what its category_id refer to")
        return dict(sorted(found.items()))

    def _images(self, images: list[dict[str, Any]]) -> tuple[Array, Array, Array]:
        """Return ids (N,), file names (N,) and sides (N, 2), width and height."""
        there = _files(self._folder)
        ids: set[int] = set()
        for each in images:
            number, name = each.get("id"), each.get("file_name")
            sides = each.get("width"), each.get("height")
            if type(number) is not int or number in ids:
                raise self._error(f"has the image {each!r:.80}", "give each an id of its own, an integer")
            if not isinstance(name, str) or not all(type(side) is int and side > 0 for side in sides):
                raise self._error(
                    f"has the image {number} without file_name, width and height", "write them, in pixels"
                )
            if name not in there:
                raise self._error(
                    f"has the image {number}, whose file {self._folder / name} does not exist",
                    "fix file_name, or remove the image and its annotations",
                )
            ids.add(number)
        return (
            np.array([each["id"] for each in images], dtype=np.int64),
            np.array([os.fsencode(each["file_name"]) for each in images]),
            np.array([[each["width"], each["height"]] for each in images], dtype=np.float64).reshape(-1, 2),
        )

    def _boxes(self, image_ids: Array, sides_N2: Array) -> dict[str, Array]:
        annotations = self._document["annotations"]
        place = {number: place for place, number in enumerate(image_ids.tolist())}
        label = {number: label for label, number in enumerate(self.categories, start=1)}
        rows: list[tuple[float, ...]] = []
        for each in annotations:
            image, category = each.get("image_id"), each.get("category_id")
            if type(image) is not int or image not in place:
                raise self._bad(each, "which is none of its images", "fix image_id")
            if type(category) is not int or category not in label:
                raise self._bad(each, f"with the unknown category_id {category!r:.40}", "add the category")
            rows.append((place[image], label[category], bool(each.get("iscrowd", 0)), *self._box(each)))
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
        is_box = isinstance(box, list) and len(box) == 4 and all(type(each) in (int, float) for each in box)
        if not is_box or not all(map(math.isfinite, box or ())):
            raise self._bad(
                annotation, f"with the bbox {box!r:.60}", "write [left, top, width, height] in pixels"
            )
        return [float(each) for each in box or ()]

    def _check(
        self, annotations: list[dict[str, Any]], table: Array, corners_K4: Array, sides_N2: Array
    ) -> Array:
        """Return (K,) bool: which boxes to keep. Raises BadFileError for the first that is wrong."""
        sides_K2 = sides_N2[table[:, 0].astype(np.int64)]
        is_inside: Array = np.all(
            (corners_K4[:, :2] >= -_TOLERANCE) & (corners_K4[:, 2:] <= sides_K2 + _TOLERANCE), axis=1
        )
        # Clipped, and in the precision of the targets.
        clipped = np.clip(corners_K4, 0, np.tile(sides_K2, 2)).astype(np.float32)
        has_area = (clipped[:, 2:] > clipped[:, :2]).all(axis=1)
        is_right: Array = np.asarray(is_inside & has_area)
        if self._args.bad_boxes == "fail" and not is_right.all():
            first = int(np.argmin(is_right))
            width, height = sides_K2[first].astype(int).tolist()
            what = f"outside of its {width}x{height} pixels" if not is_inside[first] else "without area"
            raise self._bad(
                annotations[first],
                f"with the bbox {annotations[first]['bbox']} (left, top, width, height) {what}",
                "fix it, or write data.args: {bad_boxes: drop}",
            )
        return is_right

    def _bad(self, annotation: dict[str, Any], what: str, remedy: str) -> BadFileError:
        number, image = annotation.get("id"), annotation.get("image_id")
        return self._error(f"has the annotation {number!r:.40} of image {image!r:.40}, {what}", remedy)

    def _error(self, what: str, remedy: str) -> BadFileError:
        return BadFileError(f"data.root: {self.path} {what}; {remedy}")


def _files(folder: Path) -> set[str]:
    """Return the files below ``folder``, relative to it. One listing takes less time than a look at each."""
    found: set[str] = set()
    for parent, _, names in os.walk(folder):
        inner = os.path.relpath(parent, folder)
        found.update(names if inner == "." else (f"{inner}/{name}" for name in names))
    return found
