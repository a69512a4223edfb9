"""The folders and files that ``data.root`` must contain. Checked by commands, without torch, and by ranks."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

from hpc_train.experiment.config.problems import Problem
from hpc_train.experiment.data_facts.data_size import train_file

#: The folders, or with a suffix the files, of the validation data; the first existing one is read.
VALIDATION = ("val", "test")
#: Folders that macOS adds to an archive: never a class.
ARCHIVE_FOLDERS = ("__MACOSX", "_MACOSX")
#: First bytes of files that a clone has in place of large files → the command that fetches the content.
_POINTERS = {
    b"version https://git-lfs.github.com/spec/": "git lfs pull",
    b"/annex/objects/": "git annex get .",
}
#: Maximum size of such a file; the specification of Git LFS has the same limit.
_MAX_POINTER_BYTES = 1024
#: Names of the folder of the training data elsewhere.
_LIKE_TRAIN = ("train", "training", "train_set", "trainset", "train_images")
#: Maximum number of names in a message.
_MAX_NAMES = 5
#: File names of a numbered series: start, number, number of files, end.
_PART_OF = re.compile(r"(.*?)(\d{1,9})-of-(\d{1,9})(.*)")
_PART = re.compile(r"(.*\D|)(\d{1,9})()(\D*)")
#: Names of files that look like text or tokens, including compressed files and other splits.
_LIKE_TEXT = re.compile(r"(?:train|val)(?:[-_.].*)?|.*\.(?:txt|jsonl)(?:\..*)?", re.IGNORECASE)


def pointer_problem(start: bytes | bytearray) -> str | None:
    """Return the reason why content with this start is not that of its file, but a placeholder; else None."""
    command = next((command for magic, command in _POINTERS.items() if start.startswith(magic)), None)
    return command and f"is a pointer file of Git, not the content (run `{command}` in its repository)"


def why_not_read(path: Path) -> str | None:
    """Return the reason why a data file must not be read: it is not a regular file, nor a link to one.

    Likewise for a pointer of Git LFS. None if it may be read, or does not exist. Opening a pipe may block
    forever; a device may be endless.
    """
    try:
        status = path.stat()
        mode = status.st_mode
        if stat.S_ISREG(mode):
            if status.st_size > _MAX_POINTER_BYTES:
                return None
            with path.open("rb") as file:
                return pointer_problem(file.read(_MAX_POINTER_BYTES))
    except (OSError, ValueError):
        return None
    kinds = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a named pipe", stat.S_IFSOCK: "a socket"}
    return f"is {kinds.get(stat.S_IFMT(mode), 'a device')}, not a regular file"


def unread_texts(root: Path, read: Collection[Path]) -> list[str]:
    """Return sorted names below ``root`` that look like text or tokens and are not in ``read``."""
    return sorted(str(path.relative_to(root)) for path in _like_text(root) if path not in read)


def _like_text(root: Path) -> Iterator[Path]:
    for entry in root.iterdir():
        if _LIKE_TEXT.fullmatch(entry.name) and not entry.is_dir():
            yield entry
    for part in ("train", "val"):
        for folder, folders, names in os.walk(root / part):
            paths = [Path(folder, name) for name in folders + names if not name.startswith(".")]
            yield from (path for path in paths if path.name in names or path.is_symlink())


def missing_parts(names: Iterable[str]) -> Iterator[str]:
    """Yield a line per numbered series of files that is incomplete: ``train-00002-of-00010.jsonl``.

    Without ``-of-`` a series is incomplete if a few numbers between its first and last are missing.
    """
    series: dict[tuple[str, ...], dict[int, str]] = {}
    for name in names:
        if match := _PART_OF.fullmatch(name) or _PART.fullmatch(name):
            start, number, *rest = (group or "" for group in match.groups())
            series.setdefault((start, *rest), {})[int(number)] = name
    for (start, total, end), files in sorted(series.items()):
        first, last = min(files), max(files)
        expected = int(total) if total else last - first + 1
        if len(files) >= expected or (not total and len(files) <= expected // 2):
            continue
        missing = [number for number in range(first, last + 1) if number not in files][:_MAX_NAMES]
        of = f"-of-{total}" if total else ""
        between = f", without {', '.join(map(str, missing))}" if missing else ""
        yield f"{len(files)} of {expected} files {start}*{of}{end} are there{between}"


def class_folders(folder: Path) -> tuple[str, ...]:
    """Return the names of the class folders, in alphabetical order."""
    names = (entry.name for entry in folder.iterdir() if entry.is_dir() and not is_skipped(entry.name))
    return tuple(sorted(names))


def is_skipped(name: str) -> bool:
    """Return True for the name of a file or folder that image listings skip, such as a hidden one."""
    return name.startswith(".") or name in ARCHIVE_FOLDERS


def validation_folder(root: Path) -> Path | None:
    """Return the folder of the validation data below ``root``, or None."""
    return next((root / name for name in VALIDATION if (root / name).is_dir()), None)


def image_folder(root: Path) -> Problem | None:
    """Return the problem if ``imagefolder`` lacks a folder below ``root``."""
    if not root.is_dir():
        return _problem(f"{root} is not a folder on this machine", "fix the path")
    train = root / "train"
    if not train.is_dir():
        names = sorted(path.name for path in root.iterdir())
        message = f"{root} has no folder train (it contains {_listed(names) or 'nothing'})"
        if root.name == "train" and class_folders(root):
            return _problem(message, f"write data.root: {root.parent}")
        if other := [name for name in names if name.lower() in _LIKE_TRAIN and (root / name).is_dir()]:
            return _problem(message, f"rename {other[0]} to train")
        return _problem(message, "the images must be in train/<class>/")
    val = validation_folder(root)
    for folder in (train, *([] if val is None else [val])):
        if not class_folders(folder):
            return _problem(f"{folder} contains no class folders", f"put images into {folder}/<class>/")
    others = [name for name in class_folders(root) if name != "train"]
    if others and val is None:
        message = f"{root} has neither val nor test next to train, but {_listed(others)}"
        return _problem(message, "rename the folder of the validation images to val")
    return None


def segmentation_folder(root: Path) -> Problem | None:
    """Return the problem if ``segmentation_folder`` lacks a folder below ``root``."""
    val = validation_folder(root)
    for part in ("train", *([] if val is None else [val.name])):
        for kind in ("images", "masks"):
            if not (root / part / kind).is_dir():
                message = f"there is no folder {root / part / kind} on this machine"
                split = "train" if part == "train" else "val"
                remedy = f"the files must be in {root}/{split}/images/ and {root}/{split}/masks/"
                return _problem(message, remedy)
    return None


def annotation_files(root: Path) -> dict[str, Path]:
    """Return the JSON files of ``coco``: ``train`` and, if it exists, ``val``."""
    files = {"train": root / "train.json"}
    val = next((root / f"{name}.json" for name in VALIDATION if (root / f"{name}.json").is_file()), None)
    return files if val is None else files | {"val": val}


def coco(root: Path) -> Problem | None:
    """Return the problem if ``coco`` lacks a file or folder below ``root``."""
    if not (root / "train.json").is_file():
        published = sorted((root / "annotations").glob("instances_train*.json"))
        if published:
            folder = published[0].stem.removeprefix("instances_")
            links = f"ln -s annotations/{published[0].name} train.json; ln -s {folder} train"
            remedy = f"run `cd {root}; {links}`, and likewise for val"
            return _problem(f"{root} contains no train.json", remedy)
        remedy = "write the folder that contains it, and the images in train/"
        return _problem(f"{root} contains no train.json", remedy)
    for path in annotation_files(root).values():
        if not path.with_suffix("").is_dir():
            message = f"there is no folder {path.with_suffix('')} on this machine"
            return _problem(message, f"put the images of {path.name} there")
    return None


def text(root: Path) -> Problem | None:
    """Return the problem if ``text`` lacks a file at ``root``, a file or a folder."""
    if not root.exists():
        return _problem(f"{root} does not exist on this machine", "fix the path")
    if not train_file(root).is_file():
        return _problem(f"{root} has no file train.txt", "rename the training text to that")
    return None


def _problem(message: str, remedy: str) -> Problem:
    return Problem(("data", "root"), message, remedy, code="data.layout")


def _listed(names: list[str]) -> str:
    return ", ".join(names[:_MAX_NAMES])
