"""The files of a run's newest evaluation: tables, texts, and sheets of predictions with their samples.

Another user may have written them: reading is bounded, and links out of the run's folder are not followed.
"""

from __future__ import annotations

import base64
import csv
import io
import json
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpc_train.paths import RunPaths
from hpc_train.report.html import limits
from hpc_train.run.files import open_regular, read_text

_PNG = b"\x89PNG\r\n\x1a\n"
_COLOR = re.compile("#[0-9a-f]{6}")
#: ``tasks.drawing.DESCRIPTION``, without its imports.
_DESCRIPTION = "hpc-train"


@dataclass(frozen=True)
class Table:
    """A CSV file of an evaluation, such as a confusion matrix."""

    title: str
    head: list[str]
    rows: list[list[str]]


@dataclass(frozen=True)
class Picture:
    """A PNG file of an evaluation."""

    title: str
    #: Data URI.
    uri: str
    width: int
    height: int
    #: Of a sheet of predictions: the descriptions of its samples, see ``tasks.drawing.described``, the most
    #: wrong ones first.
    samples: list[dict[str, Any]]

    @property
    def classes(self) -> list[tuple[str, int]]:
        """The classes of the samples, and the number of samples of each."""
        return sorted(Counter(name for sample in self.samples for name in sample["classes"]).items())

    def numbers(self, sample: dict[str, Any]) -> str:
        """Return the places in ``classes`` of the sample's classes, joined by spaces."""
        return " ".join(
            str(number) for number, (name, _) in enumerate(self.classes) if name in sample["classes"]
        )


@dataclass(frozen=True)
class Evaluation:
    """The files of one evaluation."""

    step: int
    tables: list[Table] = field(default_factory=list)
    pictures: list[Picture] = field(default_factory=list)
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
            if evaluation := _evaluation(step, folders[step], run):
                return evaluation
    return None


def _evaluation(step: int, folder: Path, run: RunPaths) -> Evaluation:
    evaluation = Evaluation(step)
    for path in sorted(folder.iterdir())[:1000]:
        match path.suffix:
            case ".csv" if text := confined_text(path, run, limits.TABLE_BYTES):
                evaluation.tables.extend(_table(path.stem, text))
            case ".png" if len(evaluation.pictures) < limits.PICTURES:
                evaluation.pictures.extend(_pictures(path, run))
            case ".txt" if text := confined_text(path, run, limits.TABLE_BYTES):
                evaluation.texts.append((path.stem, text[: limits.SAMPLE_CHARS]))
    return evaluation


def _table(title: str, text: str) -> Iterator[Table]:
    with suppress(csv.Error):
        if rows := [row for row in csv.reader(io.StringIO(text)) if row]:
            yield Table(title, rows[0], rows[1:])


def _pictures(path: Path, run: RunPaths) -> Iterator[Picture]:
    content = b""
    with suppress(OSError, ValueError):
        if is_confined(path, run):
            with open_regular(path) as file:
                content = file.read(limits.PICTURE_BYTES + 1)
    if not content.startswith(_PNG) or len(content) > limits.PICTURE_BYTES:
        return
    from PIL import Image  # for the few runs with pictures

    # Reads the file's head only: no image is decoded.
    unreadable = OSError, ValueError, Image.DecompressionBombError
    with suppress(*unreadable), Image.open(io.BytesIO(content), formats=["PNG"]) as image:
        uri = f"data:image/png;base64,{base64.b64encode(content).decode()}"
        yield Picture(path.stem, uri, *image.size, _samples(image.info.get(_DESCRIPTION)))


def _samples(description: Any) -> list[dict[str, Any]]:
    """Return a sheet's valid samples: the file may be any PNG file."""
    samples = []
    with suppress(TypeError, ValueError, KeyError, AttributeError, OverflowError, RecursionError):
        for facts in json.loads(description)[: limits.SAMPLES]:
            parts = [
                (str(title), int(left), int(top), int(width), int(height))
                for title, left, top, width, height in facts["parts"]
            ]
            legend = [(str(name), str(color)) for name, color in facts.get("legend", [])]
            samples.append(
                {
                    "title": str(facts["title"]),
                    "parts": parts,
                    "lines": list(map(str, facts.get("lines", []))),
                    "legend": [entry for entry in legend if _COLOR.fullmatch(entry[1])],
                    "classes": list(map(str, facts.get("classes", []))),
                    "error": float(facts.get("error", 0)),
                }
            )
    return sorted(samples, key=lambda sample: -sample["error"])
