"""Translates pydantic's errors into problems in plain words, based on the schema."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, cast

from pydantic import ValidationError

from hpc_train.config.durations import seconds_in
from hpc_train.config.fields import OWN_PART_PATTERN, Section
from hpc_train.config.json_schema import Node, cached_schema, section_schema
from hpc_train.config.keys import (
    GRID,
    PARAMETERS,
    as_mapping,
    child,
    known_keys,
    meant_path,
    members,
    node_at,
    unknown_key,
)
from hpc_train.config.marked_yaml import read_value, resolve_scalar
from hpc_train.config.problems import (
    MAX_PROBLEMS,
    KeyPath,
    Problem,
    shown,
    split_at_colon,
    unknown_argument,
    with_blank,
)
from hpc_train.config.synonyms import value_for
from hpc_train.errors import shortened
from hpc_train.registry import as_factory, nearest, parts

#: Of a section that people may know by one value alone: `model: resnet50`, `parallel: fsdp`.
_MAIN_KEYS = ("name", "strategy")
_NUMBERS = {"integer", "number"}
#: Words in the names of metrics of which a lower value is better, and of those of which a higher one is.
_FALLING = {"loss", "perplexity", "mae", "mse", "rmse", "error"}
_RISING = {"accuracy", "f1", "iou", "miou", "map", "map50", "precision", "r2", "recall"}


def explain(error: ValidationError, data: dict[str, Any]) -> list[Problem]:
    """Return one problem per key that ``error`` is about; ``data`` is the validated input."""
    found: dict[KeyPath, Problem] = {}
    for entry in islice(error.errors(include_url=False), MAX_PROBLEMS + 1):
        problem = _problem(entry["type"], entry["loc"], entry.get("ctx", {}), data)
        found.setdefault(problem.path, problem)
    meant = {meant_path(path) for path, problem in found.items() if _is_unknown(problem)}
    # A misspelt key is not reported as missing as well.
    return [problem for path, problem in found.items() if path not in meant or not _is_missing(problem)]


def explain_arguments(
    error: ValidationError, section: type[Section], path: KeyPath, args: dict[str, Any], owner: str
) -> list[Problem]:
    """Return one problem per key of ``args``, the validated mapping at ``path``, that ``error`` is about.

    ``section``: what the part called ``owner`` takes; the file's schema says nothing about it.
    """
    found: dict[KeyPath, Problem] = {}
    meant = set()
    for entry in islice(error.errors(include_url=False), MAX_PROBLEMS + 1):
        below = _key_path(entry["loc"], section_schema(section))
        node: Node = section_schema(section)
        for segment in below:
            node = child(node, segment) or {}
        whole = (*path, *below)
        if entry["type"] == "extra_forbidden":
            name, known = str(below[-1]), sorted(section.model_fields)
            meant.add((*path, nearest(name, known)))
            found[whole] = replace(unknown_argument(whole, owner, name, known), on_key=True)
        elif entry["type"] == "missing":
            found.setdefault(whole, _missing(whole, _example_of(node)))
        elif entry["type"] == "value_error":
            found.setdefault(whole, _of_validator(whole, entry["ctx"]))
        else:
            found.setdefault(whole, _wrong_value(whole, node, _given_at(args, below)))
    return [problem for key, problem in found.items() if key not in meant or not _is_missing(problem)]


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
        elif meant := meant_path(path):
            failed.add(meant)
        if _is_free(path) and invalid.issuperset((*path[:-1], key) for key in value_at(data, path[:-1])):
            failed.add(path[:-1])
    return failed


def _is_free(path: KeyPath) -> bool:
    """Tell whether the user chose the key's name, in a mapping whose other keys can be checked without it."""
    return not isinstance(path[-1], int) and not known_keys(path[:-1])


def _is_unknown(problem: Problem) -> bool:
    return problem.on_key and problem.message == "unknown key"


def _is_missing(problem: Problem) -> bool:
    return problem.message == "is missing"


