"""Problems of an experiment file: what is wrong, its position in the file, and the line that reports it.

The YAML reader, the schema, the rules and the planner all create ``Problem``s; a ``Source`` knows the
positions.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from hpc_train.console import one_line
from hpc_train.errors import BadFileError, shortened
from hpc_train.registry import nearest

#: Keys from the top of the file; an int is an index into a list.
KeyPath = tuple[str | int, ...]
#: At most this many problems of a file are reported, so that a hostile file costs no more time and memory.
MAX_PROBLEMS = 100


@dataclass(frozen=True, order=True)
class Place:
    """Line and column, both from 1, columns in characters."""

    line: int
    column: int


#: After every position of the file, so that problems without one sort last.
COMMAND_LINE = Place(sys.maxsize, 0)


@dataclass(frozen=True)
class Marks:
    """Where a key and its value start; for a list item both are the value's position."""

    key: Place
    value: Place


@dataclass(frozen=True)
class Problem:
    """``on_key``: the key itself is wrong. ``place``: its position if not that of ``path``."""

    path: KeyPath
    message: str
    remedy: str
    on_key: bool = False
    place: Place | None = None
    #: The keys that a rule checked together.
    reads: tuple[KeyPath, ...] = ()
    #: Identifies the kind of problem, like ``batch.undivided``; stable. Default: its rule's.
    code: str = ""

    def __str__(self) -> str:
        """Return it without its place: ``key.path: what is wrong; remedy``."""
        return f"{dotted(self.path)}: {self.message}; {self.remedy}"

    def as_error(self) -> BadFileError:
        """Return the error of a rank, or of a command without places."""
        return BadFileError(str(self))


class ProblemLine(str):
    """The line that reports a problem, with the code and the dotted key, which the JSON shows."""

    code: str
    key: str

    def __new__(cls, text: str, code: str, key: str) -> ProblemLine:
        """Return ``text`` with the code and the key."""
        line = super().__new__(cls, text)
        line.code, line.key = code, key
        return line


#: ``model.args`` or ``groups[0].match`` at the start of a line, and the segments of such a path.
_KEY, _SEGMENT = re.compile(r"([a-z_]+(?:\.\w+|\[\d+\])*): "), re.compile(r"\w+|\[\d+")


@dataclass(frozen=True)
class Source:
    """A file as the user named it, the positions of its keys, and the keys given on the command line.

    The name is empty for a dict of the Python API, whose keys have no positions.
    """

    name: str
    marks: Mapping[KeyPath, Marks] = field(default_factory=dict)
    command_line: frozenset[KeyPath] = frozenset()

    def place(self, problem: Problem) -> Place:
        """Return the position of the value or key, else that of the nearest parent's key."""
        if problem.place is not None:
            return problem.place
        path = problem.path
        if any(path[:end] in self.command_line for end in range(1, len(path) + 1)):
            return COMMAND_LINE
        if path in self.marks and not problem.on_key:
            return self.marks[path].value
        while path:
            if path in self.marks:
                return self.marks[path].key
            path = path[:-1]
        return Place(1, 1)

    def placed(self, line: str) -> str:
        """Return the line of an error without a position, ``key.path: …``, with that of the key."""
        match = _KEY.match(line)
        if match is None:
            return line
        path = tuple(int(key[1:]) if key[0] == "[" else key for key in _SEGMENT.findall(match[1]))
        if path[:1] not in self.marks and path[:1] not in self.command_line:
            return line
        place = self.place(Problem(path, "", ""))
        if place == COMMAND_LINE:
            return f"command line: {line}"
        return f"{self.name}:{place.line}:{place.column}: {line}"

    def render(self, problem: Problem) -> str:
        """Return ``exp.yaml:LINE:COL: key.path: what is wrong; what to write instead``, on one line."""
        place = self.place(problem)
        where = f"{self.name}:{place.line}:{place.column}" if self.name else ""
        where = "command line" if place == COMMAND_LINE else where
        parts = [where, dotted(problem.path), f"{problem.message}; {problem.remedy}"]
        text = one_line(": ".join(part for part in parts if part))
        return ProblemLine(text, problem.code, dotted(problem.path))

    def render_all(self, problems: Iterable[Problem]) -> list[str]:
        """Return the lines in file order, each once; after ``MAX_PROBLEMS`` one that there are more."""
        ordered = sorted(problems, key=self.place)
        lines = list(dict.fromkeys(self.render(problem) for problem in ordered[: 2 * MAX_PROBLEMS]))
        if len(lines) <= MAX_PROBLEMS:
            return lines
        place, remedy = self.place(ordered[-1]), "fix those above first"
        more = Problem((), "there are more problems", remedy, place=place, code="problems.more")
        return [*lines[:MAX_PROBLEMS], self.render(more)]


def unknown_argument_problem(
    section: KeyPath, owner: str, name: str, known: Sequence[str], meant: str | None = None
) -> Problem:
    """Return the problem with an argument that ``owner`` does not take. ``meant``: by other tools' names."""
    hint = meant if meant in known else nearest(name, known)
    takes = f"{shortened(owner)} takes {', '.join(known) or 'none'}"
    remedy = f"did you mean {hint!r}?" if hint else f"take it out; {takes}"
    return Problem(section, f"{owner} takes no argument {name!r}", remedy, code="arguments.unknown")


def split_at_colon(text: str, keys: Collection[str] | None = None) -> tuple[str, str] | None:
    """Return key and value of ``lr:0.1``, which YAML reads as text because no blank follows the colon.

    None if the key is not one of ``keys``; without them, if it is not a name.
    """
    key, _, value = text.partition(":")
    is_key = key.isidentifier() if keys is None else key in keys
    is_text = value != "" and not value[0].isspace() and not value.startswith(("//", ":"))
    return (key, value) if is_key and is_text else None


def with_blank(key: str, value: str, where: str = "") -> str:
    """Return what to write instead of ``key:value``. ``where``: like `` on line 4``."""
    if value.startswith(("{", "[")) or " " in value:  # the text may end within it, or span several lines
        return f"put a blank after the colon of {shortened(key)}:{where}"
    return f"write {shortened(key)}: {shortened(value)}{where}, with a blank after the colon"


def related(one: KeyPath, other: KeyPath) -> bool:
    """Return True if one path is equal to the other or is its parent."""
    shorter = min(len(one), len(other))
    return one[:shorter] == other[:shorter]


def dotted(path: KeyPath) -> str:
    """Return ``data.normalize.mean[0]``."""
    text = ""
    for segment in path:
        text += f"[{segment}]" if isinstance(segment, int) else f".{shortened(segment)}"
    return text.removeprefix(".")


def shown(value: object) -> str:
    """Return a value of the file as error messages show it: ``the text 'abc'``, ``64``, ``a list``."""
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f"the text '{shortened(value)}'"
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list | tuple):
        return "a list"
    return shortened(str(value))


def is_clean(text: str) -> bool:
    """Return True if ``text`` has no control character and no line break of any kind."""
    return not any(char < " " or "\x7f" <= char <= "\x9f" or char in "\u2028\u2029" for char in text)
