"""Folders of classes: those that ``imagefolder`` reads, and those without validation images."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from hpc_train.data_facts.data_size import image_paths
from hpc_train.data_facts.root_layout import class_folders, validation_folder
from hpc_train.data_facts.survey.content import (
    MOST_NAMES,
    Row,
    Survey,
    channels_args,
    class_sizes,
    new_lists_of,
    rare_classes,
    remarks_of,
    sampled_images,
    summary_of,
    with_images,
    without_fifth,
)
from hpc_train.errors import UsageError, listed


def image_folder(root: Path) -> Survey:
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
    images = with_images(sampled_images(path for files in paths.values() for path in files), root)
    counts = {name: len(files) for name, files in paths.items()}
    absent = [name for name in paths if val is not None and not val_counts.get(name)]
    extra = [name for name in class_folders(root) if name not in ("train", val and val.name)]
    return Survey(
        "classification", "imagefolder", channels_args(images), sum(counts.values()), val is not None,
        summary_of(sum(counts.values()), sum(val_counts.values()), class_sizes(counts), images),
        remarks_of(
            images, val is not None, *rare_classes(counts),
            f"{val and val.name} has no image of {listed(absent, MOST_NAMES)}" if absent else "",
            f"not read: {listed(extra, MOST_NAMES)}" if extra else "",
        ),
        images,
    )  # fmt: skip


def has_val_classes(root: Path) -> bool:
    """Return True if there are labeled validation images; those of ``test`` may have no classes."""
    val = validation_folder(root)
    return val is not None and bool(class_folders(val))


def class_folders_alone(root: Path) -> Survey | None:
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
    images = with_images(sampled_images(path for files in paths.values() for path in files), root)
    rows, val_rows, how = _rows_of(paths, root), [], f"the validation images are those in {val}"
    if val is not None:
        val_rows = _rows_of(others[val], root)
    else:
        rows, val_rows, how = without_fifth(rows)
    unread = [name for name in names if name != val]
    counts = Counter(name for _, name in rows)
    args = {"path_column": "path", "target_column": "class"} | channels_args(images)
    return Survey(
        "classification", "image_list", args,
        len(rows), bool(val_rows), summary_of(len(rows), len(val_rows), class_sizes(counts), images),
        remarks_of(
            images, bool(val_rows), how, *rare_classes(counts),
            f"not read: {listed(unread, MOST_NAMES)}" if unread else "",
        ),
        images, new_lists=new_lists_of(("path", "class"), rows, val_rows),
    )  # fmt: skip


def classes_with_images(folder: Path) -> dict[str, list[str]]:
    """Return class → paths of its images, for the folders with images."""
    paths = ((name, image_paths(folder / name)) for name in class_folders(folder))
    return {name: files for name, files in paths if files}


def _rows_of(paths: Mapping[str, Sequence[str]], root: Path) -> list[Row]:
    return [(path.removeprefix(f"{root}/"), name) for name, files in paths.items() for path in files]
