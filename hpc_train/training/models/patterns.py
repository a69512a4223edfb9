"""Selects names by shell patterns, as in ``model.freeze``: ``*`` any text, ``?`` a character, ``[…]`` a set.

Used wherever the file names parameters or layers of a model.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from fnmatch import fnmatchcase

from torch import nn

from hpc_train.errors import BadFileError, listed
from hpc_train.registry import nearest

#: Prefix of a pattern whose matches are excluded.
_NOT = "!"


def selected(names: Collection[str], patterns: Sequence[str], key: str, kind: str = "parameter") -> set[str]:
    """Return the names that match a pattern and no pattern starting with ``!``.

    Raises BadFileError, for the key of the file, if a pattern matches no name. ``kind``: of the named
    objects.
    """
    matches = {
        pattern: {name for name in names if fnmatchcase(name, pattern.removeprefix(_NOT))}
        for pattern in patterns
    }
    for pattern, matching in matches.items():
        if not matching:
            raise _matches_nothing(names, pattern, key, kind)
    included = [matching for pattern, matching in matches.items() if not pattern.startswith(_NOT)]
    excluded = [matching for pattern, matching in matches.items() if pattern.startswith(_NOT)]
    return set[str]().union(*included).difference(*excluded)


def parameters_by_name(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return name → parameter; a shared parameter is listed under each of its names."""
    return dict(model.named_parameters(remove_duplicate=False))


def _matches_nothing(names: Collection[str], pattern: str, key: str, kind: str) -> BadFileError:
    parts = [name.split(".") for name in names]
    parents = (".".join(part[:end]) for part in parts for end in range(1, len(part)))
    candidates = {*names, *(f"{parent}.*" for parent in parents)}
    close = nearest(pattern.removeprefix(_NOT), sorted(candidates))
    tops = sorted({name.partition(".")[0] for name in names})
    begin = f"their names begin with {listed(tops, 12) or 'nothing'}"
    remedy = f"did you mean '{close}'?" if close else begin
    return BadFileError(f"{key}: '{pattern}' matches no {kind} of the model; {remedy}")
