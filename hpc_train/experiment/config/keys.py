"""Key paths and the schema: which keys exist, which node a path refers to, suggestions for unknown keys.

The schema is a JSON Schema (draft 2020-12), for editors and for the error messages.
"""

from __future__ import annotations

import ast
import inspect
import shlex
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from functools import cache
from itertools import pairwise, takewhile
from typing import Any

from hpc_train.experiment.config.fields import Section
from hpc_train.experiment.config.marked_yaml import MAX_DEPTH
from hpc_train.experiment.config.problems import KeyPath, Problem, dotted, split_at_colon, with_blank
from hpc_train.experiment.config.schema import Experiment, Job, Program, keys_of
from hpc_train.experiment.config.synonyms import advice_for, key_beside, key_for
from hpc_train.registry import nearest, suggestion

Node = dict[str, Any]
#: Sections and keys that do not enter a run's id, so a sweep can't vary them.
NOT_IDENTITY = (
    "name",
    "slurm",
    "device",
    "environment",
    "logging",
    "profile",
    "checkpoint",
    "recovery",
    "sweep",
    "stages",
    "data.root",
    "data.cache",
    "data.cache_pixels",
    "data.stage",
    "data.workers",
    "evaluation.as_job",
    "evaluation.job_time_limit",
    "program.metrics",
    "program.kill_after_s",
    "program.check",
)
#: Keys outside the id that a grid may vary nevertheless, to train one experiment on several job sizes: where
#: they are swept, the run's id includes their values.
SCALING: tuple[KeyPath, ...] = (
    ("slurm", "nodes"),
    ("slurm", "gpus_per_node"),
    ("slurm", "ranks_per_node"),
    ("slurm", "cpus_per_gpu"),
)
GRID: KeyPath = ("sweep", "grid")
#: Mappings with a distribution by dotted key path.
PARAMETERS: tuple[KeyPath, ...] = (("sweep", "random", "parameters"), ("sweep", "search", "parameters"))
#: Mappings whose keys are dotted key paths.
_BY_KEY_PATH: tuple[KeyPath, ...] = (GRID, *PARAMETERS)
#: The section with the resources that a job requests from its queue; without effect on this machine.
JOB = "slurm"
#: The section in place of our trainer's.
PROGRAM = "program"
#: The required sections of our trainer's file.
_TRAINING = ("task", "model", "data", "optimization")
#: What word processors and chats make of ``--``.
_DASHES = "‐‑‒–—−"
#: Sections whose keys other tools and sbatch write at the top level.
_OF_JOBS = ("slurm", "environment", "sweep", "logging")


class BadKeyError(Exception):
    """A dotted key that is not in the schema."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.message)
        self.problem = problem


def members(node: Node) -> list[Node]:
    """Return the alternatives of a node: references resolved, unions expanded, null removed."""
    if "$ref" in node:
        return members(cached_schema()["$defs"][node["$ref"].rpartition("/")[2]])
    if "anyOf" in node:
        return [member for part in node["anyOf"] for member in members(part)]
    return [] if node.get("type") == "null" else [node]


def as_mapping(node: Node) -> Node | None:
    """Return the member that is a mapping, or None."""
    return next((member for member in members(node) if member.get("type") == "object"), None)


def child(node: Node, segment: str | int) -> Node | None:
    """Return the child node for ``segment``; None where there is none or any value is allowed."""
    if isinstance(segment, int):
        array = next((member for member in members(node) if member.get("type") == "array"), {})
        by_place = array.get("prefixItems", [])
        found = by_place[segment] if 0 <= segment < len(by_place) else array.get("items")
        return found if isinstance(found, dict) else None
    mapping = as_mapping(node) or {}
    found = mapping.get("properties", {}).get(segment, mapping.get("additionalProperties"))
    return found if isinstance(found, dict) else None


def node_at(path: KeyPath, schema: Node | None = None) -> Node | None:
    """Return the schema's node of a key path. ``schema``: default: that of the file."""
    node: Node | None = cached_schema() if schema is None else schema
    for segment in path:
        node = child(node, segment) if node else None
    return node


def description_of(path: KeyPath) -> str:
    """Return the description of a key; empty if there is no such key."""
    described_schema()
    return str((node_at(path) or {}).get("description", ""))


