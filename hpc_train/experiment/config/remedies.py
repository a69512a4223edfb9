"""The values that a key accepts, by the schema's node of the key, and remedies for other values."""

from __future__ import annotations

import json
import math
import re
from typing import Any, cast

from hpc_train.errors import shortened
from hpc_train.experiment.config import scalars
from hpc_train.experiment.config.fields import OWN_PART_PATTERN, seconds_in
from hpc_train.experiment.config.keys import (
    GRID,
    NOT_IDENTITY,
    PARAMETERS,
    Node,
    as_mapping,
    child,
    members,
    node_at,
)
from hpc_train.experiment.config.marked_yaml import read_value
from hpc_train.experiment.config.problems import KeyPath, dotted, related, shown, split_at_colon, with_blank
from hpc_train.experiment.config.synonyms import as_factory, slurm_request, usual_mode, value_for
from hpc_train.registry import nearest

#: Keys of sections that people may know by a value alone: ``parallel: fsdp``, ``ema: 0.999``.
_MAIN_KEYS = (
    "name", "strategy", "metric", "project", "decay", "patience", "every_epochs", "every_steps", "rank",
    "brightness", "partition",
)  # fmt: skip
#: Section → a key without which it is not complete, beside those that the schema requires.
_ALSO_NEEDED: dict[KeyPath, str] = {("early_stopping",): "patience"}
#: Key → the remedy for a list, which other tools take.
_LISTS: dict[KeyPath, str] = {
    ("data", "transform"): "take it out; data.image_size and data.augment transform the images",
    ("data", "normalize"): "write {mean: [0.485, 0.456, 0.406], std: [0.229, 0.224, 0.225]}",
}
_NUMBERS = {"integer", "number"}
#: Type of a number → the schema's types that accept it.
_TYPES = {int: ("integer", "number"), float: ("number",)}
#: Values that turn a feature off.
OFF = {"false", "none", "no", "off"}
_PERCENT = re.compile(r"(\d{1,3}(?:\.\d{1,9})?)\s*%", re.ASCII)
#: An option of sbatch and its value.
_OPTION = re.compile(r"--([a-z-]+)(?:[= ]([^\s-]\S*))?")
_TRUTH = re.compile(r"(yes|on|y|true)\b|(?:no|off|n|false)\b")
#: Text that is a path, not a name.
_PATH = re.compile(r"(/|\./|\.\./|~|[A-Za-z]:\\)")
#: Keys whose value is a size in pixels.
_SIZES = ("image_size", "eval_size")
#: Longer text is not looked through for numbers.
_LONG = 100
#: Suffix of a key → its unit, and its seconds if it is of time.
_UNITS = {"_min": ("minutes", 60), "_s": ("seconds", 1), "_h": ("hours", 3600), "_gb": ("GB", None)}
#: Integers that a float represents exactly; above it the intended value is unknown.
_LARGE = 2**53


def remedy(path: KeyPath, node: Node, value: object) -> str:
    """Return the remedy for ``value`` at ``path``, whose node does not accept it."""
    types = {member.get("type") for member in members(node)}
    section = as_mapping(node)
    if isinstance(value, list) and path in _LISTS:
        return _LISTS[path]
    if path == ("data", "name") and isinstance(value, str) and _PATH.match(value):
        return f"write name: imagefolder, root: {in_flow(shortened(value))}"
    if path == ("checkpoint", "every") and type(value) is int:
        return f"write every_steps: {value} in its place"
    if isinstance(value, str) and (elsewhere := _remedy_beside(path, value)):
        return elsewhere
    # ``precision: true`` and ``normalize: true`` are names of values, too.
    meant = value_for(path, path[-1] if value is True else value)
    if meant and types != {"object"}:
        return f"write {meant}"
    if value is None:
        example = node.get("examples")
        needed = f"write {in_flow(example[0])}, or another value" if example else "write a value"
        parent = as_mapping(node_at(path[:-1]) or {}) or {}
        is_required = path[-1] in parent.get("required", [])
        return needed if is_required else "take it out, or write a value"
    if section and isinstance(value, str) and (unspaced := split_at_colon(value, section.get("properties"))):
        return with_blank(*unspaced)
    if path[:-1] in PARAMETERS and isinstance(value, list) and value:
        return _remedy_for_values(value)
    if section and types == {"object"}:
        return _remedy_for_section(path, section, value)
    if path[-1] in _SIZES and (sides := scalars.sides_in(value)):
        return f"write {sides}"
    if isinstance(value, str):
        return in_unit_of(path, value, node) or _remedy_for_text(path, value, node, types)
    return _remedy_for_value(path, value, node, types)


