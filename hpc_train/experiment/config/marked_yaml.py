"""Reads YAML by the YAML 1.2 core schema, records the position of every key, and runs no code.

PyYAML's pure-Python scanner and parser produce events (the C parser crashes on deep nesting); this module
builds the values itself, so there is no constructor that a tag could reach.

``yaml.compose()`` would return nodes with the same positions, but only after reading the whole file: it
recurses without a depth limit (a mebibyte of ``[`` ends in a RecursionError), counts nothing, replaces
aliases by the nodes they refer to, so that aliases and anchors can't be refused, and raises at the first
error instead of listing all.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import yaml
from yaml.parser import Parser
from yaml.reader import Reader
from yaml.scanner import Scanner

from hpc_train.errors import shortened
from hpc_train.experiment.config.problems import (
    MAX_PROBLEMS,
    KeyPath,
    Marks,
    Place,
    Problem,
    shown,
    split_at_colon,
    with_blank,
)

MAX_BYTES = 2**20
MAX_DEPTH = 64
#: Keys, items and values of all levels; reading this many takes a second or two.
MAX_VALUES = 50_000
#: Python refuses to print or read integers of more than 4300 digits.
MAX_NUMBER_LENGTH = 100

#: Codes that other modules compare.
EMPTY = "yaml.empty"
GIVEN_TWICE = "yaml.given-twice"
_NULL = {"", "~", "null", "Null", "NULL"}
_BOOL = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
_INT = re.compile(r"[-+]?[0-9]+")
_OCTAL = re.compile(r"0o[0-7]+")
_HEX = re.compile(r"0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_INFINITY = re.compile(r"[-+]?\.(inf|Inf|INF)")
_NAN = {".nan", ".NaN", ".NAN"}
#: Control characters, line breaks that editors don't count, and lone surrogates.
FORBIDDEN = re.compile(
    "[^\t\n\r\x20-\x7e\xa0-\u2027\u202a-\ud7ff\ue000-\ufefe\uff00-\ufffd\U00010000-\U0010ffff]"
)
_SURROGATE = re.compile("[\ud800-\udfff]")
_WORD = re.compile(r"\s*([A-Za-z_]\w*)\s*$")
_BEFORE_BRACE = re.compile(r"\s*([A-Za-z_]\w*) \{")
_EQUALS = re.compile(r"([A-Za-z_][\w.]*)\s*=\s*(\S.*)")
_LINE_BREAK = re.compile("\r\n|\r|\n")

#: A part of PyYAML's message → the remedy.
_REMEDIES = (
    (r"'\t'", "indent with spaces, not tabs"),
    ("mapping values are not allowed", "put the text in quotes, or indent the key like its neighbors"),
    ("while scanning a quoted scalar", "close the quote"),
    ("expected ',' or ']'", "close the list with ]"),
    ("expected ',' or '}'", "close the mapping with }"),
    ("could not find expected ':'", "put ': ' between key and value, or the text in quotes"),
    ("expected <block end>", "indent it like the keys it belongs to"),
    ("cannot start any token", "put the text in quotes"),
    ("escape", "write a single backslash in single quotes, or double it"),
)


@dataclass
class Document:
    """The content of a file. ``data`` is None if it can't be parsed; ``problems`` then says why."""

    data: dict[str, Any] | None = None
    marks: dict[KeyPath, Marks] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)


_START = Place(1, 1)


class _UnreadableError(Exception):
    """Parsing can't continue."""

    def __init__(self, code: str, message: str, remedy: str, place: Place | None = _START) -> None:
        super().__init__(message)
        self.problem = Problem((), message, remedy, place=place, code=code)


class _EventParser(Reader, Scanner, Parser):
    """PyYAML without composer, constructor and resolver."""

    def __init__(self, text: str) -> None:
        Reader.__init__(self, text)
        Scanner.__init__(self)
        Parser.__init__(self)


