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
from typing import Any, TypeGuard

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
from hpc_train.experiment.config.scalars import COMMA, reads_as_number, resolve_scalar, with_point
from hpc_train.redaction import without_credentials

MAX_BYTES = 2**20
MAX_DEPTH = 64
#: Keys, items and values of all levels; reading this many takes a second or two.
MAX_VALUES = 50_000
#: Codes that other modules compare.
EMPTY = "yaml.empty"
GIVEN_TWICE = "yaml.given-twice"
#: Control characters, line breaks that editors don't count, and lone surrogates.
FORBIDDEN = re.compile(
    "[^\t\n\r\x20-\x7e\xa0-\u2027\u202a-\ud7ff\ue000-\ufefe\uff00-\ufffd\U00010000-\U0010ffff]"
)
_SURROGATE = re.compile("[\ud800-\udfff]")
_WORD = re.compile(r"\s*([A-Za-z_]\w*)\s*$")
_BEFORE_BRACE = re.compile(r"\s*([A-Za-z_]\w*) \{")
#: ``data: name`` before a second colon on the line.
_TWO_KEYS = re.compile(r"\s*([A-Za-z_]\w*): +([A-Za-z_]\w*)")
#: A key before what looks like a colon with a blank, but is not: ``lr：0.1``, or a no-break space.
_ODD_COLON = re.compile(r"([A-Za-z_]\w*)\s*(：\s*|:[^\S\t\n\r ]+)(\S.*)?")
_EQUALS = re.compile(r"([A-Za-z_][\w.]*)\s*=\s*(\S.*)")
_LINE_BREAK = re.compile("\r\n|\r|\n")
#: What follows a key of ``{}`` without a colon.
_NO_COLON = re.compile(r"\s*[,}]")

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
        before: tuple[KeyPath, yaml.Event] | None = None
        lone: list[yaml.ScalarEvent] = []
        for event in self.events:
            if self._is_lone(event):
                lone.append(event)
                self._count(next(self.events))
                continue
            self._refuse_lone(path, before, lone)
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
            before, lone = (key_path, value_event), []
        return values

    def _is_lone(self, event: yaml.Event) -> TypeGuard[yaml.ScalarEvent]:
        """Return True for a key of ``{}`` without a colon; ``name:digits`` and ``name digits`` mean a key."""
        if not isinstance(event, yaml.ScalarEvent) or not event.implicit[0] or event.anchor is not None:
            return False
        has_colon = ":" in event.value or (" " in event.value and "=" not in event.value)
        return not has_colon and bool(_NO_COLON.match(self.text, _end(event)))

    def _between(self, first: yaml.Event, last: yaml.Event) -> str:
        start: Any = first.start_mark
        return self.text[start.index : _end(last)]

    def _refuse_lone(
        self, path: KeyPath, before: tuple[KeyPath, yaml.Event] | None, lone: list[yaml.ScalarEvent]
    ) -> None:
        """Report keys without a value: a comma in ``{}`` ends the value before them."""
        if not lone:
            return
        texts = [event.value for event in lone]
        first: yaml.ScalarEvent = lone[0]
        name = f"{shortened(texts[0])} has no value"
        if equals := _EQUALS.fullmatch(texts[0]):
            path, remedy = (*path, equals[1]), f"write {equals[1]}: {shortened(equals[2])}"
        elif before is None and (len(texts) > 1 or reads_as_number(texts[0])):
            remedy = f"write {_listed(texts)}" + (", or a value after each" if len(texts) > 1 else "")
        elif before is None:
            remedy = f"write {shortened(texts[0])}: and its value"
        elif isinstance(before[1], yaml.ScalarEvent) and before[1].value:
            path, first = before[0], before[1]
            text = self._between(first, lone[-1])
            remedy = f"write {path[-1]}: {_as_one_value(text, [first.value, *texts])}"
            name = f"{name}: the comma before it ends the value"
        else:
            remedy = f"write {shortened(texts[0])}: and its value"
        self._refuse("yaml.no-value", path, first, name, without_credentials(remedy))

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


def _end(event: yaml.Event) -> int:
    mark: Any = event.end_mark
    return int(mark.index)


def _listed(texts: list[str]) -> str:
    items = [word.strip("()") for word in texts]
    return shortened(items[0] if len(items) == 1 else f"[{', '.join(items)}]", 200)


def _as_one_value(text: str, texts: list[str]) -> str:
    """Return how to write a value that a comma has divided into ``texts``."""
    if comma := COMMA.fullmatch(text):
        return f"{with_point(comma)}, or [{text.replace(',', ', ')}]"
    are_numbers = all(reads_as_number(word.strip("()")) for word in texts)
    return _listed(texts) if are_numbers else f'"{shortened(text, 200)}"'


def _syntax_error(error: yaml.MarkedYAMLError, text: str) -> _UnreadableError:
    reason = ", ".join(part for part in (error.context, error.problem) if part)
    usual = next(
        (words for part, words in _REMEDIES if part in reason), "correct the indentation or quotes here"
    )
    remedy = without_credentials(_blank_remedy(error, text) or _line_remedy(error, text) or usual)
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
    if r"'\t'" in problem and before.strip():
        return "write a space in place of the tab"
    if "'<stream end>'" not in problem and lines[mark.line][mark.column :].strip() == ",":
        return f"take the comma at the end of line {mark.line + 1} out"
    rest = lines[mark.line][mark.column + 1 :].strip()
    is_nested = problem.startswith("mapping values are not allowed") and ": " not in rest
    if is_nested and (two := _TWO_KEYS.fullmatch(before)):
        value = shortened(rest)
        return f"write {two[1]}: {{{two[2]}: {value}}}, or put {two[2]}: {value} in quotes if it is text"
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
    line = lines[number].strip(" \t").removeprefix("- ") if number >= 0 else ""
    if odd := _ODD_COLON.fullmatch(line):
        character = next(char for char in odd[2] if char not in ": ")
        written = f"{odd[1]}: {shortened(odd[3] or '')}".strip()
        return f"write {written} on line {number + 1}, without U+{ord(character):04X}"
    unspaced = split_at_colon(line.strip())
    return with_blank(*unspaced, where=f" on line {number + 1}") if unspaced else None
