"""A rule of the file across keys: it registers itself under the code of its problems."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import cast

from hpc_train.experiment.config.problems import MAX_PROBLEMS, KeyPath, Problem, related
from hpc_train.experiment.config.program_section import one_word
from hpc_train.experiment.config.schema import Experiment, Job
from hpc_train.redaction import names_secret

#: A variable of a shell.
VARIABLE = re.compile(r"\$(?:[A-Z][A-Z0-9_]*\b|\{[A-Z][A-Z0-9_]*\})")

#: A rule yields its problems, or returns one or None. One that reads only keys of ``Job`` accepts any job.
Find = Callable[[Experiment], Iterator[Problem] | Problem | None]


@dataclass(frozen=True)
class Rule:
    """A rule across keys. Skipped if one of the keys that it ``reads`` is invalid."""

    code: str
    reads: tuple[KeyPath, ...]
    find: Find
    #: Whether it looks up names or properties of installed packages, which may start a child process.
    looks_up_names: bool

    def can_judge(self, failed: Collection[KeyPath]) -> bool:
        """Return True if all keys that the rule reads are valid."""
        return not any(related(read, path) for read in self.reads for path in failed)

    def fits(self, kind: type[Job]) -> bool:
        """Return True if files of this kind have the keys that the rule reads."""
        return all(read[0] in kind.model_fields for read in self.reads)

    def problems(self, experiment: Job) -> Iterator[Problem]:
        """Yield the problems with the rule's code."""
        result = self.find(cast("Experiment", experiment))
        problems = [result] if isinstance(result, Problem) else result or ()
        for problem in islice(problems, MAX_PROBLEMS + 1):
            yield replace(problem, code=self.code, reads=self.reads)


#: The registered rules by code.
RULES: dict[str, Rule] = {}


def rule(code: str, *reads: str, looks_up_names: bool = False) -> Callable[[Find], Find]:
    """Register a rule's function. ``reads``: the dotted key paths that it reads, separated by blanks."""
    paths = tuple(tuple(key.split(".")) for keys in reads for key in keys.split())

    def register(find: Find) -> Find:
        assert code not in RULES, f"two rules have the code {code}"
        RULES[code] = Rule(code, paths, find, looks_up_names)
        return find

    return register


def unexpanded(path: KeyPath, text: str) -> Problem | None:
    """Return the problem with a text that contains a variable of a shell, which nothing expands."""
    match = VARIABLE.search(text)
    if match is None:
        return None
    whole = os.path.expandvars(text)
    remedy = f"write {one_word(whole)}" if "$" not in whole else "write the value itself"
    if names_secret(match[0]):
        remedy = "take it out: the program inherits the environment in which `submit` runs"
    return Problem(path, f"{match[0]} is for a shell, and none reads it", remedy)