def known_keys(path: KeyPath) -> list[str]:
    """Return the keys that the mapping at ``path`` may have."""
    node = node_at(path)
    return list((as_mapping(node) or {}).get("properties", {})) if node else []


def meant_path(path: KeyPath) -> KeyPath | None:
    """Return the key that the unknown key ``path`` most likely means."""
    if unspaced := split_at_colon(str(path[-1]), known_keys(path[:-1])):
        return (*path[:-1], unspaced[0])
    if beside := key_beside(path):
        return (*path[:-1], *beside.split("."))
    if called := key_for(path):
        meant = tuple(called.partition(" ")[0].split("."))
        return meant if meant != path else None
    return None if advice_for(path) else _similar(path)


def _similar(path: KeyPath, *, any_section: bool = False) -> KeyPath | None:
    """Return the only key of the same name in another section, else one of a similar name beside ``path``.

    ``any_section``: without these, the first of several sections that have the name.
    """
    elsewhere = [key for key in all_keys() if key[-1] == path[-1]]
    if elsewhere and (len(elsewhere) == 1 or len(path) == 1):
        return elsewhere[0]
    if close := nearest(str(path[-1]).lower(), known_keys(path[:-1])):
        return (*path[:-1], close)
    return elsewhere[0] if elsewhere and any_section else None


def unknown_key(path: KeyPath, rest: Sequence[str] = ()) -> Problem:
    """Return the problem of an unknown key, with the key that is probably meant. ``rest``: keys below it."""
    if len(path) == 1 and node_at(path) is not None:  # the other kind of file has it
        message = "belongs to hpc-train's own trainer, and this file has a program"
        remedy = "take it out, or take program out"
        return Problem(path, message, remedy, on_key=True, code="program.trainer-key")
    return Problem(path, "unknown key", _remedy(path, rest), on_key=True, code="key.unknown")


def job_key(path: KeyPath) -> KeyPath | None:
    """Return the key of the cluster or of the environment that an unknown key means, in any file."""
    meant = meant_path(path)
    return meant if meant and meant[0] in _OF_JOBS and meant[-1] != "every_steps" else None


def argument_remedy(key: str) -> str:
    """Return the remedy for a name, in a file with a program, that is probably an argument of the script."""
    if beside := program_key(key):
        return f"write {PROGRAM}.{beside}"
    return f"write {PROGRAM}.args.{key.rpartition('.')[2].lstrip('-')} for an argument of the script"


def means_program(data: Mapping[str, Any]) -> bool:
    """Return True for a file without a section ``program`` that has its command, or its name misspelled."""
    if any(key in data for key in (PROGRAM, *_TRAINING)):
        return False
    return any(
        program_key(key) == "command" or nearest(key, (PROGRAM,)) for key in data if isinstance(key, str)
    )


def program_key(name: str) -> str | None:
    """Return the key of the section ``program`` that has this name, or that other tools call so."""
    return name if name in known_keys((PROGRAM,)) else key_beside((PROGRAM, name))


def _remedy(path: KeyPath, rest: Sequence[str]) -> str:
    if unspaced := split_at_colon(str(path[-1]), known_keys(path[:-1])):
        return with_blank(*unspaced)
    if path[0] == PROGRAM:  # the user's own names, of which ours are no synonyms
        known = known_keys(path[:-1])
        if beside := key_beside(path):
            return f"did you mean {beside}?"
        otherwise = f"take it out; {dotted(path[:-1])} has the keys {', '.join(known)}"
        if len(path) == 2:
            of_job = job_key((path[-1],))
            otherwise = f"write {dotted(of_job)}" if of_job else argument_remedy(str(path[-1]))
        return suggestion(str(path[-1]), known, otherwise)
    called = key_for(path)
    if called and called != dotted(path):
        return f"write {'.'.join([called, *rest])}" if _exists(called, rest) else f"write {called}"
    if advice := advice_for(path):
        return advice
    meant = _similar(path, any_section=True)
    if meant is None:
        known = known_keys(path[:-1])
        keys = f"; {dotted(path[:-1]) or 'the file'} has the keys {', '.join(known)}" if known else ""
        return f"take it out{keys}"
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
    """Split ``optimization.optimizer.lr`` along the schema. Raises BadKeyError for an unknown key.

    Below ``sweep.grid`` and ``parameters`` the rest is one key; below ``args`` any name is valid.
    """
    segments = text.split(".")
    if not all(segments) or len(segments) > MAX_DEPTH:
        raise BadKeyError(
            Problem((text,), "is not a key path", "write one like optimization.optimizer.lr", code="key.path")
        )
    path: KeyPath = ()
    node: Node | None = cached_schema()
    for place, segment in enumerate(segments):
        if path in _BY_KEY_PATH:
            return (*path, ".".join(segments[place:]))
        node = _step(node, path, segments[place:])
        path = (*path, segment)
    return path


