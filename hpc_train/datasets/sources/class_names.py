"""Class names → class numbers, for data sets whose files name the class of each sample."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hpc_train.errors import BadFileError, listed, shortened

Array = np.ndarray[Any, Any]


class ClassNumbers:
    """Numbers the classes of samples, read one by one: first those of training, then those of validation."""

    def __init__(self, classes: Sequence[str] | None, num_classes: int | None) -> None:
        """``classes``, ``num_classes``: those of ``data.args``. Raises BadFileError if both are given."""
        if classes is not None and num_classes is not None:
            raise BadFileError("data.args.num_classes: follows from data.args.classes; take one of them out")
        if classes is not None and len(set(classes)) < len(classes):
            raise BadFileError("data.args.classes: names a class twice; take one out")
        given = [str(number) for number in range(num_classes)] if num_classes is not None else classes
        self._is_given = given is not None
        #: Name → number, in the order in which they were found, until ``finish``.
        self._numbers = {name: number for number, name in enumerate(given or ())}
        self._is_finished = self._is_given

    def number(self, name: str, where: str) -> int:
        """Return the number of a class, a preliminary one before ``finish``. ``where``: file and line.

        Raises BadFileError for a name that is unknown once the classes are known.
        """
        found = self._numbers.get(name)
        if found is not None:
            return found
        if not self._is_finished:
            return self._numbers.setdefault(name, len(self._numbers))
        whose = "data.args" if self._is_given else "the training samples"
        raise BadFileError(
            f"data.root: {where} has the class {shortened(name)!r}, which is not among those of {whose} "
            f"({listed(list(self._numbers), 5)}); fix it, or write all of them to data.args.classes"
        )

    def finish(self, numbers: Array) -> Array:
        """Return the training samples' numbers (N,) in the final order of the classes."""
        if self._is_finished:
            return numbers
        self._is_finished = True
        names = list(self._numbers)
        ordered = sorted(names, key=int) if all(map(_is_number, names)) else sorted(names)
        self._numbers = {name: number for number, name in enumerate(ordered)}
        return np.array([self._numbers[name] for name in names], dtype=np.int64)[numbers]

    @property
    def names(self) -> tuple[str, ...]:
        """Return the class names in the order of their numbers."""
        return tuple(self._numbers)


def _is_number(name: str) -> bool:
    return name.isascii() and name.isdecimal() and str(int(name)) == name
