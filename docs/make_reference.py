"""Writes the tables of keys in reference_file.md from the schema: ``python docs/make_reference.py``.

A test calls ``updated`` to check that the file is up to date.
"""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

from hpc_train.experiment.config.keys import Node, as_mapping, json_schema, members
from hpc_train.experiment.config.remedies import wanted

PAGE = Path(__file__).with_name("reference_file.md")
BEGIN = "<!-- keys: written by docs/make_reference.py -->\n"
END = "<!-- end of keys -->\n"
#: Characters of a cell; sentences beyond follow the table.
CELL = 200
_SENTENCE_END = re.compile(r"(?<=\.) (?=[A-Z`])")
_DEFAULT = re.compile(r"Default:|`(?:off|false)`:")


def updated(page: str) -> str:
    """Return the page with the text between the two markers regenerated."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    assert begin and end, f"{PAGE.name} has lost its markers"
    return f"{before}{BEGIN}\n{tables()}\n{END}{after}"


def tables() -> str:
    """Return one table per section of the file, outer sections first."""
    return "\n\n".join(_section(path, node) for path, node in sections((), json_schema())) + "\n"


def sections(path: tuple[str, ...], node: Node) -> Iterator[tuple[tuple[str, ...], Node]]:
    """Yield every mapping with fixed keys, then those below it."""
    mapping = as_mapping(node)
    if mapping is None or "properties" not in mapping:
        return
    yield path, mapping
    for key, below in mapping["properties"].items():
        yield from sections((*path, key), below)


def _section(path: tuple[str, ...], mapping: Node) -> str:
    title = f"`{'.'.join(path)}`" if path else "The whole file"
    rows = [_row(key, below, mapping) for key, below in mapping["properties"].items()]
    head = "| key | value | default | meaning |\n| --- | --- | --- | --- |"
    lines = [f"### {title}", "", *_wrapped(_one_line(mapping["description"])), "", head, *rows]
    rest = {key: _cell_and_rest(_meaning(below))[1] for key, below in mapping["properties"].items()}
    notes = [line for key, text in rest.items() if text for line in _wrapped(f"- `{key}`: {text}")]
    return "\n".join([*lines, *([""] if notes else []), *notes])


def _wrapped(text: str) -> list[str]:
    indent = "  " if text.startswith("- ") else ""
    return textwrap.wrap(text, 120, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def _cell_and_rest(meaning: str) -> tuple[str, str]:
    """Return the sentences for the cell: the first ones, and the default; and those for below the table."""
    sentences = _SENTENCE_END.split(meaning)
    defaults = [text for text in sentences if _DEFAULT.match(text)]
    cell, *others = [text for text in sentences if text not in defaults]
    while others and len(" ".join([cell, others[0], *defaults])) <= CELL:
        cell += f" {others.pop(0)}"
    return " ".join([cell, *defaults]), " ".join(others)


def _row(key: str, node: Node, parent: Node) -> str:
    cells = [f"`{key}`", takes(node), default(key, node, parent), _cell_and_rest(_meaning(node))[0]]
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def takes(node: Node) -> str:
    """Return what the value may be; a nested section is described in its own table."""
    if any("properties" in member for member in members(node)):
        plain = [wanted(member) for member in members(node) if "properties" not in member]
        return " or ".join([*plain, "a section"])
    return wanted(node)


def default(key: str, node: Node, parent: Node) -> str:
    """Return the default as code, ``**required**``, or nothing."""
    if key in parent.get("required", []):
        return "**required**"
    value = node.get("default")
    return "" if value is None or isinstance(value, dict) or value == [] else f"`{json.dumps(value)}`"


def _meaning(node: Node) -> str:
    """Return the key's own description, or its section's."""
    own = node.get("description")
    sections = [member.get("description", "") for member in members(node) if "properties" in member]
    return _one_line(own or next(iter(sections), ""))


def _one_line(text: str) -> str:
    return " ".join(text.split()).replace("``", "`")


if __name__ == "__main__":
    PAGE.write_text(updated(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
