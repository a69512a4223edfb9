"""Explains pydantic's errors in plain words: the problem with a key, and its remedy.

``explain`` passes once over the errors of a file. An unknown key is explained by the key that it means, with
its value as the file would have it, if both follow; a value by the schema's node of its key (``remedies``).
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

from pydantic import ValidationError

from hpc_train.errors import shortened
from hpc_train.experiment.config import keys, remedies, synonyms
from hpc_train.experiment.config.fields import Arguments, Section
from hpc_train.experiment.config.keys import Node, as_mapping, members, node_at
from hpc_train.experiment.config.problems import (
    MAX_PROBLEMS,
    KeyPath,
    Problem,
    dotted,
    shown,
    split_at_colon,
    unknown_argument_problem,
)
from hpc_train.experiment.config.program_section import listed
from hpc_train.experiment.config.remedies import example_of, fits, in_flow, remedy, wanted
from hpc_train.experiment.config.scalars import resolve_scalar
from hpc_train.experiment.config.synonyms import advice_for, distribution_of, swept_leaves, value_for
from hpc_train.redaction import without_credentials
from hpc_train.registry import nearest, suggestion

#: A longer value is not repeated.
_MAX_LENGTH = 160
#: Keys of a mapping in another tool that has the value here.
_MAIN = ("name", "type", "class_path", "_target_", "stage", "dtype")
#: Parts of another tool's sweep that are not parameters.
_PARTS_OF_SWEEPS = ("command", "metric", "early_terminate", "run_cap", "program", "method")


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
    advice = {path: problem.remedy for path, problem in problems.items() if problem.code == "key.unknown"}
    # A misspelt key is not reported as missing as well; swept keys beside ``parameters`` belong there.
    beside = [path for path, text in advice.items() if text.startswith("write parameters: ")]
    misspelt = {*map(meant, advice), *((*path[:-1], "parameters") for path in beside)}
    return [
        problem for path, problem in problems.items() if path not in misspelt or problem.code != "key.missing"
    ]


def _problem(kind: str, loc: KeyPath, context: dict[str, Any], data: dict[str, Any], schema: Node) -> Problem:
    path = _key_path(loc, schema)
    if kind == "missing" and isinstance(path[-1], str):
        example = _example_for(path, data) or example_of(node_at(path, schema) or {})
        return Problem(path, "is missing", f"write {path[-1]}: {example}", code="key.missing")
    if loc[-1] == "[key]":
        names = (node_at(path[:-1], schema) or {}).get("propertyNames", {})
        rule = names.get("patternErrorMessage", "a name")
        name = str(path[-1]).lstrip("-")
        advice = f"write {name}" if re.search(names.get("pattern", "$."), name) else "fix the name"
        return Problem(path, f"needs {rule}", advice, on_key=True, code="key.name")
    if isinstance(path[-1], int) and kind == "missing":
        path = path[:-1]
    if kind == "value_error":
        message, _, advice = str(context["error"]).partition("; ")
        return Problem(path, message, advice, code="value.invalid")
    node, value = node_at(path, schema) or {}, _given_at(data, path)
    is_list = isinstance(value, list) and any(member.get("type") == "array" for member in members(node))
    actual = f"a list of {len(value)}" if is_list else shown(value)
    return Problem(
        path, f"needs {wanted(node)}, got {actual}", remedy(path, node, value), code="value.invalid"
    )


def _given_at(data: Any, path: KeyPath) -> Any:
    """Return the value at a path; where a short form (``loss: bce``) is in place of its section, that."""
    for segment in path:
        if isinstance(data, str):
            break
        data = data[segment]
    return data


def _key_path(loc: KeyPath, schema: Node) -> KeyPath:
    """Return ``loc`` without the segments that pydantic appends after unions and keys."""
    for end, segment in enumerate(loc):
        if isinstance(segment, str) and as_mapping(node_at(loc[:end], schema) or {}) is None:
            return loc[:end]
        if node_at(loc[: end + 1], schema) is None:
            return loc[: end + 1]
    return loc


def _example_for(path: KeyPath, data: dict[str, Any]) -> str | None:
    """Return the value of a missing key that follows from the keys beside it; None if none does."""
    section = keys.value_at(data, path[:-1])
    beside = section if isinstance(section, dict) else {}

    def called(key: str) -> list[Any]:
        """Return the values of ``key``, and of other tools' keys that mean it: ``monitor`` is ``metric``."""
        target = (*path[:-1], key)
        return [beside[k] for k in beside if k == key or keys.meant_path((*path[:-1], k)) == target]

    if path == ("data", "name"):
        return "imagefolder" if called("root") else None
    inner = [value[path[-1]] for value in called("args") if isinstance(value, dict) and path[-1] in value]
    metrics = called("metric") if path[-1] == "mode" else []
    return synonyms.usual_mode(str(metrics[0])) if metrics else in_flow(inner[0]) if inner else None


