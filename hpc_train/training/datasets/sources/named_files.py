"""The files in a list: the permitted names, and differences from the files of the folder.

A list may have been written by someone else, so it may name only regular files below ``data.root`` or a
folder of ``data.args.roots``. Links are followed, because folders of images on shared storage are often
linked.
"""

from __future__ import annotations

import os
import re
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hpc_train.errors import BadFileError, counted, listed, printable, shortened
from hpc_train.experiment.data_facts.data_size import COUNT_LIMIT_S, IMAGE_EXTENSIONS
from hpc_train.paths import expanded
from hpc_train.training.datasets.sources.values import alike, cell_text, class_number, text_problem

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
#: Minimum number of classes at which "a class per sample" is reported.
_MANY_CLASSES = 20
#: A class name that is a number with a fraction.
_FRACTION = re.compile(r"-?\d*\.\d*[1-9]\d*(e[+-]?\d+)?", re.IGNORECASE)


class NamedFiles:
    """The names, relative to ``folder``, that a list may contain."""

    def __init__(self, root: Path, roots: Sequence[str], folder: Path | None = None) -> None:
        """``root``, ``roots``: ``data.root`` and ``data.args.roots``. ``folder``: default ``root``."""
        self._root = root
        self._folder = os.fspath(folder or root)
        self._extra_roots = [os.path.abspath(expanded(path)) for path in roots]  # noqa: PTH100  (.. removed)
        self._root_paths = [os.path.abspath(root), os.path.realpath(root)]  # noqa: PTH100

    def checked(self, name: Any, where: str) -> bytes:
        """Return the name in bytes. Raises BadFileError unless it is a name below the root or the roots."""
        if not isinstance(name, str):
            raise _name_error(name, where, f"is {type(name).__name__}, not text", "write its path as text")
        if problem := text_problem(name):
            raise _name_error(name, where, problem.removeprefix("which "), "fix the name")
        if _URL.match(name):
            raise _name_error(name, where, "is a URL", "download the files, and write their paths")
        if "\\" in name and not os.path.exists(self._in_folder(name)):  # noqa: PTH110  (Path: takes longer)
            forward = name.replace("\\", "/")
            if os.path.exists(self._in_folder(forward)):  # noqa: PTH110
                raise _name_error(name, where, "has backslashes, as on Windows", f"write {forward}")
        if (name.startswith("/") or ".." in name) and not self._is_allowed(name):
            raise _name_error(
                name,
                where,
                "leads out of its folder by .." if ".." in name.split("/") else f"is not below {self._root}",
                f"write a name relative to {self._folder}, or data.args: {{roots: [FOLDER]}} with the folder "
                "of such files",
            )
        return os.fsencode(name)

    def _is_allowed(self, name: str) -> bool:
        is_absolute, has_parent = name.startswith("/"), ".." in name.split("/")
        if not is_absolute and not has_parent:
            return True
        # A name with ``..`` is certainly below the root only if no folder before it is a link.
        roots = self._extra_roots + (self._root_paths if not has_parent else [])
        path = os.path.normpath(os.path.join(self._folder, name))  # noqa: PTH118
        return any(os.path.commonpath([root, os.path.abspath(path)]) == root for root in roots)  # noqa: PTH100

    def path(self, name: bytes) -> str:
        """Return the path of a checked name."""
        return self._in_folder(os.fsdecode(name))

    def _in_folder(self, name: str) -> str:
        return os.path.join(self._folder, name)  # noqa: PTH118  (Path: takes longer)


def _name_error(name: Any, where: str, problem: str, remedy: str) -> BadFileError:
    return BadFileError(
        f"data.root: {where} names the file {shortened(cell_text(name), 200)!r}, which {problem}; {remedy}"
    )


def file_remarks(folder: Path, lists: Mapping[str, Sequence[bytes]]) -> Iterator[str]:
    """Yield remarks on files in several rows, images below ``folder`` in no row, and files that don't exist.

    ``lists``: file of the list → its names.
    """
    normal = {title: [os.path.normpath(name) for name in names] for title, names in lists.items()}
    for title, names in normal.items():
        repeated = [name for name, count in Counter(names).items() if count > 1]
        if repeated:
            yield (
                f"{title} has {counted(len(repeated), 'file')} in more than one row: {_examples(repeated)}"
            )
    titles = list(normal)
    for number, title in enumerate(titles[1:], start=1):
        shared = sorted(set(normal[title]).intersection(*(normal[other] for other in titles[:number])))
        if shared:
            yield f"{title} and {titles[0]} both name {counted(len(shared), 'file')}: {_examples(shared)}"
    yield from _folder_remarks(folder, set().union(*normal.values()))


