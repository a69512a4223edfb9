"""Cells of a list → classes, numbers and names: one rule for CSV, Parquet, JSON and Hugging Face.

A cell is text, as in CSV files and members of tar files, or a value of JSON, Arrow or ``datasets``. No cell
is converted by ``str``, ``bool`` or ``int``: a value of another type is an error with its file and row.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Iterator, Sequence
from decimal import Decimal
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from hpc_train.errors import BadFileError, listed, shortened

Array = np.ndarray[Any, Any]

#: Maximum of int64.
MAX_INTEGER = 2**63 - 1
_MAX_FLOAT32 = float(np.finfo(np.float32).max)
#: Larger integers in float64 may be rounded.
_MAX_WHOLE_FLOAT = 2.0**53
#: The maximum length of a path on Linux, in bytes; also that of a class name.
_MAX_TEXT_BYTES = 4096
_NUMBERS = (int, float, Decimal, np.integer, np.floating)
_NUMBER = re.compile(r"\s*[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?\s*", re.ASCII | re.IGNORECASE)
#: Class names that are sorted by size: numbers as above, with exponents that ``Decimal`` computes.
_CLASS_NUMBER = re.compile(r"\s*[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d{1,3})?\s*", re.ASCII | re.IGNORECASE)
#: Spellings of a missing cell by pandas and SQL, in lower case.
_MISSING = frozenset({"nan", "<na>", "nat", "null"})
#: Likewise, but also common names of classes: missing only among numbers.
_MISSING_AMONG_NUMBERS = frozenset({"na", "n/a", "none", "?", "-"})


class Place(NamedTuple):
    """The file and row of a cell, such as ``train.csv:3``, and its column if it has a name."""

    #: Converted to text only for an error.
    where: object
    column: str = ""
    #: False if the data set has no ``data.args.classes``.
    has_classes_key: bool = True

    def error(self, cell: Any, rule: str, remedy: str) -> BadFileError:
        """Return the error for a cell that breaks ``rule`` (``not a number``)."""
        value = repr(shortened(cell_text(cell)))
        holds = f"has {value} in {self.column}" if self.column else f"has the target {value}"
        return BadFileError(f"data.root: {self.where} {holds}, {rule}; {remedy}")

    def missing(self, cell: Any) -> BadFileError:
        """Return the error for a missing label."""
        if self.column and (cell is None or cell == ""):
            return BadFileError(
                f"data.root: {self.where} has no {self.column}; fill it in, or remove the row"
            )
        remedy = "fill it in, or remove the row"
        if self.has_classes_key:
            remedy += "; if it is a name, write all names to data.args.classes"
        return self.error(cell, "not a class but a missing label", remedy)


def cell_text(cell: Any) -> str:
    """Return a cell as text for a message."""
    try:
        return str(cell)
    except (ValueError, RecursionError):  # more digits, or deeper, than Python converts
        return f"a very large {type(cell).__name__}"


def text_problem(text: str) -> str | None:
    """Return the reason why ``text`` can't be the name of a class or file, else None."""
    if "\0" in text:
        return "which contains a NUL byte"
    try:
        length = len(text.encode())
    except UnicodeEncodeError:
        return "which is not valid Unicode (a lone surrogate)"
    return f"which is longer than {_MAX_TEXT_BYTES} bytes" if length > _MAX_TEXT_BYTES else None


def alike(name: str) -> str:
    """Return a class name without differences in case, spaces and Unicode, invisible characters included."""
    visible = "".join(char for char in name if unicodedata.category(char) != "Cf")
    return " ".join(unicodedata.normalize("NFC", visible).casefold().split())


def class_number(name: str) -> Decimal | None:
    """Return the number that a class name is, by which classes are sorted; None for other names."""
    return Decimal(name.strip()) if _CLASS_NUMBER.fullmatch(name) else None


