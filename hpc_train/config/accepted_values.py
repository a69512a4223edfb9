"""Describes in words what a key accepts, from its node of the schema."""

from __future__ import annotations

from hpc_train.config.json_schema import Node
from hpc_train.config.keys import members


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