def _folder_remarks(folder: Path, names: set[bytes]) -> Iterator[str]:
    deadline, unnamed, files_seen = time.monotonic() + COUNT_LIMIT_S, [], set()
    root = os.fsencode(folder)
    relative_names = {os.path.relpath(name, root) if name.startswith(b"/") else name for name in names}
    for parent, folders, files in os.walk(root):
        folders[:] = sorted(name for name in folders if not name.startswith(b"."))
        if time.monotonic() > deadline:
            yield f"{folder} has too many files to look for images that no list names"
            return
        inner = os.path.relpath(parent, root)
        for name in files:
            path = name if inner == b"." else inner + b"/" + name
            is_image = os.fsdecode(name).lower().endswith(IMAGE_EXTENSIONS) and not name.startswith(b".")
            if path in relative_names:
                files_seen.add(path)
            elif is_image:
                unnamed.append(path)
    if unnamed:
        are = "is" if len(unnamed) == 1 else "are"
        examples = _examples(sorted(unnamed))
        yield f"{counted(len(unnamed), 'image')} below {folder} {are} in no list: {examples}"
    missing = []
    for path in sorted(relative_names - files_seen):
        if time.monotonic() > deadline:
            return
        if not os.path.isfile(os.path.join(root, path)):  # noqa: PTH113, PTH118  (links are not in the walk)
            missing.append(path)
    if missing:
        exist = "does not exist" if len(missing) == 1 else "do not exist"
        yield f"{counted(len(missing), 'listed file')} below {folder} {exist}: {_examples(missing)}"


def target_remarks(rows: Iterable[tuple[bytes, Any]]) -> Iterator[str]:
    """Yield a remark on files with different targets in different rows. ``rows``: name and target."""
    first: dict[bytes, Any] = {}
    different = {
        name for row, target in rows if first.setdefault(name := os.path.normpath(row), target) != target
    }
    if different:
        have = "has" if len(different) == 1 else "have"
        examples = _examples(sorted(different))
        yield f"{counted(len(different), 'file')} {have} different targets in different rows: {examples}"


def class_remarks(names: Sequence[str], classes: Mapping[str, Any]) -> Iterator[str]:
    """Yield remarks on the classes. ``classes``: split → class numbers (N,) from 0."""
    yield from name_remarks(names)
    training = classes.get("train", ())
    if len(names) >= _MANY_CLASSES and 2 * len(names) > len(training):
        yield (
            f"{len(names)} classes for {len(training)} training samples; if the targets are ids or captions, "
            "name others"
        )
    fractions = [name for name in names if _FRACTION.fullmatch(name)]
    if fractions and len(fractions) > len(names) // 2:
        yield (
            f"{len(fractions)} of {len(names)} classes are numbers with a fraction ({listed(fractions, 3)}); "
            "if they are amounts, write data.args.target: number, and task: regression"
        )
    for split, numbers in classes.items():
        present = set(numbers.tolist())
        absent = [shortened(name) for number, name in enumerate(names) if number not in present]
        if absent:
            word = "training" if split == "train" else "validation"
            yield f"{len(absent)} of {len(names)} classes have no {word} sample: {listed(absent, 5)}"


def name_remarks(names: Sequence[str]) -> Iterator[str]:
    """Yield remarks on classes that may be one class, or none, or in an unexpected order."""
    yield from _spelling_remarks(names)
    numbers = [(number, name) for name in names if (number := class_number(name)) is not None]
    if len(numbers) > 2 and list(names) == sorted(names) and numbers != sorted(numbers):
        order = listed([f"{shortened(name)} is class {place}" for place, name in enumerate(names)], 4)
        yield (
            f"{len(numbers)} of {len(names)} classes are numbers, in alphabetical order: {order}; if the "
            "order matters, as for class_weights or weights of another program, write equally many digits"
        )
    if [number for number, _ in numbers if number < 0] == [-1] and len(numbers) > 2:
        yield "the class -1 is trained like the others; if it marks images without a label, remove them"


def _spelling_remarks(names: Sequence[str]) -> Iterator[str]:
    """Yield a remark if classes may be one class in several spellings."""
    spellings: dict[str, list[str]] = {}
    for name in names:
        spellings.setdefault(alike(name), []).append(name)
    several = [same for same in spellings.values() if len(same) > 1]
    if several:
        pairs = [" and ".join(ascii(shortened(name)) for name in same[:2]) for same in several]
        yield (
            f"{sum(map(len, several))} of {len(names)} classes have the name of another, apart from case, "
            "spaces, invisible characters or Unicode normalization: "
            f"{listed(pairs, 3)}; use one name if they are one class"
        )


def _examples(names: Sequence[bytes]) -> str:
    return listed([printable(shortened(os.fsdecode(name))) for name in names], 3)
