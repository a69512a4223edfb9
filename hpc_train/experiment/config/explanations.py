"""Translates pydantic's errors into problems in plain words, based on the schema."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

from pydantic import ValidationError

from hpc_train.experiment.config import keys
from hpc_train.experiment.config.fields import Arguments, Section
from hpc_train.experiment.config.keys import Node, as_mapping, members, node_at
from hpc_train.experiment.config.problems import (
    MAX_PROBLEMS,
    KeyPath,
    Problem,
    shown,
    unknown_argument_problem,
)
from hpc_train.experiment.config.remedies import in_flow, remedy, usual_mode
from hpc_train.experiment.config.translations import target_of, unknown_keys
from hpc_train.registry import nearest


def explain(error: ValidationError, data: dict[str, Any]) -> list[Problem]:
    """Return one problem per key that ``error`` is about; ``data`` is the validated input."""
    return _explained(error, data, keys.cached_schema(), lambda path: unknown_keys(path, data), target_of)


def args_problems(path: KeyPath, owner: str, section: type[Section], args: Arguments) -> list[Problem]:
    """Return one problem per invalid key of ``args``, the arguments under ``path`` of the part ``owner``."""
    names = sorted(section.model_fields)

    def unknown(below: KeyPath) -> Iterable[Problem]:
        problem = unknown_argument_problem(below, owner, str(below[-1]), names)
        return [replace(problem, on_key=True, code="key.unknown")]

    try:
        section.model_validate(args)
    except ValidationError as error:
        schema = keys.section_schema(section)
        problems = _explained(error, args, schema, unknown, lambda below: (nearest(str(below[-1]), names),))
        return [replace(problem, path=(*path, *problem.path)) for problem in problems]
    return []


def _explained(
    error: ValidationError,
    data: dict[str, Any],
    schema: Node,
    unknown: Callable[[KeyPath], Iterable[Problem]],
    meant: Callable[[KeyPath], Sequence[object] | None],
) -> list[Problem]:
    """Return one problem per key of ``data``, which ``schema`` describes.

    ``unknown``: returns the problems with an unknown key. ``meant``: returns the key that it probably means.
    """
    problems: dict[KeyPath, Problem] = {}
    for entry in islice(error.errors(include_url=False), MAX_PROBLEMS + 1):
        if entry["type"] == "extra_forbidden":
            of_entry = unknown(_key_path(entry["loc"], schema))
        else:
            of_entry = [_problem(entry["type"], entry["loc"], entry.get("ctx", {}), data, schema)]
        for problem in islice(of_entry, MAX_PROBLEMS + 1):
            problems.setdefault(problem.path, problem)
    misspelt = {meant(path) for path, problem in problems.items() if _is_unknown(problem)}
    # Swept keys beside ``parameters`` belong there.
    misspelt |= {
        (*path[:-1], "parameters")
        for path, problem in problems.items()
        if _is_unknown(problem) and problem.remedy.startswith("write parameters: ")
    }
    # A misspelt key is not reported as missing as well.
    return [
        problem for path, problem in problems.items() if path not in misspelt or problem.code != "key.missing"
    ]


def failed_paths(problems: list[Problem], data: dict[str, Any]) -> set[KeyPath]:
    """Return the keys of ``data`` that the rules can't rely on: invalid keys, those that an unknown key
    probably means, and mappings of which no key is valid.
    """
    failed: set[KeyPath] = set()
    invalid = {problem.path for problem in problems}
    for problem in problems:
        path = problem.path
        if not _is_unknown(problem) and not _is_free(path):
            failed.add(path)
        elif meant := target_of(path):
            failed.add(meant)
        if _is_unknown(problem):
            # The first part that is not in the schema, which may wrap the key.
            ends = range(1, len(path) + 1)
            failed.add(path[: next(end for end in ends if node_at(path[:end]) is None or end == len(path))])
        if _is_free(path) and invalid.issuperset((*path[:-1], key) for key in keys.value_at(data, path[:-1])):
            failed.add(path[:-1])
    return failed


def _is_free(path: KeyPath) -> bool:
    """Tell whether the user chose the key's name, in a mapping whose other keys can be checked without it."""
    return not isinstance(path[-1], int) and not keys.known_keys(path[:-1])


def _is_unknown(problem: Problem) -> bool:
    return problem.code == "key.unknown"


