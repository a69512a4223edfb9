"""The JSON Schema (draft 2020-12) of the experiment file, for editors and for the error messages."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from copy import deepcopy
from functools import cache
from itertools import pairwise
from typing import Any

from hpc_train.experiment.config.fields import Section
from hpc_train.experiment.config.schema import Experiment, Job, Program, keys_of

Node = dict[str, Any]


def json_schema() -> Node:
    """Return a copy of the schema with a description of each key, which the caller may change.

    Its ``required`` is that of a file for our trainer.
    """
    return deepcopy(described_schema())


def schema_for_editors() -> Node:
    """Return the schema of both kinds of file."""
    schema = json_schema()
    required = schema.pop("required")
    own = [key for key in required if key not in Job.model_fields]
    shared = [key for key in required if key in Job.model_fields]
    return schema | {"required": shared, "oneOf": [{"required": own}, {"required": ["program"]}]}


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