def unknown_keys(path: KeyPath, data: Mapping[str, Any]) -> Iterator[Problem]:
    """Yield the problem with the unknown key at ``path`` of ``data``; if it only wraps keys, theirs."""
    if path[0] == keys.PROGRAM or (len(path) == 1 and node_at(path) is not None):
        yield keys.unknown_key(path)  # the user's own names, or a key of the other kind of file
        return
    value = keys.value_at(data, path)
    if (likely := _of_program(path, value, data)) or value in ({}, []):
        yield Problem(path, "unknown key", likely or "take it out", on_key=True, code="key.unknown")
        return
    if isinstance(value, dict) and _is_wrapper(path, data):
        for key in value:
            yield from unknown_keys((*path, key), data)
        return
    problem = keys.unknown_key(own_path(path))
    if split_at_colon(str(path[-1]), keys.known_keys(path[:-1])):
        yield problem
        return
    answer = (
        _with_colon(path, value)
        or _request(path, value, data)
        or _part_of_sweep(path, value, data)
        or _part_of_distribution(path, data)
        or _nested(path, value, data)
        or _translation(path, value, data)
    )
    yield Problem(path, _message(path), answer or problem.remedy, on_key=True, code=problem.code)


def _of_program(path: KeyPath, value: Any, data: Mapping[str, Any]) -> str | None:
    """Return the remedy for a key at the top that means one of ``program``, or an argument of its script."""
    if len(path) > 1:
        return None
    name, meant = str(path[0]), keys.program_key(str(path[0]))
    if keys.PROGRAM in data and (meant or keys.job_key(path) is None):
        likely = keys.argument_remedy(name)
        return likely if meant else suggestion(name, keys.known_keys(()), likely)
    if meant != "command" or not isinstance(value, str | list) or not value:
        return None
    line = value if isinstance(value, str) else shlex.join(map(str, value))
    remedy = f"write {keys.PROGRAM}: {{command: {listed(line)}}}"
    if keys.means_program(data):
        return remedy
    return f"{remedy} for a training script of your own, in place of task, model, data and optimization"


def own_path(path: KeyPath) -> KeyPath:
    """Return the unknown key in the section that unknown keys above it mean; without one at the top."""
    if len(path) == 1 or node_at(path[:-1]) is not None:
        return path
    section = target_of(path[:-1])
    return path[-1:] if section is None or not keys.known_keys(section) else (*section, path[-1])


def target_of(path: KeyPath) -> KeyPath | None:
    """Return the key that an unknown key means, also one below another unknown key; None if not known."""
    own = own_path(path)
    return own if own != path and own[-1] in keys.known_keys(own[:-1]) else keys.meant_path(own)


def _is_wrapper(path: KeyPath, data: Mapping[str, Any]) -> bool:
    """Return True if the mapping at ``path`` can't be renamed: the file has the section, or there is none."""
    if path[0] == "sweep" or advice_for(own_path(path)):
        return False
    meant = target_of(path)
    if meant is None:
        return True
    is_above = path[: len(meant)] == meant
    return as_mapping(node_at(meant) or {}) is not None and (
        is_above or isinstance(keys.value_at(data, meant), dict)
    )


def _message(path: KeyPath) -> str:
    meant = keys.meant_path(path)
    if meant is None or meant[:-1] != (*path[:-1], "args"):
        return "unknown key"
    renamed = "" if meant[-1] == path[-1] else f": {path[-1]} is {meant[-1]} there"
    return f"unknown key, an argument that belongs in args{renamed}"


