"""Files of a run's newest evaluation besides its row: tables, pictures, texts.

Another user may have written the files: reading is bounded, and links out of the run's folder are not
followed.
"""

from __future__ import annotations

import base64
import csv
import io
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from hpc_train.paths import RunPaths
from hpc_train.report.html.limits import PICTURE_BYTES, PICTURES, SAMPLE_CHARS, TABLE_BYTES
from hpc_train.run.files import open_regular, read_text

_PNG = b"\x89PNG\r\n\x1a\n"


@dataclass(frozen=True)
class Table:
    """A CSV file of an evaluation, such as a confusion matrix."""

    title: str
    head: list[str]
    rows: list[list[str]]


@dataclass(frozen=True)
class Evaluation:
    """The files of one evaluation."""

    step: int
    tables: list[Table] = field(default_factory=list)
    #: Title and data URI of each PNG file.
    pictures: list[tuple[str, str]] = field(default_factory=list)
    texts: list[tuple[str, str]] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.tables or self.pictures or self.texts)


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
            if evaluation := _read(step, folders[step], run):
                return evaluation
    return None


def _read(step: int, folder: Path, run: RunPaths) -> Evaluation:
    evaluation = Evaluation(step)
    for path in sorted(folder.iterdir())[:1000]:
        match path.suffix:
            case ".csv" if text := confined_text(path, run, TABLE_BYTES):
                evaluation.tables.extend(_table(path.stem, text))
            case ".png" if len(evaluation.pictures) < PICTURES and (uri := _picture(path, run)):
                evaluation.pictures.append((path.stem, uri))
            case ".txt" if text := confined_text(path, run, TABLE_BYTES):
                evaluation.texts.append((path.stem, text[:SAMPLE_CHARS]))
    return evaluation


def _table(title: str, text: str) -> Iterator[Table]:
    """Yield the table, unless the file is empty or damaged."""
    with suppress(csv.Error):
        if rows := [row for row in csv.reader(io.StringIO(text)) if row]:
            yield Table(title, rows[0], rows[1:])


def _picture(path: Path, run: RunPaths) -> str | None:
    """Return a PNG file as a data URI; None if it is not one, or too large."""
    content = b""
    with suppress(OSError, ValueError):
        if is_confined(path, run):
            with open_regular(path) as file:
                content = file.read(PICTURE_BYTES + 1)
    if not content.startswith(_PNG) or len(content) > PICTURE_BYTES:
        return None
    return f"data:image/png;base64,{base64.b64encode(content).decode()}"
