"""Selects names by shell patterns, as in ``model.freeze``: ``*`` any text, ``?`` a character, ``[…]`` a set.

Used wherever the file names parameters or layers of a model.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from fnmatch import fnmatchcase

from torch import nn

from hpc_train.errors import BadFileError, listed
from hpc_train.registry import nearest

#: In front of a pattern: what it matches is excluded.
_NOT = "!"


def selected(names: Collection[str], patterns: Sequence[str], key: str, what: str = "parameter") -> set[str]:
    """Return the names that match a pattern and none that begins with ``!``.

    Raises BadFileError, for the key of the file, if a pattern matches no name. ``what``: what is named.
    """
    matches = {pattern: _matches(names, pattern.removeprefix(_NOT)) for pattern in patterns}
    for pattern, found in matches.items():
        if not found:
            raise _matches_nothing(names, pattern, key, what)
    wanted = [found for pattern, found in matches.items() if not pattern.startswith(_NOT)]
    excluded = [found for pattern, found in matches.items() if pattern.startswith(_NOT)]
    return set[str]().union(*wanted).difference(*excluded)


def parameters_by_name(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return name → parameter; one that several modules share under each of its names."""
    return dict(model.named_parameters(remove_duplicate=False))


def _matches(names: Iterable[str], pattern: str) -> set[str]:
    return {name for name in names if fnmatchcase(name, pattern)}


def _matches_nothing(names: Collection[str], pattern: str, key: str, what: str) -> BadFileError:
    known = {*names, *(f"{parent}.*" for name in names for parent in _parents(name))}
    close = nearest(pattern.removeprefix(_NOT), sorted(known))
    tops = sorted({name.partition(".")[0] for name in names})
    begin = f"their names begin with {listed(tops, 12) or 'nothing'}"
    remedy = f"did you mean '{close}'?" if close else begin
    return BadFileError(f"{key}: '{pattern}' matches no {what} of the model; {remedy}")


def _parents(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:end]) for end in range(1, len(parts))]