def _problem(kind: str, loc: KeyPath, context: dict[str, Any], data: dict[str, Any]) -> Problem:
    path = _key_path(loc, cached_schema())
    if kind == "extra_forbidden":
        return unknown_key(path)
    if kind == "missing" and isinstance(path[-1], str):
        return _missing(path, _mode(path, data) if path[-1] == "mode" else _example_of(node_at(path) or {}))
    if loc[-1] == "[key]":
        rule = (node_at(path[:-1]) or {}).get("propertyNames", {}).get("patternErrorMessage", "a name")
        return Problem(path, f"needs {rule}", "fix the name", on_key=True)
    if isinstance(path[-1], int) and kind == "missing":
        path = path[:-1]
    if kind == "value_error":
        return _of_validator(path, context)
    return _wrong_value(path, node_at(path) or {}, _given_at(data, path))


def _of_validator(path: KeyPath, context: dict[str, Any]) -> Problem:
    message, _, remedy = str(context["error"]).partition("; ")
    return Problem(path, message, remedy)


def _missing(path: KeyPath, example: str) -> Problem:
    return Problem(path, "is missing", f"write {path[-1]}: {example}")


def _given_at(data: Any, path: KeyPath) -> Any:
    """Return the value at a path; where a short form (``loss: bce``) is in place of its section, that."""
    for segment in path:
        if isinstance(data, str):
            break
        data = data[segment]
    return data


def _key_path(loc: KeyPath, node: Node | None) -> KeyPath:
    """Return ``loc`` without the segments that pydantic appends after a union or a mapping key.

    ``node``: of the schema that ``loc`` starts from.
    """
    path: KeyPath = ()
    for segment in loc:
        mapping = as_mapping(node) if node else None
        if isinstance(segment, str) and mapping is None:
            break
        path = (*path, segment)
        node = child(node, segment) if node else None
        if node is None:
            break
    return path


def value_at(data: Any, path: KeyPath) -> Any:
    """Return the value at a path that exists."""
    for segment in path:
        data = data[segment]
    return data


def _example_of(node: Node) -> str:
    """Return an example value for a required key, as written in a file."""
    if "examples" not in node:
        return wanted(node)
    example = in_flow(node["examples"][0])
    is_number = any(member.get("type") in {"integer", "number"} for member in members(node))
    return f"{wanted(node)}, like {example}" if is_number else example


def _mode(path: KeyPath, data: dict[str, Any]) -> str:
    """Return the mode that fits the metric beside it, or both where it is not known which fits."""
    section = value_at(data, path[:-1])
    metric = str(section.get("metric") if isinstance(section, dict) else "")
    return usual_mode(metric) or wanted(node_at(path) or {})


def usual_mode(metric: str) -> str | None:
    """Return the mode for which a better value of the metric is better, by the words of its name."""
    words = set(re.split(r"[^a-z0-9]+", metric))
    if words & _FALLING:
        return "min"
    return "max" if words & _RISING else None


def in_flow(value: Any) -> str:
    """Return ``value`` on one line of YAML, text in quotes where it needs them."""
    if isinstance(value, dict):
        return f"{{{', '.join(f'{in_flow(key)}: {in_flow(item)}' for key, item in value.items())}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(in_flow, value))}]"
    if isinstance(value, str):
        return value if read_value(f"[{value}]") == ([value], []) else json.dumps(value, ensure_ascii=False)
    return shown(value) if isinstance(value, bool) else "null" if value is None else str(value)


def _wrong_value(path: KeyPath, node: Node, value: object) -> Problem:
    message = f"needs {wanted(node)}, got {shown(value)}"
    if isinstance(value, list) and any(member.get("type") == "array" for member in members(node)):
        message = f"needs {wanted(node)}, got a list of {len(value)}"
    return Problem(path, message, _remedy(path, node, value))