def _remedy_beside(path: KeyPath, text: str) -> str | None:
    """Return the remedy for text that belongs, in whole or in part, to a key beside ``path``."""
    if path == ("checkpoint", "every") and (seconds := seconds_in(text)):
        return f"write every_min: {seconds / 60:g} in its place"
    if path == ("slurm", "gpus_per_node") and (request := slurm_request("gpus_per_node", text, {})):
        return f"write {in_flow(request)[1:-1]}"
    if path == ("logging", "wandb", "project") and re.fullmatch(r"[\w.-]+/[\w.-]+", text):
        entity, _, project = text.partition("/")
        return f"write project: {project}, entity: {entity}"
    if path[-1] == "warmup_epochs" and (percent := _PERCENT.fullmatch(text.strip())):
        return f"write a number like {float(percent[1]) * 0.3:g}, which is {percent[1]}% of 30 epochs"
    return None


def _remedy_for_value(path: KeyPath, value: object, node: Node, types: set[object]) -> str:
    if "integer" in types and isinstance(value, float) and value.is_integer() and abs(value) < _LARGE:
        return f"write {int(value)}"
    if types == {"string"} and not isinstance(value, dict | list) and _takes_text(node, shown(value)):
        return f"put it in quotes: '{shown(value)}'"
    if isinstance(value, float) and not math.isfinite(value):
        return "write a finite number"
    if isinstance(value, dict) and path[:-1] == GRID:
        return _remedy_for_nested(path, value)
    if isinstance(value, dict) and len(value) == 1 and fits(node, inner := next(iter(value.values()))):
        return f"write {in_flow(inner)}"
    if isinstance(value, list) and len(value) == 1 and fits(node, value[0]):
        return f"write {in_flow(value[0])}"
    if path[0] == "slurm" and isinstance(value, list) and types == {"string"}:
        return _remedy_for_text(path, ",".join(map(str, value)), node, types)
    if path == ("sweep", "list") and isinstance(value, dict):
        return f"write grid: {shortened(in_flow(value))} in its place"
    if isinstance(value, list) and value and "array" not in types and is_swept(path):
        return _remedy_for_swept(path, value, node)
    if "array" in types and not isinstance(value, list):
        items = child(node, 0) or {}
        if any("prefixItems" in member for member in members(node)) and fits(items, value):
            return f"write {in_flow([value, 2 * cast(Any, value)])}"
        if not isinstance(value, dict) and (fits(items, value) or members(items) == [{}]):
            return f"write {in_flow([value])}"
    return _example(node, types)


def is_swept(path: KeyPath) -> bool:
    """Return True if a sweep can vary the key."""
    return path[0] != "sweep" and not any(related(path, tuple(key.split("."))) for key in NOT_IDENTITY)


def _remedy_for_swept(path: KeyPath, values: list[Any], node: Node) -> str:
    """Return the remedy for a list of values, each of which is probably meant for a run."""
    grid = {"grid": {dotted(path): values}}
    one = next((value for value in values if fits(node, value)), None)
    if one is None:
        return _example(node, {member.get("type") for member in members(node)})
    return f"write {in_flow(one)}, and for a run with each of them sweep: {shortened(in_flow(grid), 200)}"


def _remedy_for_section(path: KeyPath, section: Node, value: object) -> str:
    keys = section.get("properties", {})
    if str(value).lower() in OFF and not any(value_for((*path, key), value) for key in keys):
        return "take it out"
    text = " ".join(map(str, value)) if isinstance(value, list) else str(value)
    if path == ("slurm", "extra") and (options := _OPTION.findall(text[:_LONG])):
        extra = {name: scalars.resolve_scalar(word) if word else True for name, word in options}
        return f"write {in_flow(extra)}"
    if (written := section_like(path, value)) is not None:
        return f"write {shortened(in_flow(written), 200)}"
    names = f", where key is one of {', '.join(keys)}" if keys else ""
    return f"write its keys, like {{key: value}}{names}"


def section_like(path: KeyPath, value: object) -> dict[str, Any] | None:
    """Return the section to write at ``path`` in place of ``value``; None if nothing suggests its keys."""
    keys = (as_mapping(node_at(path) or {}) or {}).get("properties", {})
    if value is True:
        return completed(path, {})
    if isinstance(value, list):
        return _section_of_list(path, value, keys)
    if path == ("logging", "mlflow") and isinstance(value, str):
        return {"tracking_uri" if "://" in value else "experiment": value}
    if path == ("data",) and isinstance(value, str) and _PATH.match(value):
        return {"name": "imagefolder", "root": value}
    meant = {key: value_for((*path, key), value) or value for key in keys}
    named = [key for key, node in keys.items() if str(meant[key]) in _choices(node)]
    main = [key for key in _MAIN_KEYS if key in keys and fits(keys[key], meant[key])]
    key = next(iter([*named, *main]), None)
    return _section_of_names([value], path, keys) if key is None else completed(path, {key: meant[key]})


