"""Shell completion for runs, keys of the file and names of parts: ``autocompletion`` of parameters.

Typer completes commands and options, and calls these functions; for files it leaves the shell to complete.
Folders are listed; no run is opened.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import typer

#: Maximum of folder entries read, and of candidates offered.
_MAX_ENTRIES, _MAX_CANDIDATES = 50_000, 1000
#: Names that a shell inserts and evaluates unchanged.
_PLAIN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")
#: Key of the file → the group of parts that its value is from.
_PARTS = {"task": "tasks", "data.name": "datasets", "parallel.strategy": "strategies"}


def runs(incomplete: str) -> list[str]:
    """Return experiments and, once a part of it is typed, ids of runs; ``name/id`` after a slash."""
    from hpc_train.paths import runs_root

    root = runs_root()
    experiment, slash, _ = incomplete.partition("/")
    if slash:
        names = {f"{experiment}/{name}" for name in _folders(root / experiment)}
    else:
        names = set(_folders(root))
        names |= {name for folder in names for name in _folders(root / folder)} if incomplete else set()
    return sorted(name for name in names if name.startswith(incomplete))[:_MAX_CANDIDATES]


def keys() -> list[str]:
    """Return the keys of the file."""
    from hpc_train.experiment.config.keys import all_keys, as_mapping, node_at
    from hpc_train.experiment.config.problems import dotted

    nodes = {dotted(path): node_at(path) or {} for path in all_keys()}
    return sorted(key for key, node in nodes.items() if not (as_mapping(node) or {}).get("properties"))


def overrides(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return ``key=``; with the key's values if it has a list of them, and is typed or the only match.

    In bash, ``key``, ``=`` and the value are separate words.
    """
    before = [word for value in ctx.params.values() if isinstance(value, list | tuple) for word in value]
    if values := list(_values(before[-2] if before[-1:] == ["="] else before[-1] if before else "")):
        return values
    typed, is_value, _ = incomplete.partition("=")
    candidates = [typed] if is_value else [key for key in keys() if key.startswith(incomplete)]
    joined = [f"{candidates[0]}={value}" for value in _values(candidates[0])] if len(candidates) == 1 else []
    return joined or [f"{key}=" for key in candidates if not is_value]


def runs_and_overrides(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return runs and, once something is typed, the result of ``overrides``."""
    return [*runs(incomplete), *(overrides(ctx, incomplete) if incomplete else ())]


def launchers() -> list[str]:
    """Return the names of launchers."""
    return _parts("launchers")


def tasks() -> list[str]:
    """Return the names of tasks."""
    return _parts("tasks")


def examples() -> list[str]:
    """Return the names of recipes."""
    from hpc_train.cli.init import EXAMPLES

    return ["list", *sorted(path.stem for path in EXAMPLES.glob("*.yaml"))]


def _values(key: str) -> Iterator[str]:
    from hpc_train.experiment.config.keys import members, node_at

    if key in _PARTS:
        yield from _parts(_PARTS[key])
    for member in members(node_at(tuple(key.split("."))) or {}):
        yield from map(str, member.get("enum", ()))
        yield from [member["const"]] if isinstance(member.get("const"), str) else []
        yield from ("true", "false") if member.get("type") == "boolean" else ()


def _parts(group: str) -> list[str]:
    from hpc_train.registry import parts

    return sorted(parts(group))


def _folders(folder: Path) -> list[str]:
    """Return the folders whose names a shell needs no quoting for: hpc-train creates no others."""
    try:
        with os.scandir(folder) as entries:
            shown = islice(entries, _MAX_ENTRIES)
            return [entry.name for entry in shown if _PLAIN.fullmatch(entry.name) and entry.is_dir()]
    except OSError:
        return []