def _remedy(path: KeyPath, node: Node, value: object) -> str:
    types = {member.get("type") for member in members(node)}
    if meant := value_for(path, value):
        return f"write {meant}"
    if value is None:
        return "write a value" if _is_required(path) else "write a value, or take the key out"
    section = as_mapping(node)
    if section and isinstance(value, str) and (unspaced := split_at_colon(value, section.get("properties"))):
        return with_blank(*unspaced)
    if path[:-1] in PARAMETERS and isinstance(value, list) and value:
        return _remedy_for_values(value)
    if section and types == {"object"}:
        return _remedy_for_section(path, section, value)
    if isinstance(value, str):
        return in_unit_of(path, value, node) or _remedy_for_text(value, node, types)
    if "integer" in types and isinstance(value, float) and value.is_integer() and abs(value) < _LARGE:
        return f"write {int(value)}"
    if types == {"string"} and not isinstance(value, dict | list) and _takes_text(node, shown(value)):
        return f"put it in quotes: '{shown(value)}'"
    if isinstance(value, float) and not math.isfinite(value):
        return "write a finite number"
    if isinstance(value, dict) and path[:-1] == GRID:
        return _remedy_for_nested(path, value)
    if "array" in types and not isinstance(value, list):
        takes_any = not isinstance(value, dict) and members(child(node, 0) or {}) == [{}]
        return f"write a list: {in_flow([value]) if takes_any else '[a, b]'}"
    return _example(node, types)


def _remedy_for_section(path: KeyPath, section: Node, value: object) -> str:
    """Return the section to write in place of a single value, which is probably its most important key's."""
    required = list(section.get("required", []))
    main = next((key for key in _MAIN_KEYS if key in section.get("properties", {})), None)
    written = [f"{key}: …" for key in required if key != main]
    if main is not None and isinstance(value, str) and value.strip():
        is_timms = path == ("model",) and value.isidentifier() and value not in parts("models")
        given = f"{main}: {in_flow(f'timm/{shortened(value)}' if is_timms else shortened(value))}"
        return f"write {{{', '.join([given, *written])}}}"
    if required:
        return f"write {{{', '.join(f'{key}: …' for key in required)}}}"
    return "write {} for the defaults" if value is True else _remedy_for_keys(section, value)


def _remedy_for_keys(section: Node, value: object) -> str:
    """Return the keys to write in a section without required ones; those that the value names come first."""
    nodes = section.get("properties", {})
    named = value if isinstance(value, list) else [value]
    found = [nearest(each, nodes) for each in named if isinstance(each, str)]
    if found and len(found) == len(named) and None not in found:
        return f"write {{{', '.join(f'{key}: {_value_like(nodes[key])}' for key in found)}}}"
    keys = f", where key is one of {', '.join(nodes)}" if nodes else ""
    return f"write its keys, like {{key: value}}{keys}"


def _value_like(node: Node) -> str:
    """Return a value of a key for an example; ``…`` where only the user knows one."""
    first = members(node)[0]
    if first.get("type") == "object":
        return f"{{{', '.join(f'{key}: …' for key in first.get('required', []))}}}"
    if first.get("type") == "boolean":
        return "true"
    return str(_number_like(first, node)) if first.get("type") in _NUMBERS else "…"


def _remedy_for_values(values: list[Any]) -> str:
    """Return the distribution to write in place of a list of values."""
    shown_values = shortened(in_flow(values))
    are_bounds = len(values) == 2 and all(type(each) in {int, float} for each in values)
    between = f" or {{uniform: {shown_values}}}" if are_bounds else ""
    return f"write {{choice: {shown_values}}}{between}"


def _remedy_for_nested(path: KeyPath, value: dict[str, Any]) -> str:
    """Return the dotted key to write in the grid in place of nested mappings."""
    key, inner = str(path[-1]), cast(Any, value)
    while isinstance(inner, dict) and inner:
        below, inner = next(iter(inner.items()))
        key = f"{key}.{below}"
    values = in_flow(inner if isinstance(inner, list) and inner else ["a", "b"])
    return f"write the whole key path: {shortened(key)}: {shortened(values)}"


def in_unit_of(path: KeyPath, text: str, node: Node) -> str | None:
    """Return what to write for ``10min`` or ``64G`` where the key takes a number with a fixed unit; else
    None.
    """
    number = next((each for each in members(node) if each.get("type") in {"integer", "number"}), None)
    if number is None:
        return None
    unit = next((unit for ending, unit in _UNITS.items() if str(path[-1]).endswith(ending)), None)
    amount = None if unit is None else unit.amount(text)
    if unit is None and number.get("maximum") == 1 and (match := _PERCENT.fullmatch(text.strip())):
        return f"write {float(match[1]) / 100:g}"
    if unit is None or not amount:
        return None
    amount = math.ceil(amount) if number["type"] == "integer" else amount
    return f"write {amount:.10g} ({path[-1]} is in {unit.name})"