def _section_of_list(path: KeyPath, values: list[Any], keys: dict[str, Node]) -> dict[str, Any] | None:
    """Return the section whose keys are named in a list: ``logging: [wandb, csv]``."""
    if path == ("sweep",) and all(isinstance(value, dict) for value in values):
        return {"list": values}
    if path == GRID and all(isinstance(value, dict) for value in values):
        return {key: [value[key] for value in values if key in value] for value in values for key in value}
    if len(values) == 1 and isinstance(values[0], dict) and set(values[0]) <= set(keys):
        return values[0]
    if "name" in keys and values and isinstance(values[0], str):
        return section_like(path, values[0])
    return _section_of_names(values, path, keys)


def _section_of_names(values: list[Any], path: KeyPath, keys: dict[str, Node]) -> dict[str, Any] | None:
    """Return the section with examples of the keys that the values name; None if one is not a key."""
    names = [nearest(value, keys) for value in values if isinstance(value, str)]
    if not names or len(names) < len(values):
        return None
    examples = {name: _value_like((*path, name), keys[name]) for name in names if name is not None}
    return None if None in examples.values() else examples or None


def completed(path: KeyPath, section: dict[str, Any]) -> dict[str, Any]:
    """Return the section with examples of the required keys that it lacks."""
    mapping = as_mapping(node_at(path) or {}) or {}
    needed = [*mapping.get("required", []), *filter(None, [_ALSO_NEEDED.get(path)])]
    missing = {key: mapping["properties"][key]["examples"][0] for key in needed if key not in section}
    if "mode" in missing:
        missing["mode"] = usual_mode(str((missing | section).get("metric"))) or missing["mode"]
    whole = missing | section
    return {key: whole[key] for key in dict.fromkeys([*needed, *section])}


def fits(node: Node, value: object) -> bool:
    """Return True if a value, no list or mapping, has a type, the bounds and the form of the node."""
    return any(_fits(member, value) for member in members(node))


def _fits(member: Node, value: object) -> bool:
    if choices := _choices(member):
        return value in choices
    if isinstance(value, bool) or member.get("type") == "boolean":
        return isinstance(value, bool) and member.get("type") == "boolean"
    if isinstance(value, str):
        return member.get("type") == "string" and bool(re.search(member.get("pattern", ""), value))
    if not isinstance(value, int | float) or member.get("type") not in _TYPES[type(value)]:
        return False
    low, high = member.get("minimum", value), member.get("maximum", value)
    above, below = member.get("exclusiveMinimum", -math.inf), member.get("exclusiveMaximum", math.inf)
    return bool(low <= value <= high and above < value < below)


def _value_like(path: KeyPath, node: Node) -> Any:
    first = members(node)[0]
    if first.get("type") == "object":
        return completed(path, {})
    if first.get("type") == "boolean":
        return True
    if first.get("type") in _NUMBERS:
        return _number_like(first, node)
    return next(iter(_choices(node)), node.get("default"))


def _remedy_for_values(values: list[Any]) -> str:
    """Return the distribution to write in place of a list of values."""
    are_bounds = len(values) == 2 and all(type(each) in {int, float} for each in values)
    choices = shortened(in_flow(values))
    return f"write {{choice: {choices}}}" + (f", or {{uniform: {choices}}}" if are_bounds else "")


def _remedy_for_nested(path: KeyPath, value: dict[str, Any]) -> str:
    """Return the dotted key to write in the grid in place of nested mappings."""
    key, inner = str(path[-1]), cast(Any, value)
    while isinstance(inner, dict) and inner:
        below, inner = next(iter(inner.items()))
        key = f"{key}.{below}"
    values = in_flow(inner if isinstance(inner, list) and inner else ["a", "b"])
    return f"write the whole key path: {shortened(key)}: {shortened(values)}"


def _example(node: Node, types: set[object]) -> str:
    if types == {"string"} and (choices := _choices(node)):
        return f"write {choices[0]}"
    if numbers := [member for member in members(node) if member.get("type") in _NUMBERS]:
        return f"write a number like {_number_like(numbers[0], node)}"
    if "boolean" in types:
        return "write true"
    if "string" in types:
        return "write text of this form"
    like = re.search(r"like ([^ ,;]+)", str((child(node, 0) or {}).get("patternErrorMessage")))
    return f"write {in_flow([like[1]])}" if like else "write a list of this form"


def _number_like(number: Node, node: Node) -> float:
    """Return a number for the key ``node``, of which ``number`` is a member; not 0, which may mean off."""
    for known in (node.get("default"), number.get("minimum"), *number.get("examples", [])):
        if isinstance(known, int | float) and known:
            return known
    if number["type"] == "integer":
        return 1
    return 0.5 if max(number.get("maximum", 2), number.get("exclusiveMaximum", 0)) <= 1 else 0.1