def read_document(content: bytes) -> Document:
    """Parse a file's content; never raises."""
    document = Document()
    try:
        if len(content) > MAX_BYTES:
            message = f"the file is larger than {MAX_BYTES // 2**20} MiB"
            raise _UnreadableError("yaml.size", message, "give an experiment file")
        data = _Reading(_decoded(content), document).top()
        if data is None:
            remedy = "write an experiment; README.md has one to copy, and `hpc-train schema` prints all keys"
            raise _UnreadableError(EMPTY, "the file is empty", remedy)
        if not isinstance(data, dict):
            message = f"the file holds {shown(data)}"
            raise _UnreadableError("yaml.not-a-mapping", message, "write a mapping, key: value")
        document.data = data
    except _UnreadableError as error:
        document.problems.append(error.problem)
    return document


def read_value(text: str) -> tuple[Any, list[Problem]]:
    """Parse one value from the command line by the same rules."""
    document = Document()
    try:
        if len(text.encode("utf-8", "replace")) > MAX_BYTES:
            raise _UnreadableError(
                "yaml.size", "the value is larger than 1 MiB", "write it in the file", None
            )
        return _Reading(_checked(text), document).top(), document.problems
    except _UnreadableError as error:
        return None, [*document.problems, error.problem]


def resolve_scalar(text: str) -> object:
    """Return the value of an unquoted scalar in YAML 1.2's core schema. Raises ValueError on huge numbers."""
    if text in _NULL:
        return None
    if text in _BOOL:
        return _BOOL[text]
    if _INFINITY.fullmatch(text):
        return float(text.replace(".", ""))
    if text in _NAN:
        return float("nan")
    for pattern, base in ((_INT, 10), (_OCTAL, 8), (_HEX, 16)):
        if pattern.fullmatch(text):
            return int(_bounded(text), base) if base == 10 else int(_bounded(text)[2:], base)
    return float(_bounded(text)) if _FLOAT.fullmatch(text) else text


def _bounded(text: str) -> str:
    if len(text) > MAX_NUMBER_LENGTH:
        raise ValueError(f"is a number of more than {MAX_NUMBER_LENGTH} digits")
    return text


def _decoded(content: bytes) -> str:
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        place = _place_after(content[: error.start].decode("utf-8"))
        message = f"byte {content[error.start]:#04x} is not UTF-8"
        raise _UnreadableError("yaml.encoding", message, "save it as UTF-8", place) from error
    return _checked(text.removeprefix("\ufeff"))


def _checked(text: str) -> str:
    if found := FORBIDDEN.search(text):
        message = f"character U+{ord(found[0]):04X} is not allowed in the file"
        remedy = 'take it out, or write it as an escape in double quotes ("\\x1b")'
        raise _UnreadableError("yaml.character", message, remedy, _place_after(text[: found.start()]))
    return text


def _place_after(text: str) -> Place:
    lines = _LINE_BREAK.split(text)
    return Place(len(lines), len(lines[-1]) + 1)


def _place(mark: Any) -> Place:
    return _START if mark is None else Place(mark.line + 1, mark.column + 1)