def divided_override(override: str, rest: list[str]) -> Problem | None:
    """Return the problem with a word of the command line that is not a whole ``KEY=VALUE``, else None.

    ``rest``: those after it; the ones that belong to it are removed.
    """
    key, equals, text = override.partition("=")
    is_open = sum(map(text.count, "{[")) > sum(map(text.count, "}]"))
    values = list(takewhile(lambda word: "=" not in word.lstrip("=") and not _is_key(word), rest))
    if equals and (not values or (text and not is_open)):
        return None
    path, remedy = (key,), "write KEY=VALUE"
    name, colon, value = (part.strip() for part in override.partition(":"))
    if equals or (values and _is_key(override)):
        values = values if is_open else values[: 1 + (values[0] == "=")]
        del rest[: len(values)]
        joined = " ".join([text, *values]) if is_open else values[-1].lstrip("=")
        remedy = f"write {shlex.quote(f'{key}={joined}')}"
    elif colon and value and _is_key(name):
        remedy = f"write {shlex.quote(f'{name}={value}')}"
    elif override.startswith("~") and _is_key(override[1:]):
        remedy = f"write {override[1:]}=null"
    elif override and override[0] in _DASHES:
        remedy = f"write --{override.lstrip(_DASHES + '-')}"
    message = "the shell divides it at the blank" if is_open else "has no value"
    return Problem(path, message, remedy, code="key.path")


def _is_key(text: str) -> bool:
    try:
        return bool(split_key(text))
    except BadKeyError:
        return False


def accepts_null(path: KeyPath) -> bool:
    """Return True if the key accepts null, or anything; for other keys null means the default."""
    node = node_at(path)
    parts = [{}] if node is None else node.get("anyOf", [node])
    return any(part.get("type", "null") == "null" and "$ref" not in part for part in parts)


def _step(node: Node | None, path: KeyPath, segments: Sequence[str]) -> Node | None:
    segment = segments[0]
    if node is None:
        return None
    mapping = as_mapping(node)
    if mapping is None:
        remedy = f"write {dotted(path)} alone"
        message = f"{dotted(path)} has no keys below it"
        raise BadKeyError(Problem((*path, segment), message, remedy, on_key=True, code="key.path"))
    if "properties" in mapping and segment not in mapping["properties"]:
        raise BadKeyError(unknown_key((*path, segment), segments[1:]))
    return child(node, segment)


def value_at(data: Any, path: KeyPath) -> Any:
    """Return the value at a path of a file's content; None if it has none."""
    for segment in path:
        if isinstance(segment, int):
            data = data[segment] if isinstance(data, list) else None
        else:
            data = data.get(segment) if isinstance(data, dict) else None
    return data


def replaced(data: dict[str, Any], path: KeyPath, value: object) -> dict[str, Any]:
    """Return a copy with ``value`` at ``path``; missing sections are created, the rest is shared."""
    key, rest = path[0], path[1:]
    assert isinstance(key, str), "a key path from split_key has no indices"
    if not rest:
        return data | {key: value}
    below = data.get(key)
    if isinstance(below, bool) and key == "compile":
        below = {"enabled": below}
    return data | {key: replaced(below if isinstance(below, dict) else {}, rest, value)}


def json_schema() -> Node:
    """Return a copy of the described schema; ``required`` is that of a file for our trainer."""
    return deepcopy(described_schema())


