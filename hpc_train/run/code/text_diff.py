"""The text in which two snapshots of the code differ, bounded; for ``compare --diff``."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

from hpc_train.run.code.snapshot import TREE, Differences
from hpc_train.run.files import UnreadableFileError, open_regular

#: Larger files are named only: comparing lines takes time that grows with the square of their number.
MAX_FILE_BYTES = 256 * 1024
MAX_FILE_LINES = 5_000
MAX_LINES = 2_000
_NOT_COMPARED = "not compared: too long, not text, or not readable"


def text_diff(before: Path, after: Path, differences: Differences, names: tuple[str, str]) -> list[str]:
    """Return unified diffs of the work tree's files in two snapshots, without line ends.

    ``names``: of the two in the heads. At most ``MAX_LINES`` lines; the last one then says so.
    """
    lines = list(islice(_lines(before, after, differences, names), MAX_LINES + 1))
    return lines if len(lines) <= MAX_LINES else [*lines[:MAX_LINES], f"… cut after {MAX_LINES:,} lines"]


def _lines(before: Path, after: Path, differences: Differences, names: tuple[str, str]) -> Iterator[str]:
    paths = sorted([*differences.added, *differences.changed, *differences.removed])
    for path in paths:
        if not path.startswith(f"{TREE}/"):
            continue
        name = path.removeprefix(f"{TREE}/")
        old = [] if path in differences.added else _content(before, path)
        new = [] if path in differences.removed else _content(after, path)
        if old is None or new is None:
            yield f"{name}: {_NOT_COMPARED}"
        else:
            first, second = (f"{run}/{name}" for run in names)
            yield from difflib.unified_diff(old, new, first, second, lineterm="")


def _content(snapshot: Path, path: str) -> Sequence[str] | None:
    """Return the lines of a file; None where they can't be compared."""
    file_path = Path(os.path.realpath(snapshot / path))  # unlike resolve it takes a link that leads to itself
    if not file_path.is_relative_to(os.path.realpath(snapshot)):
        return None  # of a manifest or a link that somebody else wrote
    try:
        with open_regular(file_path) as file:
            content = file.read(MAX_FILE_BYTES + 1)
        lines = content.decode("utf-8").splitlines()
    except (OSError, UnreadableFileError, UnicodeDecodeError):
        return None
    is_text = len(content) <= MAX_FILE_BYTES and b"\0" not in content
    return lines if is_text and len(lines) <= MAX_FILE_LINES else None