class _Reading:
    """One pass over the events; records positions and problems in ``document``."""

    def __init__(self, text: str, document: Document) -> None:
        self.marks = document.marks
        self.problems = document.problems
        self.text = text
        self.parser = _EventParser(text)
        self.events = self._events()
        self.num_values = 0

    def top(self) -> Any:
        """Return the value of the one document; None where there is none."""
        next(self.events)
        start = next(self.events)
        if isinstance(start, yaml.StreamEndEvent):
            return None
        data = self._value(next(self.events), (), 1)
        next(self.events)
        more = next(self.events)
        if isinstance(more, yaml.DocumentStartEvent):
            message = "a second document begins here"
            self._refuse("yaml.two-documents", (), more, message, "write one experiment per file")
        return data

    def _events(self) -> Iterator[yaml.Event]:
        try:
            while self.parser.check_event():
                yield self.parser.get_event()  # type: ignore[no-untyped-call]
        except yaml.MarkedYAMLError as error:
            raise _syntax_error(error, self.text) from error
        except (yaml.YAMLError, ValueError, OverflowError) as error:  # chr() of an escape out of range
            remedy, place = "fix the escape or directive here", _place(self.parser.get_mark())
            raise _UnreadableError("yaml.syntax", "is not valid YAML", remedy, place) from error

    def _refuse(self, code: str, path: KeyPath, event: yaml.Event, message: str, remedy: str) -> None:
        place = _place(event.start_mark)
        self.problems.append(Problem(path, message, remedy, place=place, code=code))
        if len(self.problems) > MAX_PROBLEMS:
            remedy = "fix the errors above first"
            raise _UnreadableError("problems.more", "the rest was not read", remedy, place)

    def _value(self, event: yaml.Event, path: KeyPath, depth: int) -> Any:
        self._check_node(event, path)
        self._count(event)
        if isinstance(event, yaml.ScalarEvent):
            return self._scalar(event, path)
        if isinstance(event, yaml.AliasEvent):
            return None
        if depth > MAX_DEPTH:
            message = f"is nested more than {MAX_DEPTH} levels deep"
            raise _UnreadableError("yaml.depth", message, "use fewer levels", _place(event.start_mark))
        if isinstance(event, yaml.SequenceStartEvent):
            return self._sequence(path, depth)
        assert isinstance(event, yaml.MappingStartEvent)
        return self._mapping(path, depth)

    def _check_node(self, event: yaml.Event, path: KeyPath) -> None:
        if isinstance(event, yaml.AliasEvent):
            message = f"is the alias *{shortened(str(event.anchor))}"
            self._refuse("yaml.alias", path, event, message, "write the value out")
            return
        assert isinstance(event, yaml.NodeEvent)
        if event.anchor is not None:
            message = f"has the anchor &{shortened(event.anchor)}"
            self._refuse("yaml.anchor", path, event, message, "take the anchor out")
        tag = getattr(event, "tag", None)
        if tag is not None:
            tag = tag.replace("tag:yaml.org,2002:", "!!")
            remedy = "take the tag out; write a plain value"
            self._refuse("yaml.tag", path, event, f"has the tag {shortened(tag)}", remedy)

    def _count(self, event: yaml.Event) -> None:
        self.num_values += 1
        if self.num_values > MAX_VALUES:
            message, remedy = f"has more than {MAX_VALUES:,} values", "write only the values of an experiment"
            raise _UnreadableError("yaml.size", message, remedy, _place(event.start_mark))

    def _scalar(self, event: yaml.ScalarEvent, path: KeyPath) -> object:
        if _SURROGATE.search(event.value):
            self._refuse("yaml.surrogate", path, event, "has a lone surrogate", "write the whole character")
            return None
        if not event.implicit[0]:
            return event.value
        try:
            return resolve_scalar(event.value)
        except ValueError as error:
            self._refuse("yaml.number", path, event, str(error), "write a shorter one, or put it in quotes")
            return None

    def _sequence(self, path: KeyPath, depth: int) -> list[Any]:
        items: list[Any] = []
        for event in self.events:
            if isinstance(event, yaml.SequenceEndEvent):
                break
            item_path = (*path, len(items))
            place = _place(event.start_mark)
            self.marks[item_path] = Marks(place, place)
            items.append(self._value(event, item_path, depth + 1))
        return items

    def _mapping(self, path: KeyPath, depth: int) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for event in self.events:
            if isinstance(event, yaml.MappingEndEvent):
                break
            key = self._key(event, path, depth)
            value_event = next(self.events)
            key_path = (*path, "<<" if key is None else key)
            marks = Marks(_place(event.start_mark), _place(value_event.start_mark))
            if key is not None and key in values:
                first_line = self.marks[key_path].key.line
                message = f"is given twice, on lines {first_line} and {marks.key.line}"
                self._refuse(GIVEN_TWICE, key_path, event, message, "keep one of them")
            elif key is not None:
                self.marks[key_path] = marks
            value = self._value(value_event, key_path, depth + 1)
            if key is not None:
                values[key] = value
        return values

    def _key(self, event: yaml.Event, path: KeyPath, depth: int) -> str | None:
        """Return the key; None, with its problem recorded, if it is invalid."""
        if isinstance(event, yaml.ScalarEvent) and event.implicit[0] and event.value == "<<":
            self._refuse(
                "yaml.merge-key", (*path, "<<"), event, "merge keys are not supported", "write the keys out"
            )
            return None
        key = self._value(event, path, depth + 1)
        if isinstance(key, str):
            return key
        if not isinstance(event, yaml.AliasEvent):
            message = f"the key is {shown(key)}, not text"
            self._refuse("yaml.key", path, event, message, "write a name, or put it in quotes")
        return None


