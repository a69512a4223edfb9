"""What to write in place of a wrong value, from the value and the schema's node of its key."""

from __future__ import annotations

import json
import math
import re
from typing import Any, cast

from hpc_train.errors import shortened
from hpc_train.experiment.config.durations import seconds_in
from hpc_train.experiment.config.fields import OWN_PART_PATTERN
from hpc_train.experiment.config.json_schema import Node
from hpc_train.experiment.config.keys import GRID, PARAMETERS, as_mapping, child, members, node_at
from hpc_train.experiment.config.marked_yaml import read_value, resolve_scalar
from hpc_train.experiment.config.problems import KeyPath, shown, split_at_colon, with_blank
from hpc_train.experiment.config.synonyms import value_for
from hpc_train.registry import as_factory, nearest, parts

#: Of a section that people may know by one value alone: `model: resnet50`, `parallel: fsdp`.
_MAIN_KEYS = ("name", "strategy")
_NUMBERS = {"integer", "number"}
_GB = {"k": 1 / 1024**2, "m": 1 / 1024, "g": 1.0, "t": 1024.0}
_MEMORY = re.compile(r"(\d{1,9}(?:\.\d{1,9})?)\s*([kmgt])i?b?", re.ASCII)
#: ``0,1`` or ``50,000``
_COMMA = re.compile(r"[+-]?(\d+),(\d+)(?:[eE][+-]?\d+)?")
_PERCENT = re.compile(r"(\d{1,3}(?:\.\d{1,9})?)\s*%", re.ASCII)
#: Suffix of a key → its unit, and its seconds if it is of time.
_UNITS = {"_min": ("minutes", 60), "_s": ("seconds", 1), "_h": ("hours", 3600), "_gb": ("GB", None)}
#: Integers that a float represents exactly; above it the intended value is unknown.
_LARGE = 2**53


def remedy(path: KeyPath, node: Node, value: object) -> str:
    """Return what to write at ``path``, whose node does not accept ``value``."""
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
    if types & {"integer", "number"} and (comma := _COMMA.fullmatch(value)):
        is_thousands = comma[1] != "0" and len(comma[2]) == 3
        return f"write {value.replace(',', '' if is_thousands else '.')}"
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


def in_flow(value: Any) -> str:
    """Return ``value`` on one line of YAML, text in quotes where it needs them."""
    if isinstance(value, dict):
        return f"{{{', '.join(f'{in_flow(key)}: {in_flow(item)}' for key, item in value.items())}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(in_flow, value))}]"
    if isinstance(value, str):
        return value if read_value(f"[{value}]") == ([value], []) else json.dumps(value, ensure_ascii=False)
    return shown(value) if isinstance(value, bool) else "null" if value is None else str(value)


def in_unit_of(path: KeyPath, text: str, node: Node) -> str | None:
    """Return what to write for ``10min`` or ``64G`` where the key takes a number with a fixed unit; else
    None.
    """
    number = next((each for each in members(node) if each.get("type") in {"integer", "number"}), None)
    if number is None:
        return None
    unit = next((unit for ending, unit in _UNITS.items() if str(path[-1]).endswith(ending)), None)
    if unit is None:
        percent = _PERCENT.fullmatch(text.strip()) if number.get("maximum") == 1 else None
        return f"write {float(percent[1]) / 100:g}" if percent else None
    name, seconds = unit
    amount = _in_gb(text) if seconds is None else (seconds_in(text) or 0) / seconds
    if not amount:
        return None
    amount = math.ceil(amount) if number["type"] == "integer" else amount
    return f"write {amount:.10g} ({path[-1]} is in {name})"


def _in_gb(text: str) -> float | None:
    match = _MEMORY.fullmatch(text.strip().lower())
    return float(match[1]) * _GB[match[2]] if match else None