def schema_for_editors() -> Node:
    """Return the schema of both kinds of file."""
    schema = json_schema()
    required = schema.pop("required")
    own = [key for key in required if key not in Job.model_fields]
    shared = [key for key in required if key in Job.model_fields]
    one = {"required": shared, "oneOf": [{"required": own}, {"required": ["program"]}]}
    return schema | {"if": {"required": ["stages"]}, "else": one}


@cache
def described_schema() -> Node:
    """Return the cached schema with a description of each key; it must not be changed."""
    schema = cached_schema()
    # This takes 60 ms (measured), which commands that only look up keys don't take
    sections = {section.__name__: section for section in _subclasses(Section)}
    files = [(kind.__name__, schema) for kind in (Experiment, Program)]
    for name, node in [*schema["$defs"].items(), *files]:
        for key, text in _field_docstrings(sections[name]).items():
            node["properties"][key]["description"] = text
    return schema


@cache
def cached_schema() -> Node:
    """Return the cached schema, which must not be changed and may lack the descriptions."""
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema"} | Experiment.model_json_schema()
    program = Program.model_json_schema()
    schema["$defs"] |= program["$defs"]
    properties = program["properties"] | schema["properties"]
    schema["properties"] = {key: properties[key] for key in [*keys_of(Experiment), *keys_of(Program)]}
    node = schema["properties"]["compile"]
    node["anyOf"] = [{"type": "boolean"}, {"$ref": node.pop("$ref")}]
    node["default"] = False
    _allow_also(schema["properties"]["profile"], {"type": "boolean"})
    _allow_also(
        schema["$defs"]["DataConfig"]["properties"]["normalize"], {"const": "weights", "type": "string"}
    )
    outputs = schema["$defs"]["ProgramConfig"]["properties"]["outputs"]
    kept = {key: outputs.pop(key) for key in ("items", "type")}
    outputs["anyOf"] = [kept, deepcopy(kept["items"])]
    name = schema["$defs"]["TransformConfig"]["properties"]["name"]
    _allow_also(schema["$defs"]["DataConfig"]["properties"]["transform"], deepcopy(name))
    image = schema["$defs"]["ContainerConfig"]["properties"]["image"]
    _allow_also(schema["$defs"]["EnvironmentConfig"]["properties"]["container"], deepcopy(image))
    _for_editors(schema)
    return schema


@cache
def section_schema(section: type[Section]) -> Node:
    """Return the cached schema of a section outside of the file's schema that contains no sections."""
    schema = section.model_json_schema()
    _for_editors(schema)
    return schema


def _subclasses(of: type[Section]) -> Iterator[type[Section]]:
    for each in of.__subclasses__():
        yield from (each, *_subclasses(each))


def _field_docstrings(section: type[Section]) -> dict[str, str]:
    """Return the text below each field that has one, including those of the classes that it extends."""
    inherited = [_field_docstrings(base) for base in section.__bases__ if base is not Section]
    (definition,) = ast.parse(inspect.getsource(section)).body
    assert isinstance(definition, ast.ClassDef)
    return {key: text for fields in inherited for key, text in fields.items()} | {
        field.target.id: inspect.cleandoc(text.value.value)
        for field, text in pairwise(definition.body)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
        if isinstance(text.value.value, str)
    }


def _allow_also(node: Node, other: Node) -> None:
    node["anyOf"] = [*node["anyOf"], other]


def _for_editors(node: Any) -> None:
    """Convert patterns to ECMA 262, and patterns of keys so that other keys are rejected."""
    if isinstance(node, list):
        for item in node:
            _for_editors(item)
    if not isinstance(node, dict):
        return
    if isinstance(pattern := node.get("pattern"), str):
        node["pattern"] = ecma_pattern(pattern)
    if isinstance(keys := node.pop("patternProperties", None), dict):
        ((pattern, values),) = keys.items()
        node["additionalProperties"] = values
        node["propertyNames"] = node.get("propertyNames", {}) | {"pattern": pattern}
    for value in node.values():
        _for_editors(value)


def ecma_pattern(pattern: str) -> str:
    r"""Return the pattern with ``^…$`` for ``\A…\z``, which ECMA 262 does not know."""
    return pattern.replace(r"\A", "^").replace(r"\z", "$")