def number_of(cell: Any, place: Place) -> float:
    """Return a number within the range of float32. Raises BadFileError for anything else."""
    number = as_number(cell)
    if math.isnan(number):
        raise place.error(cell, "not a number", "fix it")
    if abs(number) > _MAX_FLOAT32:
        raise place.error(cell, "not a number that float32 can hold", "fix it, or scale the column")
    return number


def as_number(cell: Any) -> float:
    """Return a number, also if spelled as text; NaN for anything else, including booleans."""
    if isinstance(cell, str):
        return float(cell) if _NUMBER.fullmatch(cell) else math.nan
    if isinstance(cell, (bool, np.bool_)) or not isinstance(cell, _NUMBERS):
        return math.nan
    try:
        return math.nan if math.isinf(cell) else float(cell)
    except OverflowError:
        return math.inf


def numbers_of(cell: Any, place: Place, length: int | None) -> float | list[float]:
    """Return a number, or a list of ``length`` numbers (0: a single number; None: either).

    Raises BadFileError for anything else.
    """
    is_list = isinstance(cell, (list, tuple))
    count = len(cell) if is_list else 0
    if length not in (None, count) or (is_list and not count):
        wanted = f"{length} numbers" if length else "a number"
        raise place.error(cell, f"not {wanted}", "fix it")
    if not is_list:
        return number_of(cell, place)
    if any(math.isnan(as_number(part)) for part in cell):
        raise place.error(cell, f"not {count} numbers", "fix it")
    return [number_of(part, place) for part in cell]


def rounding_remarks(values: Sequence[Any], columns: Sequence[str] = ()) -> Iterator[str]:
    """Yield a remark per column of numbers, (N,) or (N, K), that float32 rounds too much to tell them apart.

    That is by over a thousandth of their standard deviation: times in seconds since 1970, for example.
    """
    numbers = np.array(values, np.float64).reshape(len(values), -1)
    errors, spreads = np.abs(numbers - numbers.astype(np.float32)).max(0), numbers.std(0)
    for place, (error, spread) in enumerate(zip(errors, spreads, strict=True)):
        if spread > 0 and error > spread / 1000:
            name = columns[place] if columns else f"target {place}" if len(errors) > 1 else "the target"
            yield (
                f"{name}: float32 rounds its numbers by up to {error:.3g}, and their standard deviation is "
                f"{spread:.3g}; subtract an offset, or scale them"
            )


