"""The output of commands: tables and JSON to stdout, messages to stderr.

Without terminal control codes, except in a table of runs on a terminal. A closed stderr (terminal or pipe
gone, full disk) never ends a run.
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

from hpc_train.errors import printable, shortened

JSON_VERSION = 1
#: Spreadsheets execute a cell that begins with one of these, also in full-width form (OWASP, "CSV
#: Injection").
_FORMULA = re.compile(r"[=+\-@\uff1d\uff0b\uff0d\uff20]")


def say(*lines: str) -> None:
    """Print a message to stderr, one line per argument; ignored if terminal or pipe are gone.

    Here, in ``put`` and in ``columns`` control characters and line breaks of an argument are shown as
    escapes: text of a file or a log can neither control the terminal nor forge a line. Callers don't escape.
    """
    if lines:
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
    """Print the JSON version and ``data`` to stdout; non-ASCII characters are escaped."""
    print(json.dumps({"version": JSON_VERSION, **data}, indent=1, allow_nan=False), flush=True)


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


#: Columns that may be cut, in this order, with their minimum width.
_MIN_WIDTHS = (
    ("last metric or reason", 14),
    ("experiment", 8),
    ("values", 8),
    ("last metric or reason", 4),
)
_GAP = 2
#: State of a run → its style in rich.
STATE_STYLES = {
    "running": "cyan",
    "completed": "green",
    "failed": "red",
    "interrupted": "yellow",
    "cancelled": "yellow",
    "requeued": "magenta",
}


def print_table(
    heads: Sequence[str], rows: Sequence[Sequence[str]], titles: Mapping[int, str] | None = None
) -> None:
    """Print rows below heads, without empty columns. ``titles``: number of a row → a line above it."""
    above = {place + 1: one_line(title) for place, title in (titles or {}).items()}
    used = [place for place, _ in enumerate(heads) if any(row[place] for row in rows)]
    cells = [[row[place] for place in used] for row in (heads, *rows)]
    if not sys.stdout.isatty():
        for place, line in enumerate(columns(cells)):
            put(*([above[place], line] if place in above else [line]))
        return
    from rich.console import Console
    from rich.text import Text

    console = Console()  # respects NO_COLOR and TERM=dumb
    lines = fitted(cells, console.width)
    for place, (line, row) in enumerate(zip(lines, cells, strict=True)):
        if place in above:
            console.print(Text(shortened(above[place], console.width), style="bold"), soft_wrap=True)
        text = Text(line)
        state = next((cell for cell in row if cell in STATE_STYLES), None)
        if state is not None:
            text.highlight_words([state], STATE_STYLES[state])
        console.print(text, soft_wrap=True)


def fitted(cells: Sequence[Sequence[str]], width: int) -> list[str]:
    """Return the lines, heads first, none longer than ``width``; cut cells end with ``…``."""
    shown = [[one_line(cell) for cell in row] for row in cells]
    heads = shown[0]
    for head, least in _MIN_WIDTHS:
        widths = [max(map(len, column)) for column in zip(*shown, strict=True)]
        surplus = sum(widths) + _GAP * (len(widths) - 1) - width
        if head in heads and surplus > 0:
            place = heads.index(head)
            limit = max(least, widths[place] - surplus)
            shown = [[*row[:place], shortened(row[place], limit), *row[place + 1 :]] for row in shown]
    return [shortened(line, width) for line in columns(shown)]
