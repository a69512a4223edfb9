"""A table of runs with one line each: plain when piped, coloured and cut to the width of a terminal."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

from hpc_train.console import columns, one_line, put
from hpc_train.errors import shortened

#: Columns that may be cut, in this order, with their minimum width.
_MIN_WIDTHS = (
    ("last metric or reason", 14),
    ("experiment", 8),
    ("values", 8),
    ("last metric or reason", 4),
)
_GAP = 2
_STYLES = {
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
    """Print the rows below their heads; columns that are empty in all rows are dropped.

    ``titles``: number of a row, from 0 → a line above it.
    """
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
        state = next((cell for cell in row if cell in _STYLES), None)
        if state is not None:
            text.highlight_words([state], _STYLES[state])
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