class ClassNumbers:
    """Numbers the classes of samples, read one by one: first the training, then the validation samples.

    Classes are text, integers or booleans, and all of the same kind.
    """

    def __init__(self, classes: Sequence[str] | None, num_classes: int | None) -> None:
        """``classes``, ``num_classes``: from ``data.args``. Raises BadFileError if both are set."""
        if classes is not None and num_classes is not None:
            raise BadFileError("data.args.num_classes: follows from data.args.classes; take one of them out")
        if classes is not None and len(set(classes)) < len(classes):
            raise BadFileError("data.args.classes: names a class twice; take one out")
        names = [str(number) for number in range(num_classes)] if num_classes is not None else classes
        self._is_from_args = names is not None
        #: Name → number, in the order of the samples until ``finish``.
        self._numbers = {name: number for number, name in enumerate(names or ())}
        self._is_finished = self._is_from_args
        #: The place of the first sample of each class until ``finish``.
        self._places: dict[str, Place] = {}
        self._first: tuple[str, Any, Place] | None = None

    def number(self, cell: Any, place: Place) -> int:
        """Return the number of a class, which is preliminary before ``finish``.

        Raises BadFileError for a cell that is missing or not a class, and for an unknown name once the
        classes are final.
        """
        name = self._name(cell, place)
        number = self._numbers.get(name)
        if number is not None:
            return number
        if not self._is_finished:
            self._places[name] = place
            return self._numbers.setdefault(name, len(self._numbers))
        whose = "data.args" if self._is_from_args else "the training samples"
        raise BadFileError(
            f"data.root: {place.where} has the class {shortened(name)!r}, which is not among those of "
            f"{whose} ({listed(list(map(shortened, self._numbers)), 5)}); fix it, or "
            + (
                "write all of them to data.args.classes"
                if place.has_classes_key
                else "add training samples of it"
            )
        )

    def _name(self, cell: Any, place: Place) -> str:
        if type(cell) is str and cell in self._numbers and self._first and self._first[0] == "text":
            return cell  # the most frequent case
        kind, name = _class_of(cell, place, self._numbers)
        if self._first is None:
            self._first = kind, cell, place
        elif self._first[0] != kind:
            other = self._first
            raise place.error(
                cell,
                f"a class that is {kind}, and {other[2].where} has {cell_text(other[1])!r:.40}, {other[0]}",
                "write all classes as text, or all as numbers",
            )
        return name

    def finish(self, numbers: Array) -> Array:
        """Return the training samples' numbers (N,) in the final order of the classes.

        Numbers are sorted by size, names in alphabetical order. Raises BadFileError if a class is spelled in
        two ways, as 1 and 1.0.
        """
        if self._is_finished:
            return numbers
        self._is_finished = True
        names = list(self._numbers)
        ordered = self._ordered(names)
        self._places = {}
        self._numbers = {name: number for number, name in enumerate(ordered)}
        return np.array([self._numbers[name] for name in names], dtype=np.int64)[numbers]

    def _ordered(self, names: list[str]) -> list[str]:
        others = [name for name in names if class_number(name) is None]
        if others and (
            len(others) == len(names) or not _MISSING_AMONG_NUMBERS.issuperset(map(str.lower, others))
        ):
            return sorted(names)
        if others:
            raise self._places[others[0]].missing(others[0])
        ordered = sorted(names, key=lambda name: class_number(name) or 0)
        for first, second in pairwise(ordered):
            if class_number(first) == class_number(second):
                raise self._places[second].error(
                    second, f"and {self._places[first].where} has {first!r}", "write a number in one way"
                )
        return ordered

    @property
    def names(self) -> tuple[str, ...]:
        """Return the class names in the order of their numbers."""
        return tuple(self._numbers)


def _class_of(cell: Any, place: Place, names: dict[str, int]) -> tuple[str, str]:
    """Return the kind and the name of a class. ``names`` may contain spellings of a missing label."""
    if isinstance(cell, np.generic):
        cell = cell.item()
    if cell is None or (isinstance(cell, float) and math.isnan(cell)):
        raise place.missing(cell)
    if isinstance(cell, str):
        if not cell.strip() or (cell.lower() in _MISSING and cell not in names):
            raise place.missing(cell)
        if problem := text_problem(cell):
            raise place.error(cell, f"not a class, {problem}", "fix it")
        return "text", cell
    if isinstance(cell, bool):
        return "true or false", str(cell)
    if isinstance(cell, int) and abs(cell) <= MAX_INTEGER:
        return "a number", str(cell)
    if isinstance(cell, float) and cell.is_integer() and abs(cell) < _MAX_WHOLE_FLOAT:
        return "a number", str(cell)
    if isinstance(cell, (int, float)):
        raise place.error(cell, "not a class", "fix it, or write data.args.target: number")
    raise place.error(cell, f"not a class but {type(cell).__name__}", "write text or a whole number")


class Targets:
    """Converts the targets of samples: classes, or numbers."""

    def __init__(self, classes: ClassNumbers | None, columns: tuple[str, ...] = ()) -> None:
        """``columns``: the names of numbers."""
        self._classes, self._columns = classes, columns
        self.remarks: list[str] = []

    @property
    def names(self) -> tuple[str, ...]:
        """Return the class names, or those of the numbers."""
        return self._columns if self._classes is None else self._classes.names

    def array(self, values: list[Any]) -> Array:
        """Return the targets of a split, (N,) int64, or (N,) or (N, K) float32."""
        if self._classes is None:
            self.remarks += rounding_remarks(values, self._columns)
            return np.array(values, dtype=np.float32)
        return self._classes.finish(np.array(values, dtype=np.int64))
