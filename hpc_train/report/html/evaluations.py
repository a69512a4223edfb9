"""Files of a run's newest evaluation besides its row: confusion matrices, pictures, texts.

Another user may have written the files: reading is bounded, and links out of the run's folder are not
followed.
"""

from __future__ import annotations

import base64
import csv
import io
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from hpc_train.paths import RunPaths
from hpc_train.report.html.limits import PICTURE_BYTES, PICTURES, SAMPLE_CHARS, TABLE_BYTES
from hpc_train.run.files import open_regular, read_text

_PNG = b"\x89PNG\r\n\x1a\n"


@dataclass(frozen=True)
class Confusion:
    """Counts by class (row) and prediction (column)."""

    title: str
    classes: list[str]
    counts: list[list[int]]

    def confused(self) -> list[tuple[int, str, str]]:
        """Return (count, class, prediction) of all wrong predictions, the most frequent first."""
        pairs = [
            (count, self.classes[row], self.classes[column])
            for row, counts in enumerate(self.counts)
            for column, count in enumerate(counts)
            if count and row != column
        ]
        return sorted(pairs, key=lambda pair: -pair[0])


@dataclass(frozen=True)
class Table:
    """Any other table of an evaluation."""

    title: str
    head: list[str]
    rows: list[list[str]]


@dataclass(frozen=True)
class Picture:
    """A PNG file as a data URI."""

    title: str
    uri: str


@dataclass(frozen=True)
class Evaluation:
    """The files of one evaluation."""

    step: int
    confusions: list[Confusion] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    pictures: list[Picture] = field(default_factory=list)
    texts: list[tuple[str, str]] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.confusions or self.tables or self.pictures or self.texts)


def confined_text(path: Path, run: RunPaths, max_bytes: int) -> str | None:
    """Return the text of a file of the run; None if it is missing, too large, or a link out of the folder."""
    with suppress(OSError, ValueError):
        if is_confined(path, run):
            return read_text(path, max_bytes, errors="replace")
    return None


def is_confined(path: Path, run: RunPaths) -> bool:
    """Return True if the file is in the run's folder once links are followed."""
    return path.resolve().is_relative_to(run.folder.resolve())


def newest_evaluation(run: RunPaths) -> Evaluation | None:
    """Return the newest evaluation with files that can be shown."""
    try:
        folders = run.evaluation_folders()
    except OSError:
        return None
    for step in sorted(folders, reverse=True):
        with suppress(OSError):
            if found := _read(step, folders[step], run):
                return found
    return None


def _read(step: int, folder: Path, run: RunPaths) -> Evaluation:
    found = Evaluation(step)
    for path in sorted(folder.iterdir())[:1000]:
        match path.suffix:
            case ".csv" if text := confined_text(path, run, TABLE_BYTES):
                _add_table(found, path.stem, text)
            case ".png" if len(found.pictures) < PICTURES and (content := _picture(path, run)):
                found.pictures.append(Picture(path.stem, content))
            case ".txt" if text := confined_text(path, run, TABLE_BYTES):
                found.texts.append((path.stem, text[:SAMPLE_CHARS]))
    return found


def _add_table(found: Evaluation, title: str, text: str) -> None:
    try:
        rows = [row for row in csv.reader(io.StringIO(text)) if row]
    except csv.Error:
        return
    if (confusion := _confusion(title, rows)) is not None:
        found.confusions.append(confusion)
    elif rows:
        found.tables.append(Table(title, rows[0], rows[1:]))


def _confusion(title: str, rows: Sequence[Sequence[str]]) -> Confusion | None:
    """Return the table as a confusion matrix; None if it is not square, or has other cells than counts."""
    if "confusion" not in title or len(rows) < 2 or {len(row) for row in rows} != {len(rows)}:
        return None
    try:
        counts = [[int(cell) for cell in row[1:]] for row in rows[1:]]
    except ValueError:
        return None
    if min(map(min, counts)) < 0:
        return None
    return Confusion(title, list(rows[0][1:]), counts)


def _picture(path: Path, run: RunPaths) -> str | None:
    content = b"".join(_bytes(path, run))
    if not content.startswith(_PNG) or len(content) > PICTURE_BYTES:
        return None
    return f"data:image/png;base64,{base64.b64encode(content).decode()}"


def _bytes(path: Path, run: RunPaths) -> Iterator[bytes]:
    with suppress(OSError, ValueError):
        if is_confined(path, run):
            with open_regular(path) as file:
                yield file.read(PICTURE_BYTES + 1)