@dataclass(frozen=True)
class _Unit:
    """The unit of a key's number. ``amount`` parses a value with a unit; it returns None for other text."""

    name: str
    amount: Callable[[str], float | None]


def _in_time(seconds: int) -> Callable[[str], float | None]:
    def amount(text: str) -> float | None:
        found = seconds_in(text)
        return None if found is None else found / seconds

    return amount


def _in_gb(text: str) -> float | None:
    match = _MEMORY.fullmatch(text.strip().lower())
    return float(match[1]) * _GB[match[2]] if match else None


_GB = {"k": 1 / 1024**2, "m": 1 / 1024, "g": 1.0, "t": 1024.0}
_MEMORY = re.compile(r"(\d{1,9}(?:\.\d{1,9})?)\s*([kmgt])i?b?", re.ASCII)
#: Integers that a float represents exactly; above it the intended value is unknown.
_LARGE = 2**53
_PERCENT = re.compile(r"(\d{1,3}(?:\.\d{1,9})?)\s*%", re.ASCII)
#: Suffix of a key → its unit.
_UNITS = {
    "_min": _Unit("minutes", _in_time(60)),
    "_s": _Unit("seconds", _in_time(1)),
    "_h": _Unit("hours", _in_time(3600)),
    "_gb": _Unit("GB", _in_gb),
}


def _example(node: Node, types: set[object]) -> str:
    """Return what to write where the message already says what the key takes."""
    if types == {"boolean"} or (types == {"string"} and _choices(node)):
        return "write one of them"
    if numbers := [member for member in members(node) if member.get("type") in _NUMBERS]:
        return f"write a number like {_number_like(numbers[0], node)}"
    return "write text of this form" if "string" in types else "write a list of this form"


def _number_like(number: Node, node: Node) -> float:
    """Return a number for the key ``node``, of which ``number`` is a member; not 0, which may mean off."""
    for known in (node.get("default"), number.get("minimum"), *number.get("examples", [])):
        if isinstance(known, int | float) and known:
            return known
    if number["type"] == "integer":
        return 1
    return 0.5 if max(number.get("maximum", 2), number.get("exclusiveMaximum", 0)) <= 1 else 0.1


def _remedy_for_text(value: str, node: Node, types: set[object]) -> str:
    if choices := _choices(node):
        close = nearest(value, choices) or nearest(value.lower(), choices)
        return f"did you mean {close}?" if close else _example(node, types)
    if types & {"integer", "number"} and _reads_as_number(value):
        return f"write {value} without quotes"
    if "boolean" in types and value.lower() in {"yes", "on", "y", "true", "no", "off", "n", "false"}:
        return f"write {'true' if value.lower() in {'yes', 'on', 'y', 'true'} else 'false'} without quotes"
    if "array" in types:
        return f"write a list: {in_flow([shortened(value)])}"
    module, dot, attribute = value.rpartition(".")
    factory = as_factory(value) or (f"{module}:{attribute}" if dot else None)
    if factory and OWN_PART_PATTERN in str(node.get("pattern")) and _takes_text(node, factory):
        return f"write {factory}"
    return _example(node, types)


def _takes_text(node: Node, text: str) -> bool:
    (text_node,) = members(node)
    return not _choices(node) and re.search(text_node.get("pattern", ""), text) is not None


def _reads_as_number(text: str) -> bool:
    try:
        value = resolve_scalar(text)
    except ValueError:
        return False
    return isinstance(value, int | float) and not isinstance(value, bool)


def _choices(node: Node) -> list[str]:
    parts = members(node)
    return [str(choice) for part in parts for choice in part.get("enum", [part.get("const")]) if choice]


def _is_required(path: KeyPath) -> bool:
    parent = as_mapping(node_at(path[:-1]) or {}) or {}
    return path[-1] in parent.get("required", [])


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
            keys = ", ".join(node.get("required", []))
            return f"a mapping with {keys}" if keys else "a mapping"
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
        return f"a list of {least or 0} to {most:,} values"
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
