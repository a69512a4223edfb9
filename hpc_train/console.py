"""The output of commands: tables and JSON to stdout, messages to stderr; nothing that could act on a
terminal.

A closed stderr (terminal or pipe gone, full disk) never ends a run.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TextIO

from hpc_train.errors import printable

JSON_VERSION = 1


def say(words: str) -> None:
    """Print a message to stderr; ignored if terminal or pipe are gone."""
    with tolerating_closed_stderr():
        print(printable(words), file=sys.stderr, flush=True)


@contextmanager
def tolerating_closed_stderr() -> Iterator[None]:
    """Within this context stderr may be gone: a closed terminal, a reader that has left, a full disk."""
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
    """Print lines of data to stdout; several at once reach a terminal or pipe together."""
    if lines:
        print("\n".join(map(printable, lines)), flush=True)


def put_json(data: dict[str, Any]) -> None:
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
    """Return three digits, of a larger number its whole part: ``0.125``, ``12.5``, ``1,250``."""
    return f"{value:.3g}" if value < 100 else f"{value:,.0f}"


def one_line(text: str) -> str:
    """Return ``text`` safe for one line of a terminal."""
    return printable(text).replace("\n", "\\n").replace("\t", "\\t")