def _remedy_for_text(path: KeyPath, value: str, node: Node, types: set[object]) -> str:
    if choices := _choices(node):
        close = nearest(value, choices) or nearest(value.lower(), choices)
        return f"did you mean {close}?" if close else _example(node, types)
    if types & _NUMBERS and scalars.reads_as_number(value):
        return f"write {value} without quotes"
    comma = scalars.COMMA.fullmatch(value)
    if types & _NUMBERS and comma and fits(node, scalars.resolve_scalar(scalars.with_point(comma))):
        return f"write {scalars.with_point(comma)}"
    if types & _NUMBERS and len(items := _items(value, {})) > 1 and is_swept(path):
        return _remedy_for_swept(path, items, node)
    if types & _NUMBERS and (number := scalars.number_in(value)):
        number = str(int(float(number))) if float(number).is_integer() and float(number) < _LARGE else number
        if fits(node, scalars.resolve_scalar(number)):
            return f"write {number}"
    if "boolean" in types and (truth := _TRUTH.match(value.lower())):
        quotes = " without quotes" if value.lower() in {"true", "false"} else ""
        return f"write {'true' if truth[1] else 'false'}{quotes}"
    if "object" in types and (section := section_like(path, value)):
        return f"write {shortened(in_flow(section), 200)}"
    if types & _NUMBERS and value.lower() in OFF and "boolean" not in types:
        return "take it out"
    if "array" in types:
        return f"write {shortened(in_flow(_items(value, child(node, 0) or {})))}"
    module, dot, attribute = value.rpartition(".")
    slug = re.sub(r"[^a-z0-9._-]+", "-", value.lower()).strip("-._")
    if path[0] == "slurm" and _takes_text(node, joined := ",".join(re.findall(r"[^\s,]+", value))):
        return f"write {in_flow(joined)}"
    if path == ("activation_checkpointing",) and (every := re.search(r"every \d{1,4}", value)):
        return f"write {every[0]}"
    if path == ("name",) and _takes_text(node, slug):
        return f"write {slug}"
    factory = as_factory(value) or (f"{module}:{attribute}" if dot else None)
    if attribute == "py" and OWN_PART_PATTERN in str(node.get("pattern")):
        return f"write {as_factory(f'{value}:Name')}, with the name of a class or function in it"
    if factory and OWN_PART_PATTERN in str(node.get("pattern")) and _takes_text(node, factory):
        return f"write {factory}"
    return _example(node, types)


def _items(text: str, node: Node) -> list[Any]:
    """Return the values of ``0.1,0.01``, ``0..4``, or ``a b`` if no item has a blank; or the text alone."""
    if numbers := scalars.range_in(text):
        return numbers
    items = [
        scalars.resolve_scalar(item.strip()) for item in text.strip("()").split(",") if len(item) < _LONG
    ]
    pieces = text.replace(",", " ").split()
    are_words = all(_takes_text(node, word) for word in pieces)
    return list(pieces) if are_words and not all(fits(node, item) for item in items) else items


def _takes_text(node: Node, text: str) -> bool:
    texts = [member for member in members(node) if member.get("type") == "string"]
    return not _choices(node) and any(re.search(member.get("pattern", ""), text) for member in texts)


def _choices(node: Node) -> list[str]:
    parts = members(node)
    return [str(choice) for part in parts for choice in part.get("enum", [part.get("const")]) if choice]


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
    """Return the remedy for ``10min`` or ``64G`` if the key takes a number with a fixed unit, else None."""
    number = next((each for each in members(node) if each.get("type") in {"integer", "number"}), None)
    if number is None:
        return None
    unit = next((unit for ending, unit in _UNITS.items() if str(path[-1]).endswith(ending)), None)
    if unit is None:
        is_share = 1 in (number.get("maximum"), number.get("exclusiveMaximum"))
        percent = _PERCENT.fullmatch(text.strip()) if is_share else None
        return f"write {float(percent[1]) / 100:g}" if percent else None
    name, seconds = unit
    amount = scalars.gigabytes(text) if seconds is None else (seconds_in(text) or 0) / seconds
    if not amount:
        return None
    amount = math.ceil(amount) if number["type"] == "integer" else amount
    return f"write {amount:.10g} ({path[-1]} is in {name})"


def example_of(node: Node) -> str:
    """Return an example value for a required key, as written in a file."""
    if "examples" not in node:
        return wanted(node)
    example = in_flow(node["examples"][0])
    is_number = any(member.get("type") in {"integer", "number"} for member in members(node))
    return f"{example}, or {wanted(node)}" if is_number else example


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
