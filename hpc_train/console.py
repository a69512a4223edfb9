"""The output of commands: tables and JSON to stdout, messages to stderr; no terminal control codes.

A closed stderr (terminal or pipe gone, full disk) never ends a run.
"""

from __future__ import annotations

import csv
import io
import json
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import TextIO

from hpc_train.errors import printable

JSON_VERSION = 1
#: Spreadsheets execute a cell that begins with one of these, also in full-width form (OWASP, "CSV
#: Injection").
_FORMULA = re.compile(r"[=+\-@\uff1d\uff0b\uff0d\uff20]")


def say(*lines: str) -> None:
    """Print a message to stderr, one line per argument; ignored if terminal or pipe are gone.

    Here, in ``put`` and in ``columns`` control characters and line breaks of an argument are shown as
    escapes: text of a file or a log can neither control the terminal nor forge a line. Callers don't escape.
    """
    with tolerating_closed_stderr():
        print("\n".join(map(_as_line, lines)), file=sys.stderr, flush=True)


def say_text(text: str) -> None:
    """Print a message of several lines to stderr: an error, the output of a child process."""
    say(*text.split("\n"))


@contextmanager
def tolerating_closed_stderr() -> Iterator[None]:
    """Tolerate a missing stderr within this context: a closed terminal, a closed pipe, a full disk."""
    try:
        yield
    except OSError:
        redirect_to_devnull(sys.stderr)


def redirect_to_devnull(stream: TextIO) -> None:
    """Redirect the rest to /dev/null: Python would also fail at exit, with code 120, when it flushes."""
    with suppress(OSError):  # a stream without a file
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


def put(*lines: str) -> None:
    """Print lines of data to stdout, escaped like in ``say``; they reach a terminal or pipe together."""
    if lines:
        print("\n".join(map(_as_line, lines)), flush=True)


def _as_line(text: str) -> str:
    return printable(text).replace("\n", "\\n")


def put_json(data: Mapping[str, object]) -> None:
    """Print ``data`` to stdout; non-ASCII characters are escaped."""
    print(json.dumps(data, indent=1, allow_nan=False), flush=True)


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the rows as lines, each column as wide as its widest cell, line breaks shown as escapes."""
    cells = [[one_line(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in cells
    ]


def rounded(value: float) -> str:
    """Return three significant digits, or a larger number's whole part: ``0.125``, ``12.5``, ``1,250``."""
    return f"{value:.3g}" if value < 100 else f"{value:,.0f}"


def one_line(text: str) -> str:
    """Return ``text`` safe for one line of a terminal."""
    return printable(text).replace("\n", "\\n").replace("\t", "\\t")


def csv_line(cells: Iterable[object]) -> str:
    """Return ``cells`` as one line of a CSV file, with its line break.

    Text is safe for terminals and spreadsheets: control characters are shown as escapes, and an apostrophe
    precedes text that a spreadsheet would execute as a formula.
    """
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(map(_csv_cell, cells))
    return text.getvalue()


def _csv_cell(value: object) -> object:
    if not isinstance(value, str):
        return value
    text = one_line(value)
    return f"'{text}" if _FORMULA.match(text) and not _is_number(text) else text


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
