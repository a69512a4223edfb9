"""Writes the experiment to the run folder, and reads an equal one back.

``resolved.json`` contains every key with its default written out, so that a later version's default never
changes an existing run; attempts read this file. ``experiment.yaml`` is the same for people, without
defaults.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

import yaml
from pydantic import ValidationError

from hpc_train.errors import BadFileError
from hpc_train.experiment.config.marked_yaml import FORBIDDEN
from hpc_train.experiment.config.schema import Job, keys_of, kind_of
from hpc_train.experiment.validate.loading import Loaded, load
from hpc_train.paths import RunPaths
from hpc_train.run.files import read_text, write_new

#: Text that any YAML 1.1 or 1.2 reader parses as text; all other text is quoted.
_PLAIN_TEXT = re.compile(r"[A-Za-z_][A-Za-z0-9_./+-]*|[0-9]+(min|h)")
#: JSON has no such numbers; Python writes them nevertheless, each at the end of a line here.
_NOT_FINITE = re.compile("(-?Infinity|NaN)(?=,?$)", re.MULTILINE)
_IN_YAML = {"Infinity": ".inf", "-Infinity": "-.inf", "NaN": ".nan"}
_WORDS_OF_YAML = {"null", "true", "false", "yes", "no", "on", "off", "y", "n"}


class _Dumper(getattr(yaml, "CSafeDumper", yaml.SafeDumper)):  # type: ignore[misc]
    """Quotes by our rules and writes no anchors; uses libyaml if available, in a quarter of the time."""

    def ignore_aliases(self, data: object) -> bool:
        return True


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    plain = _PLAIN_TEXT.fullmatch(text) and text.lower() not in _WORDS_OF_YAML
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=None if plain else '"')


_Dumper.add_representer(str, _represent_text)


def dump(experiment: Job) -> str:
    """Return the experiment as YAML: keys in the schema's order, defaults omitted, floats exact."""
    dumped = _lists(experiment.model_dump(exclude_defaults=True))
    data = {key: dumped[key] for key in keys_of(type(experiment)) if key in dumped}
    if data.get("compile") == {}:
        data["compile"] = True
    text: str = yaml.dump(data, Dumper=_Dumper, sort_keys=False, width=10**6)
    return text


def write(paths: RunPaths, experiment: Job) -> None:
    """Write both files into a new folder, and sync them to disk; the caller syncs the folder."""
    resolved = json.dumps(_lists(experiment.model_dump()), indent=1, ensure_ascii=False)
    printable = FORBIDDEN.sub(lambda match: f"\\u{ord(match[0]):04x}", resolved)
    readable = _NOT_FINITE.sub(lambda match: _IN_YAML[match[0]], printable)
    write_new(paths.resolved, readable + "\n")
    write_new(paths.experiment, dump(experiment))


def read(paths: RunPaths) -> Job:
    """Return the run's original experiment. Raises BadFileError; names are not looked up again."""
    try:
        data = json.loads(read_text(paths.resolved))
        return kind_of(data).model_validate(data)
    except (OSError, ValueError, TypeError, RecursionError, ValidationError):  # reported below
        return load_changed(paths, ()).experiment


def load_changed(paths: RunPaths, overrides: Sequence[str], *, check_names: bool = False) -> Loaded:
    """Load the run's original experiment, changed by ``KEY=VALUE`` overrides. Raises BadFileError."""
    if paths.resolved.exists() and not paths.resolved.is_file():  # reading a pipe would block
        raise BadFileError(f"{paths.resolved}: is not a plain file")
    return load(paths.resolved, overrides, check_names=check_names)


def _lists(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _lists(item) for key, item in value.items()}
    return [_lists(item) for item in value] if isinstance(value, list | tuple) else value
