"""Images with masks or boxes."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from hpc_train.data_facts.data_size import MAX_ANNOTATIONS_BYTES, image_paths
from hpc_train.data_facts.image_facts import MASK_MODES, SCALED_MASKS
from hpc_train.data_facts.root_layout import annotation_files, validation_folder
from hpc_train.data_facts.survey.content import (
    MOST_NAMES,
    Survey,
    channels_args,
    remarks_of,
    sampled_images,
    summary_of,
    with_images,
)
from hpc_train.errors import UsageError, listed, shortened

#: Time limit for reading masks: a class number that is first read by a rank would end its run.
_MASKS_S = 10.0
_VOID = 255


def segmentation_folder(root: Path) -> Survey:
    """Return the content of ``root`` with train/images and train/masks."""
    val = validation_folder(root)
    paths = image_paths(root / "train" / "images")
    images = with_images(sampled_images(paths), root / "train" / "images")
    folders = [root / "train" / "masks", *([] if val is None else [val / "masks"])]
    masks = [path for folder in folders for path in image_paths(folder)]
    values, number_read = _mask_values(masks)
    args, reason = _mask_args(values)
    is_part = "" if number_read == len(masks) else f" in {number_read:,} of {len(masks):,} masks"
    num_val = 0 if val is None else len(image_paths(val / "images"))
    content = f"masks of the values {_ranges(values)}{is_part}"
    return Survey(
        "segmentation", "segmentation_folder", {**args, **channels_args(images)}, len(paths), val is not None,
        summary_of(len(paths), num_val, content, images), remarks_of(images, val is not None), images,
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


def coco(root: Path) -> Survey | None:
    """Return the content of ``root`` with train.json; None if reading it takes too long."""
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
    images = with_images(sampled_images(folder / entry["file_name"] for entry in train["images"]), folder)
    counts = Counter(entry["category_id"] for entry in train["annotations"])
    names = {entry["id"]: str(entry["name"]) for entry in train["categories"]}
    missing = [name for number, name in names.items() if not counts[number]]
    bad = sum(map(_bad_boxes, documents.values()))
    boxes = f"{counts.total():,} boxes of {len(names)} classes"
    num_val = len(documents["val"]["images"]) if has_val else 0
    return Survey(
        "detection", "coco", channels_args(images) | ({"bad_boxes": "drop"} if bad else {}),
        len(train["images"]), has_val, summary_of(len(train["images"]), num_val, boxes, images),
        remarks_of(
            images, has_val,
            f"no box of {listed(missing, MOST_NAMES)}" if missing else "",
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
