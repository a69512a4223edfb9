"""Finds the data set that reads a folder, and calls its survey."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from hpc_train.data_facts.by_name import data_facts
from hpc_train.data_facts.data_size import image_paths
from hpc_train.data_facts.listed_data import SEPARATORS
from hpc_train.data_facts.raw_tokens import RAW_NAME
from hpc_train.data_facts.root_layout import class_folders
from hpc_train.data_facts.survey.class_folders import (
    class_folders_alone,
    classes_with_images,
    has_val_classes,
    image_folder,
)
from hpc_train.data_facts.survey.content import LAYOUTS, Survey, entries
from hpc_train.data_facts.survey.image_list import image_list, lists_in
from hpc_train.data_facts.survey.scenes import coco, segmentation_folder
from hpc_train.data_facts.survey.texts import text, tokens
from hpc_train.errors import UsageError

#: A larger text is tokenized once, by ``prepare``, instead of by each rank.
_MAX_TEXT_BYTES = 100 << 20


def survey(folder: Path, name: str | None = None, task: str | None = None) -> Survey | None:
    """Return the content of ``folder``; ``name`` (``data.name``) and ``task`` are the user's choices.

    None for other data sets than those of files, and if the folder is not on this machine. Raises UsageError
    if it has no data, or an incomplete layout.
    """
    if not folder.exists():
        return None
    kind = name or _kind(folder, task)
    if kind is None:
        raise UsageError(f"--root: {folder} contains {entries(folder)}, which no data set reads; {LAYOUTS}")
    if kind not in _SURVEYS:
        return None
    try:
        if name is None and kind == "imagefolder" and not has_val_classes(folder):
            return class_folders_alone(folder) or _of_kind(kind, folder)
        return image_list(folder, task) if kind == "image_list" else _of_kind(kind, folder)
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
    if lists_in(folder) and not (train.is_dir() and class_folders(train)):
        return "image_list"
    if train.is_dir() and (class_folders(train) or image_paths(train)):
        return "imagefolder"
    if (text := folder / "train.txt").is_file():
        return "text" if text.stat().st_size <= _MAX_TEXT_BYTES else "tokens"
    if any(RAW_NAME.fullmatch(path.name) or path.suffix == ".jsonl" for path in folder.iterdir()):
        return "tokens"
    return "imagefolder" if not train.is_dir() and classes_with_images(folder) else None


_SURVEYS: Mapping[str, Callable[[Path], Survey | None]] = {
    "imagefolder": image_folder,
    "image_list": image_list,
    "segmentation_folder": segmentation_folder,
    "coco": coco,
    "text": text,
    "tokens": tokens,
}
