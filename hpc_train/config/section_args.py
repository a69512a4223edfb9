"""The arguments of a part, such as ``data.args``: a mapping whose keys are the part's own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pydantic import ValidationError

from hpc_train.config.explanations import value_at, wanted
from hpc_train.config.fields import Arguments, Section
from hpc_train.config.json_schema import Node
from hpc_train.config.keys import child
from hpc_train.config.problems import KeyPath, Problem, shown, unknown_argument


def args_problems(path: KeyPath, owner: str, section: type[Section], args: Arguments) -> list[Problem]:
    """Return what is wrong with the arguments under ``path`` of the part called ``owner``, one for a key."""
    try:
        section.model_validate(args)
    except ValidationError as error:
        schema = section.model_json_schema()
        found: dict[KeyPath, Problem] = {}
        for entry in error.errors(include_url=False):
            problem = _problem(path, owner, schema, entry, args)
            found.setdefault(problem.path, problem)
        return list(found.values())
    return []


def _problem(path: KeyPath, owner: str, schema: Node, entry: Any, args: Arguments) -> Problem:
    loc, node = known_part(schema, entry["loc"])
    place = (*path, *loc)
    if entry["type"] == "extra_forbidden":
        name, known = str(entry["loc"][-1]), sorted(schema["properties"])
        return replace(unknown_argument((*place, name), owner, name, known), on_key=True)
    if entry["type"] == "missing":
        return Problem(place, "is missing", f"write {loc[-1]}: {wanted(node)}")
    if entry["type"] == "value_error":
        message, _, remedy = str(entry["ctx"]["error"]).partition("; ")
        return Problem(place, message, remedy)
    message = f"needs {wanted(node)}, got {shown(value_at(args, loc))}"
    return Problem(place, message, "write that, or take it out")


def known_part(schema: Node, loc: KeyPath) -> tuple[KeyPath, Node]:
    """Return ``loc`` as far as the schema knows it, and its node; pydantic appends segments of its own."""
    path: KeyPath = ()
    node = schema
    for segment in loc:
        below = child(node, segment)
        if below is None:
            break
        path, node = (*path, segment), below
    return path, node
