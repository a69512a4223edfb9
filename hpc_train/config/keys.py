"""Key paths against the schema: which keys there are, which part of it a path leads to, what was meant."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from hpc_train.config.json_schema import Node, cached_schema
from hpc_train.config.marked_yaml import MAX_DEPTH
from hpc_train.config.problems import KeyPath, Problem, dotted
from hpc_train.config.synonyms import advice_for, key_for
from hpc_train.registry import nearest

#: What the id of a run leaves out (DESIGN §6), so what a sweep can't vary.
NOT_IDENTITY = (
    "name",
    "slurm",
    "device",
    "environment",
    "logging",
    "checkpoint",
    "recovery",
    "sweep",
    "data.root",
    "data.workers",
)
#: Keys outside of the identity that a grid may vary all the same, to train one experiment on several sizes
#: of job: where they are swept, a run's id includes their values.
SCALING: tuple[KeyPath, ...] = (
    ("slurm", "nodes"),
    ("slurm", "gpus_per_node"),
    ("slurm", "ranks_per_node"),
    ("slurm", "cpus_per_gpu"),
)
GRID: KeyPath = ("sweep", "grid")


class BadKeyError(Exception):
    """A dotted key that the schema does not know."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.message)
        self.problem = problem


def members(node: Node) -> list[Node]:
    """Return what a value may be by one node: references followed, unions opened, null left out."""
    if "$ref" in node:
        return members(cached_schema()["$defs"][node["$ref"].rpartition("/")[2]])
    if "anyOf" in node:
        return [member for part in node["anyOf"] for member in members(part)]
    return [] if node.get("type") == "null" else [node]


def as_mapping(node: Node) -> Node | None:
    """Return the member that is a mapping, or None."""
    return next((member for member in members(node) if member.get("type") == "object"), None)


def child(node: Node, segment: str | int) -> Node | None:
    """Return the node below ``segment``; None where there is none or values are free."""
    if isinstance(segment, int):
        array = next((member for member in members(node) if member.get("type") == "array"), {})
        by_place = array.get("prefixItems", [])
        found = by_place[segment] if 0 <= segment < len(by_place) else array.get("items")
        return found if isinstance(found, dict) else None
    mapping = as_mapping(node) or {}
    found = mapping.get("properties", {}).get(segment, mapping.get("additionalProperties"))
    return found if isinstance(found, dict) else None


def node_at(path: KeyPath) -> Node | None:
    """Return the schema's node of a key path."""
    node: Node | None = cached_schema()
    for segment in path:
        node = child(node, segment) if node else None
    return node


def known_keys(path: KeyPath) -> list[str]:
    """Return the keys that the mapping at ``path`` may have."""
    node = node_at(path)
    return list((as_mapping(node) or {}).get("properties", {})) if node else []


def meant_path(path: KeyPath) -> KeyPath | None:
    """Return the key of the file that the unknown key ``path`` likely stands for."""
    if called := key_for(path):
        meant = tuple(called.partition(" ")[0].split("."))
        return meant if meant != path else None
    if advice_for(path):
        return None
    elsewhere = _elsewhere(path)
    if len(elsewhere) == 1:
        return elsewhere[0]
    beside = nearest(str(path[-1]), known_keys(path[:-1]))
    return (*path[:-1], beside) if beside else None


def _elsewhere(path: KeyPath) -> list[KeyPath]:
    """Return the keys of other sections that are called like the last key of ``path``."""
    return [found for found in all_keys() if found[-1] == path[-1]]


def unknown_key(path: KeyPath, rest: Sequence[str] = ()) -> Problem:
    """Return the problem of a key that the schema does not know, with what was likely meant.

    ``rest``: the keys below it, where a dotted path names it.
    """
    return Problem(path, "is no key of the file", _remedy(path, rest), on_key=True)


def _remedy(path: KeyPath, rest: Sequence[str]) -> str:
    called = key_for(path)
    if called and called != dotted(path):
        return f"write {'.'.join([called, *rest])}" if _exists(called, rest) else f"write {called}"
    if advice := advice_for(path):
        return advice
    meant = meant_path(path)
    elsewhere = _elsewhere(path)
    if meant is None and elsewhere:
        meant = elsewhere[0]
    if meant is None:
        return f"take it out, or write one of {', '.join(known_keys(path[:-1]))}"
    if rest and _exists(dotted(meant), rest):
        return f"did you mean {dotted((*meant, *rest))}?"
    return f"did you mean {meant[-1] if meant[:-1] == path[:-1] else dotted(meant)}?"


def _exists(key: str, rest: Sequence[str]) -> bool:
    return node_at((*key.split("."), *rest)) is not None


def all_keys(path: KeyPath = ()) -> Iterator[KeyPath]:
    """Yield every fixed key path of the schema."""
    for key in known_keys(path):
        yield (*path, key)
        yield from all_keys((*path, key))


def split_key(text: str) -> KeyPath:
    """Split ``optimization.optimizer.lr`` along the schema. Raises BadKeyError where there is no such key.

    Below ``sweep.grid`` the rest is one key; below ``args`` any names go.
    """
    segments = text.split(".")
    if not all(segments) or len(segments) > MAX_DEPTH:
        raise BadKeyError(Problem((text,), "is no key path", "write one like optimization.optimizer.lr"))
    path: KeyPath = ()
    node: Node | None = cached_schema()
    for place, segment in enumerate(segments):
        if path == GRID:
            return (*path, ".".join(segments[place:]))
        node = _step(node, path, segments[place:])
        path = (*path, segment)
    return path


def _step(node: Node | None, path: KeyPath, segments: Sequence[str]) -> Node | None:
    """Return the node below the first of ``segments``."""
    segment = segments[0]
    if node is None:
        return None
    mapping = as_mapping(node)
    if mapping is None:
        remedy = f"write {dotted(path)} alone"
        raise BadKeyError(
            Problem((*path, segment), f"{dotted(path)} has no keys below it", remedy, on_key=True)
        )
    if "properties" in mapping and segment not in mapping["properties"]:
        raise BadKeyError(unknown_key((*path, segment), segments[1:]))
    return child(node, segment)


def replaced(data: dict[str, Any], path: KeyPath, value: object) -> dict[str, Any]:
    """Return ``data`` with ``value`` at ``path``; sections are made where absent, the rest is shared."""
    key, rest = path[0], path[1:]
    assert isinstance(key, str), "a key path of split_key has no indices"
    if not rest:
        return data | {key: value}
    below = data.get(key)
    if isinstance(below, bool) and key == "compile":
        below = {"enabled": below}
    return data | {key: replaced(below if isinstance(below, dict) else {}, rest, value)}
