"""The JSON Schema (draft 2020-12) of the experiment file, for editors and for the error messages."""

from __future__ import annotations

from copy import deepcopy
from functools import cache
from typing import Any

from hpc_train.config.schema import Experiment

Node = dict[str, Any]


def json_schema() -> Node:
    """Return a copy of the schema, which the caller may change."""
    return deepcopy(cached_schema())


@cache
def cached_schema() -> Node:
    """Return the cached schema, which must not be changed."""
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema"} | Experiment.model_json_schema()
    _allow_plain_bool(schema["properties"]["compile"])
    _allow_also(schema["properties"]["profile"], {"type": "boolean"})
    _allow_also(
        schema["$defs"]["DataConfig"]["properties"]["normalize"], {"const": "weights", "type": "string"}
    )
    _for_editors(schema)
    return schema


def _allow_plain_bool(node: Node) -> None:
    node["anyOf"] = [{"type": "boolean"}, {"$ref": node.pop("$ref")}]
    node["default"] = False


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