def _translation(path: KeyPath, value: Any, data: Mapping[str, Any]) -> str | None:
    """Return the key and value that ``path`` means; None if they do not follow."""
    own, parent, target = own_path(path), path[:-1], target_of(path)
    if target is None or advice_for(own) or path[: len(target)] == target:
        return None
    node = node_at(target)
    if str(value).lower() in remedies.OFF and node is not None and not fits(node, value):
        return "take it out"
    meant = _merged(keys.value_at(data, target), target, _converted(target, value, own[-1]), value)
    if meant is None:
        advice = remedy(target, node or {}, value)
        return advice if advice.startswith("take it out") else None
    above = set(keys.known_keys(target[:-1])) & set(meant) if target[-1] == "args" else ()
    if above:  # keys of the section among its arguments
        rest = {key: item for key, item in meant.items() if key not in above}
        section = {key: meant[key] for key in sorted(above)} | ({"args": rest} if rest else {})
        return f"write {in_flow(section)[1:-1]}"
    is_below = parent and target[: len(parent)] == parent
    if is_below and len(target) > len(path):
        return _write(*_section_beside(path, target[: len(path)], data))
    if is_below:
        return _write(target[-1:], meant)
    return _write(*_with_required(target, meant, data))


def _write(target: KeyPath, value: Any) -> str:
    written = without_credentials(in_flow(value))
    return f"write {dotted(target)}" + (f": {written}" if len(written) <= _MAX_LENGTH else "")


def _request(path: KeyPath, value: Any, data: Mapping[str, Any]) -> str | None:
    """Return the keys of ``slurm`` for a request of GPUs or memory, the Python for an environment."""
    if target_of(path) == ("environment", "python") and (
        python := synonyms.python_of(str(value)[:_MAX_LENGTH])
    ):
        return f"write {'' if path[0] == 'environment' else 'environment.'}python: {python}"
    section = data.get("slurm")
    request = synonyms.slurm_request(str(path[-1]), value, section if isinstance(section, dict) else {})
    if request is None:
        return None
    return f"write {in_flow(request)[1:-1] if path[0] == 'slurm' else f'slurm: {in_flow(request)}'}"


def _merged(existing: Any, target: KeyPath, meant: Any, value: Any) -> Any:
    """Return the file's section with the keys of ``meant`` that it lacks, or that are ``value``."""
    if not isinstance(existing, dict) or not isinstance(meant, dict):
        return meant
    new = {
        key: item
        for key, item in meant.items()
        if key not in existing or isinstance(value, dict) or item in (value, value_for((*target, key), value))
    }
    return existing | new


def _converted(target: KeyPath, value: Any, name: object) -> Any:
    """Return the value of ``target`` for that of another tool's key ``name``; None if it does not follow."""
    node = node_at(target)
    if node is None:
        return value
    section = as_mapping(node)
    if value is True and fits(node, 0.5):
        return 0.5
    is_misfit = isinstance(value, str) and not fits(node, value)
    if is_misfit and (amount := remedies.in_unit_of(target, value, node)):
        return resolve_scalar(amount.split()[1])
    if value is True and not fits(node, value):
        return value_for(target, name) or (remedies.completed(target, {}) if section else None)
    if isinstance(value, dict) and section:
        return _converted_section(target, value)
    if isinstance(value, dict):
        inner = [value[key] for key in _MAIN if key in value] or list(value.values())
        return _converted(target, inner[0], name) if len(inner) == 1 else None
    meant = value_for(target, value) or value
    if target == ("data", "root") and isinstance(value, str):
        meant = re.sub(r"/(train|training)/?$", "", value)
    if fits(node, meant):
        return meant
    if section:
        return remedies.section_like(target, meant) or (True if fits(node, True) else None)
    if any(member.get("type") == "array" for member in members(node)):
        return meant if isinstance(meant, list) else [meant]
    is_list_of_devices = isinstance(meant, list) and target[-1] == "gpus_per_node"
    return len(meant) if is_list_of_devices else None


def _converted_section(target: KeyPath, value: dict[str, Any]) -> dict[str, Any]:
    """Return the section with its keys and values as the file has them; keys of other sections stay."""
    section: dict[str, Any] = {}
    for key, item in value.items():
        path = (*target, key)
        meant = path if key in keys.known_keys(target) else keys.meant_path(path)
        is_argument = meant is not None and meant[:-1] == (*target, "args")
        if meant is None or (meant[:-1] != target and not is_argument):
            meant = path
        new = _converted(meant, item, key) if node_at(meant) else item
        into = section.setdefault("args", {}) if is_argument else section
        into[str(meant[-1])] = item if new is None else new
    return section


def _section_beside(path: KeyPath, section: KeyPath, data: Mapping[str, Any]) -> tuple[KeyPath, Any]:
    existing = keys.value_at(data, section)
    merged = dict(existing) if isinstance(existing, dict) else {}
    for key, value in keys.value_at(data, path[:-1]).items():
        target = None if key in keys.known_keys(path[:-1]) else keys.meant_path((*path[:-1], key))
        if target is not None and target[:-1] == section:
            new = _converted(target, value, key)
            merged[str(target[-1])] = value if new is None else new
    return section[-1:], remedies.completed(section, merged) if keys.known_keys(section) else merged