def _syntax_error(error: yaml.MarkedYAMLError, text: str) -> _UnreadableError:
    reason = ", ".join(part for part in (error.context, error.problem) if part)
    usual = next(
        (words for part, words in _REMEDIES if part in reason), "correct the indentation or quotes here"
    )
    remedy = _blank_remedy(error, text) or _line_remedy(error, text) or usual
    # Without an error before the end of the file a quote or bracket is not closed.
    last_line = len(_LINE_BREAK.split(text.rstrip()))
    is_unclosed = error.context_mark and error.problem_mark and error.problem_mark.line >= last_line
    place = _place(error.context_mark if is_unclosed else error.problem_mark or error.context_mark)
    return _UnreadableError("yaml.syntax", f"is not valid YAML: {reason}", remedy, place)


def _line_remedy(error: yaml.MarkedYAMLError, text: str) -> str | None:
    """Return the remedy if the error shows how to indent a line, or what is missing in it."""
    lines, mark = _LINE_BREAK.split(text), error.problem_mark
    if mark is None or mark.line >= len(lines):
        return None
    if "${" in lines[mark.line]:
        return "write the value itself; variables like ${name} are not filled in"
    above = lines[mark.line - 1] if mark.line else ""
    problem, before = str(error.problem), lines[mark.line][: mark.column]
    if problem.startswith("expected ',' or '}'") and (key := re.search(r"[\w.]+ ([A-Za-z_]\w*)$", before)):
        return f"put a comma before {key[1]} on line {mark.line + 1}"
    if (
        "expected ':'" in problem
        and error.context_mark
        and (word := _WORD.match(lines[error.context_mark.line]))
    ):
        return f"put a colon after {word[1]} on line {error.context_mark.line + 1}"
    if problem.startswith("mapping values are not allowed") and (word := _BEFORE_BRACE.match(before)):
        return f"put a colon after {word[1]} on line {mark.line + 1}"
    if above.lstrip().startswith("- ") and not lines[mark.line].lstrip().startswith("- "):
        return f"take the - out of line {mark.line}"
    if problem.startswith("mapping values are not allowed") and mark.line:
        if equals := _EQUALS.fullmatch(above.strip()):
            return f"write {equals[1]}: {shortened(equals[2])} on line {mark.line}"
        if _indentation(above) < _indentation(lines[mark.line]):
            return f"indent line {mark.line} like line {mark.line + 1}"
    if problem.startswith("expected <block end>") and mark.line:
        number = mark.line + 1
        has_neighbor = number < len(lines) and _indentation(lines[number]) == _indentation(lines[mark.line])
        odd, like = (number - 1, number) if has_neighbor else (number, number - 1)
        return f"indent line {odd} like line {like}"
    return None


def _indentation(line: str) -> int:
    return len(line) - len(line.lstrip(" "))


def _blank_remedy(error: yaml.MarkedYAMLError, text: str) -> str | None:
    """Return the remedy if a line like ``lr:0.1``, read as text, is why the next line is an error."""
    lines = _LINE_BREAK.split(text)
    if error.context == "while scanning a simple key" and error.context_mark is not None:
        number = error.context_mark.line
    elif error.problem_mark is not None and str(error.problem).startswith("mapping values are not allowed"):
        number = error.problem_mark.line - 1
    else:
        return None
    unspaced = split_at_colon(lines[number].strip().removeprefix("- ")) if number >= 0 else None
    return with_blank(*unspaced, where=f" on line {number + 1}") if unspaced else None
