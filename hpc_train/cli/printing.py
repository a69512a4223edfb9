"""What commands print: data to stdout, words to stderr, nothing from a file that could act on a terminal."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from hpc_train.errors import printable
from hpc_train.launchers.words import say

__all__ = ["JSON_VERSION", "cell_text", "columns", "put", "put_json", "say"]

JSON_VERSION = 1


def put(line: str) -> None:
    """Print a line of data to stdout."""
    print(printable(line), flush=True)


def put_json(data: dict[str, Any]) -> None:
    """Print ``data`` to stdout; other characters than ASCII are escaped."""
    print(json.dumps(data, indent=1, allow_nan=False), flush=True)


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the rows as lines, each column as wide as its widest cell, line breaks shown as escapes."""
    cells = [[cell_text(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in cells
    ]


def cell_text(text: str) -> str:
    """Return ``text`` safe for one line of a terminal."""
    return printable(text).replace("\n", "\\n").replace("\t", "\\t")
