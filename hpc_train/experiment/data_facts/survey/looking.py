"""Finds the data set that reads a folder; images with masks or boxes, and texts."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from hpc_train.errors import UsageError, counted, listed, shortened
from hpc_train.experiment.config.training_sections import DataConfig
from hpc_train.experiment.data_facts import root_layout
from hpc_train.experiment.data_facts.by_name import data_facts
from hpc_train.experiment.data_facts.data_size import MAX_ANNOTATIONS_BYTES, image_paths
from hpc_train.experiment.data_facts.image_facts import MASK_MODES, SCALED_MASKS
from hpc_train.experiment.data_facts.listed_data import SEPARATORS
from hpc_train.experiment.data_facts.raw_tokens import RAW_NAME
from hpc_train.experiment.data_facts.survey import content, listed_images

#: Time limit for reading masks: a class number that is first read by a rank would end its run.
_MASKS_S = 10.0
_VOID = 255
#: Tokens per sequence, and what a short text has for validation.
_MAX_LENGTH, _MIN_LENGTH, _VAL_FRACTION, _MIN_VAL_SEQUENCES = 128, 16, 0.1, 4
#: A larger text is tokenized once, by ``prepare``, instead of by each rank.
_MAX_TEXT_BYTES = 100 << 20
#: Fewer folders of images beside a list are no classes, such as ``images``.
_MIN_CLASSES = 2
#: Read of a file to recognize a text.
_HEAD_BYTES = 4096


def survey(folder: Path, name: str | None = None, task: str | None = None) -> content.Survey | None:
    """Return the content of ``folder``; ``name`` (``data.name``) and ``task`` are the user's choices.

    None for other data sets than those of files, and if the folder is not on this machine. Raises UsageError
    if it has no data, or an incomplete layout.
    """
    if not folder.exists():
        return None
    try:
        kind = name or _kind(folder, task)
        if kind is None:
            names = content.entries(folder)
            raise UsageError(f"--root: {folder} contains {names}, which no data set reads; {content.LAYOUTS}")
        if kind not in _SURVEYS:
            return None
        if name is None and kind == "imagefolder" and not listed_images.has_val_classes(folder):
            return listed_images.class_folders_alone(folder) or _of_kind(kind, folder)
        return _listed(folder, name, task) if kind == "image_list" else _of_kind(kind, folder)
    except OSError as error:
        raise UsageError(f"--root: {error.filename or folder}: {error.strerror}; make it readable") from error


def _listed(folder: Path, name: str | None, task: str | None) -> content.Survey | None:
    """Return the content of a list of images, or if it lists others that of the class folders beside it."""
    try:
        return listed_images.image_list(folder, task)
    except UsageError:
        is_chosen = name is not None or task == "regression" or folder.is_file()
        if is_chosen or len(listed_images.classes_with_images(folder)) < _MIN_CLASSES:
            raise
        return listed_images.class_folders_alone(folder)


def _of_kind(kind: str, folder: Path) -> content.Survey | None:
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
    kind = _kind_of_file(folder) if folder.is_file() else _kind_of_folder(folder)
    kinds = _KINDS.get(task or "", ())
    return kinds[0] if kinds and kind not in kinds else kind


def _kind_of_file(path: Path) -> str:
    """Return the data set of a file. Raises UsageError for one that is neither a list nor a text."""
    if path.suffix in SEPARATORS:
        return "image_list"
    if (why := root_layout.why_not_read(path)) is not None:
        raise UsageError(f"--root: {path} {why}; write a folder, a list or a text")
    with path.open("rb") as file:
        if b"\0" in file.read(_HEAD_BYTES) or path.suffix in (".json", ".jsonl"):
            remedy = "write the folder of the data; unpack an archive first"
            raise UsageError(f"--root: {path} is neither a text nor a list of images (.csv, .tsv); {remedy}")
    return "text"


def _kind_of_folder(folder: Path) -> str | None:
    train = folder / "train"
    if (folder / "train.json").is_file():
        return "coco"
    if (train / "images").is_dir() and (train / "masks").is_dir():
        return "segmentation_folder"
    if listed_images.lists_in(folder) and not (train.is_dir() and root_layout.class_folders(train)):
        return "image_list"
    if train.is_dir() and (root_layout.class_folders(train) or image_paths(train)):
        return "imagefolder"
    if (text := folder / "train.txt").is_file():
        return "text" if text.stat().st_size <= _MAX_TEXT_BYTES else "tokens"
    if any(RAW_NAME.fullmatch(path.name) or path.suffix == ".jsonl" for path in folder.iterdir()):
        return "tokens"
    return "imagefolder" if not train.is_dir() and listed_images.classes_with_images(folder) else None


def _segmentation_folder(root: Path) -> content.Survey:
    val = root_layout.validation_folder(root)
    paths = image_paths(root / "train" / "images")
    images = content.sampled_images(paths, root / "train" / "images")
    folders = [root / "train" / "masks", *([] if val is None else [val / "masks"])]
    masks = [path for folder in folders for path in image_paths(folder)]
    values, number_read = _mask_values(masks)
    args, reason = _mask_args(values)
    is_part = "" if number_read == len(masks) else f" in {number_read:,} of {len(masks):,} masks"
    num_val = 0 if val is None else len(image_paths(val / "images"))
    targets = f"masks of the values {_ranges(values)}{is_part}"
    return content.Survey(
        "segmentation", "segmentation_folder", args, len(paths), val is not None,
        content.summary_of(len(paths), num_val, targets, images),
        content.remarks_of(images, val is not None), images, args_reason=reason,
    )  # fmt: skip


def _mask_values(masks: Sequence[str]) -> tuple[list[int], int]:
    """Return the pixel values of masks, sorted, and the number of masks read within the time limit."""
    from PIL import Image

    values: set[int] = set()
    deadline, number_read = time.monotonic() + _MASKS_S, 0
    step = next((n for n in (997, 499, 97, 7) if len(masks) % n), 1)
    for number in range(len(masks)):
        path = masks[number * step % len(masks)]
        with suppress(OSError, ValueError), Image.open(path, formats=content.HEADER_FORMATS) as image:
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


def _coco(root: Path) -> content.Survey | None:
    """Return the content of ``root`` with train.json; None if reading it takes too long."""
    files = root_layout.annotation_files(root)
    if any(path.stat().st_size > MAX_ANNOTATIONS_BYTES for path in files.values()):
        return None
    try:
        return _of_annotations({part: json.loads(path.read_bytes()) for part, path in files.items()}, root)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        why = f"{type(error).__name__}: {shortened(str(error))}"
        raise UsageError(
            f"--root: {root}/train.json or val.json is not in the format of COCO ({why}); write it again"
        ) from error


def _of_annotations(documents: Mapping[str, Any], root: Path) -> content.Survey:
    train, has_val = documents["train"], "val" in documents
    folder = root / "train"
    images = content.sampled_images((folder / entry["file_name"] for entry in train["images"]), folder)
    counts = Counter(entry["category_id"] for entry in train["annotations"])
    names = {entry["id"]: str(entry["name"]) for entry in train["categories"]}
    missing = [name for number, name in names.items() if not counts[number]]
    bad = sum(map(_bad_boxes, documents.values()))
    boxes = f"{counts.total():,} boxes of {len(names)} classes"
    num_val = len(documents["val"]["images"]) if has_val else 0
    return content.Survey(
        "detection", "coco", {"bad_boxes": "drop"} if bad else {},
        len(train["images"]), has_val, content.summary_of(len(train["images"]), num_val, boxes, images),
        content.remarks_of(
            images, has_val,
            f"no box of {listed(missing, content.MOST_NAMES)}" if missing else "",
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


def _text(root: Path) -> content.Survey:
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
    return content.Survey(
        "causal_lm", "text", args, samples, True, summary, [] if has_val_file else [remark],
        root=None if read == root else read,
    )  # fmt: skip


def _tokens(root: Path) -> content.Survey:
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
    return content.Survey(
        "causal_lm", "tokens", args, samples, has_val, summary, content.no_val(has_val), args_reason=reason
    )


_SURVEYS: Mapping[str, Callable[[Path], content.Survey | None]] = {
    "imagefolder": listed_images.image_folder,
    "image_list": listed_images.image_list,
    "segmentation_folder": _segmentation_folder,
    "coco": _coco,
    "text": _text,
    "tokens": _tokens,
}
