"""A rule of the file across keys, and when it can be asked."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

from hpc_train.config.problems import KeyPath, Problem, related
from hpc_train.config.schema import Experiment

Find = Callable[[Experiment], Iterator[Problem]]


@dataclass(frozen=True)
class Rule:
    """A rule across keys. Skipped if one of the keys that it ``reads`` is invalid."""

    reads: tuple[KeyPath, ...]
    find: Find

    def can_judge(self, failed: Collection[KeyPath]) -> bool:
        """Return True if all keys that the rule reads are valid."""
        return not any(related(read, path) for read in self.reads for path in failed)


def rule(*reads: str) -> Callable[[Find], Rule]:
    """Make a rule of a function that yields problems; ``reads`` are the dotted key paths that it reads."""
    return lambda find: Rule(tuple(tuple(key.split(".")) for key in reads), find)