def _problem(kind: str, loc: KeyPath, context: dict[str, Any], data: dict[str, Any], schema: Node) -> Problem:
    path = _key_path(loc, schema)
    if kind == "missing" and isinstance(path[-1], str):
        example = _example_for(path, data) or _example_of(_node(path, schema))
        return Problem(path, "is missing", f"write {path[-1]}: {example}", code="key.missing")
    if loc[-1] == "[key]":
        rule = _node(path[:-1], schema).get("propertyNames", {}).get("patternErrorMessage", "a name")
        return Problem(path, f"needs {rule}", "fix the name", on_key=True, code="key.name")
    if isinstance(path[-1], int) and kind == "missing":
        path = path[:-1]
    if kind == "value_error":
        message, _, advice = str(context["error"]).partition("; ")
        return Problem(path, message, advice, code="value.invalid")
    node, value = _node(path, schema), _given_at(data, path)
    is_list = isinstance(value, list) and any(member.get("type") == "array" for member in members(node))
    actual = f"a list of {len(value)}" if is_list else shown(value)
    return Problem(
        path, f"needs {wanted(node)}, got {actual}", remedy(path, node, value), code="value.invalid"
    )


def _node(path: KeyPath, schema: Node) -> Node:
    node: Node | None = schema
    for segment in path:
        node = keys.child(node, segment) if node else None
    return node or {}


def _given_at(data: Any, path: KeyPath) -> Any:
    """Return the value at a path; where a short form (``loss: bce``) is in place of its section, that."""
    for segment in path:
        if isinstance(data, str):
            break
        data = data[segment]
    return data


def _key_path(loc: KeyPath, node: Node | None) -> KeyPath:
    """Return ``loc``, below ``node``, without the segments that pydantic appends after unions and keys."""
    path: KeyPath = ()
    for segment in loc:
        mapping = as_mapping(node) if node else None
        if isinstance(segment, str) and mapping is None:
            break
        path = (*path, segment)
        node = keys.child(node, segment) if node else None
        if node is None:
            break
    return path


def _example_of(node: Node) -> str:
    """Return an example value for a required key, as written in a file."""
    if "examples" not in node:
        return wanted(node)
    example = in_flow(node["examples"][0])
    is_number = any(member.get("type") in {"integer", "number"} for member in members(node))
    return f"{example}, or {wanted(node)}" if is_number else example


def _example_for(path: KeyPath, data: dict[str, Any]) -> str | None:
    """Return the value of a missing key that follows from the keys beside it; None if none does."""
    section = keys.value_at(data, path[:-1])
    named = section if isinstance(section, dict) else {}
    if path == ("data", "name"):
        has_root = any(key == "root" or _means((*path[:-1], key), "root") for key in named)
        return "imagefolder" if has_root else None
    if path[-1] != "mode":
        return None
    metrics = [named[key] for key in named if key == "metric" or _means((*path[:-1], key), "metric")]
    return usual_mode(str(metrics[0])) if metrics else None


def _means(path: KeyPath, key: str) -> bool:
    """Return True if another tool's key means ``key`` beside it: ``monitor`` means ``metric``."""
    return keys.meant_path(path) == (*path[:-1], key)


def wanted(node: Node) -> str:
    """Describe the values that a schema node accepts: ``a whole number of 0 to 64``."""
    return " or ".join(dict.fromkeys(_wanted(member) for member in members(node)))


def _wanted(node: Node) -> str:
    if "const" in node:
        return str(node["const"])
    if "enum" in node:
        return f"one of {', '.join(map(str, node['enum']))}"
    match node.get("type"):
        case "boolean":
            return "true or false"
        case "integer":
            return f"a whole number{_bounds(node)}"
        case "number":
            return f"a number{_bounds(node)}"
        case "array":
            return _wanted_list(node)
        case "object":
            required = ", ".join(node.get("required", []))
            return f"a mapping with {required}" if required else "a mapping"
        case "string":
            return _wanted_text(node)
    return "a value"


def _wanted_text(node: Node) -> str:
    if "examples" in node and "pattern" not in node:
        return f"text like {', '.join(node['examples'])}"
    if "maxLength" in node:
        return f"text of {node.get('minLength', 0)} to {node['maxLength']} characters"
    unexplained = f"text that matches {node['pattern']}" if "pattern" in node else "text"
    rule: str = node.get("patternErrorMessage", unexplained)
    return rule


def _wanted_list(node: Node) -> str:
    if "prefixItems" in node:
        return f"a list of {len(node['prefixItems'])}, each {wanted(node['prefixItems'][0])}"
    least, most = node.get("minItems"), node.get("maxItems")
    if most is not None:
        return f"a list of {least} to {most:,} values" if least else f"a list of at most {most:,} values"
    return "a list of at least one value" if least else "a list"


def _bounds(node: Node) -> str:
    low, above = node.get("minimum"), node.get("exclusiveMinimum")
    high, below = node.get("maximum"), node.get("exclusiveMaximum")
    below = "2**63" if below == 2**63 else below
    if low is not None and high is not None:
        return f" of {low} to {high}"
    lower = f"of at least {low}" if low is not None else f"above {above}" if above is not None else ""
    upper = (
        f"{'' if lower else 'of '}at most {high}"
        if high is not None
        else f"below {below}"
        if below is not None
        else ""
    )
    both = " and ".join(part for part in (lower, upper) if part)
    return f" {both}" if both else ""
