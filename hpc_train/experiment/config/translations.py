"""Unknown keys of the file: the key to write instead, with its value where that follows.

``explanations`` calls it with the content of the file; ``keys.unknown_key`` answers without values, for keys
of the command line and of sweeps.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from hpc_train.errors import shortened
from hpc_train.experiment.config import keys, remedies
from hpc_train.experiment.config.marked_yaml import resolve_scalar
from hpc_train.experiment.config.problems import KeyPath, Problem, dotted, split_at_colon
from hpc_train.experiment.config.program_section import listed
from hpc_train.experiment.config.remedies import fits, in_flow, remedy
from hpc_train.experiment.config.synonyms import advice_for, value_for
from hpc_train.redaction import without_credentials
from hpc_train.registry import suggestion

#: A longer value is not repeated.
_MAX_LENGTH = 160
#: Keys of a mapping in another tool that has the value here.
_MAIN = ("name", "type", "class_path", "_target_", "stage", "dtype")
#: Values that turn a feature off.
_OFF = {"false", "none", "no", "off"}
#: Parts of another tool's sweep that are not parameters.
_PARTS_OF_SWEEPS = ("command", "metric", "early_terminate", "run_cap", "program", "method")


def unknown_keys(path: KeyPath, data: Mapping[str, Any]) -> Iterator[Problem]:
    """Yield the problem with the unknown key at ``path`` of ``data``; if it only wraps keys, theirs."""
    if path[0] == keys.PROGRAM or (len(path) == 1 and keys.node_at(path) is not None):
        yield keys.unknown_key(path)  # the user's own names, or a key of the other kind of file
        return
    is_of_program = keys.program_key(str(path[-1])) is not None
    if keys.PROGRAM in data and len(path) == 1 and (is_of_program or keys.job_key(path) is None):
        likely = keys.argument_remedy(name := str(path[0]))
        likely = likely if is_of_program else suggestion(name, keys.known_keys(()), likely)
        yield Problem(path, "unknown key", likely, on_key=True, code="key.unknown")
        return
    value = keys.value_at(data, path)
    if (
        len(path) == 1
        and keys.program_key(str(path[0])) == "command"
        and isinstance(value, str | list)
        and value
    ):
        line = value if isinstance(value, str) else shlex.join(map(str, value))
        command = f"write {keys.PROGRAM}: {{command: {listed(line)}}}"
        if not keys.means_program(data):
            command += " for a training script of your own, in place of task, model, data and optimization"
        yield Problem(path, "unknown key", command, on_key=True, code="key.unknown")
        return
    if value in ({}, []):
        yield Problem(path, "unknown key", "take it out", on_key=True, code="key.unknown")
        return
    if isinstance(value, dict) and _is_wrapper(path, data):
        for key in value:
            yield from unknown_keys((*path, key), data)
        return
    problem = keys.unknown_key(own_path(path))
    key, blank, text = str(path[-1]).partition(" ")
    if split_at_colon(str(path[-1]), keys.known_keys(path[:-1])):
        yield problem
        return
    if blank and value is None and key in keys.known_keys(path[:-1]):
        remedy = f"write {key}: {shortened(text)}, with a colon"
        yield Problem(path, "unknown key", remedy, on_key=True, code=problem.code)
        return
    answer = (
        _gres(path, value)
        or _part_of_sweep(path, value, data)
        or _part_of_distribution(path, data)
        or _nested(path, value, data)
        or _translation(path, value, data)
    )
    yield Problem(path, _message(path), answer or problem.remedy, on_key=True, code=problem.code)


def own_path(path: KeyPath) -> KeyPath:
    """Return the unknown key in the section that unknown keys above it mean; without one at the top."""
    if len(path) == 1 or keys.node_at(path[:-1]) is not None:
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
    return keys.as_mapping(keys.node_at(meant) or {}) is not None and (
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
    node = keys.node_at(target)
    is_off = isinstance(value, bool | str) and str(value).lower() in _OFF
    if is_off and node is not None and not fits(node, value):
        return "take it out"
    meant = _merged(keys.value_at(data, target), target, _converted(target, value, own[-1]), value)
    if meant is None:
        advice = remedy(target, node or {}, value)
        return advice if advice.startswith("take it out") else None
    is_below = parent and target[: len(parent)] == parent
    if is_below and len(target) > len(path):
        return _write(*_section_beside(path, target[: len(path)], data))
    if is_below:
        return _write(target[-1:], meant)
    return _write(*_with_required(target, meant, data))


def _write(target: KeyPath, value: Any) -> str:
    written = without_credentials(in_flow(value))
    return f"write {dotted(target)}" + (f": {written}" if len(written) <= _MAX_LENGTH else "")


def _gres(path: KeyPath, value: Any) -> str | None:
    """Return the keys for ``gres: gpu:a100:4`` or ``gpu: a100``."""
    match = re.fullmatch(r"gpu(?::([A-Za-z_][\w.-]*))?:(\d{1,3})", str(value)[:_MAX_LENGTH])
    is_type = isinstance(value, str) and re.fullmatch(r"[A-Za-z][\w.-]{1,30}", value)
    if path[-1] in ("gpu", "gpus") and is_type and value not in ("auto", "all", "none"):
        request = {"gpus_per_node": 1, "gpu_type": value}
    elif path[-1] in ("gres", "gpus") and match is not None:
        request = {"gpus_per_node": int(match[2])} | ({"gpu_type": match[1]} if match[1] else {})
    else:
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
    node = keys.node_at(target)
    if node is None:
        return value
    section = keys.as_mapping(node)
    if value is True and fits(node, 0.5):
        return 0.5
    if (
        isinstance(value, str)
        and not fits(node, value)
        and (amount := remedies.in_unit_of(target, value, node))
    ):
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
    if any(member.get("type") == "array" for member in keys.members(node)):
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
        new = _converted(meant, item, key) if keys.node_at(meant) else item
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
    distribution = _distribution(keys.value_at(data, path[:-1]))
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
    for name, value in _leaves(values):
        key = key_of(name)
        if key is None or not isinstance(value, list | dict):
            return None
        swept[key] = value
    return swept


def _leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the lists and distributions in nested mappings, by dotted key."""
    for key, value in values.items():
        if not isinstance(value, dict):
            yield f"{prefix}{key}", value
        elif (distribution := _distribution(value)) is not None:
            yield f"{prefix}{key}", distribution
        else:
            yield from _leaves(value, f"{prefix}{key}.")


def _distribution(value: Mapping[str, Any]) -> Any:
    """Return the values, or the distribution here, of a parameter of wandb's sweeps; else None."""
    if isinstance(values := value.get("values", value.get("choices")), list):
        return values
    bounds = [value.get("min"), value.get("max")]
    if all(isinstance(bound, int | float) for bound in bounds):
        is_log = str(value.get("distribution", "")).startswith("log")
        return {"log_uniform" if is_log else "uniform": bounds}
    return dict(value) if value.keys() & {"choice", "uniform", "log_uniform", "int", "log_int"} else None


def _swept_key(name: str) -> str | None:
    try:
        path: KeyPath | None = keys.split_key(name)
    except keys.BadKeyError as error:
        path = keys.meant_path(error.problem.path)
        unknown, rest = dotted(error.problem.path), ""
        if name.startswith(f"{unknown}."):
            rest = name.removeprefix(unknown)
        path = None if path is None else tuple(f"{dotted(path)}{rest}".split("."))
    if path is None or keys.node_at(path) is None or not remedies.is_swept(path):
        return None
    return dotted(path)