def _with_required(target: KeyPath, value: Any, data: Mapping[str, Any]) -> tuple[KeyPath, Any]:
    """Return the key and its value; with its section, if the file lacks others that the section requires."""
    section = target[:-1]
    if len(section) < 2 or isinstance(keys.value_at(data, section), dict):
        return target, value
    whole = remedies.completed(section, {str(target[-1]): value})
    return (section, whole) if len(whole) > 1 else (target, value)


def _with_colon(path: KeyPath, value: Any) -> str | None:
    """Return how to write ``key value``, a line without a colon."""
    key, blank, text = str(path[-1]).partition(" ")
    is_key = blank and value is None and key in keys.known_keys(path[:-1])
    return f"write {key}: {shortened(text)}, with a colon" if is_key else None


def _nested(path: KeyPath, value: Any, data: Mapping[str, Any]) -> str | None:
    """Return how to write a key path with dots, which only the command line and sweeps take."""
    name = str(path[-1])
    try:
        parts = keys.split_key(dotted((*path[:-1], name))) if "." in name else ()
    except keys.BadKeyError:
        return None
    if len(parts) <= len(path):
        return None
    end = max(
        end
        for end in range(len(path), len(parts) + 1)
        if end == len(path) or keys.value_at(data, parts[: end - 1])
    )
    for key in reversed(parts[end:]):
        value = {str(key): value}
    return (
        f"{_write((parts[end - 1],), value)} below {parts[end - 2]}:" if end > 1 else _write(parts[:1], value)
    )


def _part_of_sweep(path: KeyPath, value: Any, data: Mapping[str, Any]) -> str | None:
    """Return the part of ``sweep`` for swept keys, also in the form of wandb and Ray."""
    section, name = path[:-1], str(path[-1])
    if section not in (("sweep",), ("sweep", "random"), ("sweep", "search")):
        return None
    key_of = _swept_argument if keys.PROGRAM in data else _swept_key
    swept = _swept_values({name: value}, key_of)
    if not swept and isinstance(value, dict) and section == ("sweep",):
        swept = _swept_values(value, key_of)
    if not swept:
        return None
    if section == ("sweep",) and all(isinstance(values, list) for values in swept.values()):
        return _write(("grid",), swept)
    parameters = {key: {"choice": item} if isinstance(item, list) else item for key, item in swept.items()}
    if section == ("sweep",):
        return _write(("random",), {"count": 20, "parameters": parameters})
    return _write(("parameters",), parameters)


def _part_of_distribution(path: KeyPath, data: Mapping[str, Any]) -> str | None:
    """Return the distribution for ``min`` and ``max``, or ``values``, of a parameter as wandb has it."""
    if path[-2:-1] == () or path[:1] != ("sweep",) or path[2:3] != ("parameters",) or len(path) != 5:
        return None
    distribution = distribution_of(keys.value_at(data, path[:-1]))
    if isinstance(distribution, list):
        distribution = {"choice": distribution}
    if distribution is None or path[-1] in distribution:
        return None
    if path[-1] == "max":
        return "take it out"
    return _write(*next(((key,), item) for key, item in distribution.items()))


def _swept_argument(name: str) -> str | None:
    """Return the key of an argument of the script; None for another part of a sweep."""
    key = name.rpartition(".")[2].lstrip("-")
    return None if name.startswith(_PARTS_OF_SWEEPS) else f"{keys.PROGRAM}.args.{key}"


def _swept_values(values: Mapping[str, Any], key_of: Callable[[str], str | None]) -> dict[str, Any] | None:
    """Return lists and distributions by dotted key of the file; None if another tool's sweep has others."""
    swept: dict[str, Any] = {}
    for name, value in swept_leaves(values):
        key = key_of(name)
        if key is None or not isinstance(value, list | dict):
            return None
        swept[key] = value
    return swept


def _swept_key(name: str) -> str | None:
    try:
        path: KeyPath | None = keys.split_key(name)
    except keys.BadKeyError as error:
        path = keys.meant_path(error.problem.path)
        unknown, rest = dotted(error.problem.path), ""
        if name.startswith(f"{unknown}."):
            rest = name.removeprefix(unknown)
        path = None if path is None else tuple(f"{dotted(path)}{rest}".split("."))
    if path is None or node_at(path) is None or not remedies.is_swept(path):
        return None
    return dotted(path)
