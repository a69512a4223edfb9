"""The resolved experiment as a file of the run folder, and back to an equal Experiment."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from hpc_train.config.loading import load
from hpc_train.config.schema import Experiment

#: Text that is text to any YAML reader, of 1.1 or 1.2; all other text is quoted.
_PLAIN_TEXT = re.compile(r"[A-Za-z_][A-Za-z0-9_./+-]*|[0-9]+(min|h)")
_WORDS_OF_YAML = {"null", "true", "false", "yes", "no", "on", "off", "y", "n"}


class _Dumper(yaml.SafeDumper):
    """Quotes by our rules and writes no anchors."""

    def ignore_aliases(self, data: object) -> bool:
        return True


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    plain = _PLAIN_TEXT.fullmatch(text) and text.lower() not in _WORDS_OF_YAML
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=None if plain else '"')


_Dumper.add_representer(str, _represent_text)


def dump(experiment: Experiment) -> str:
    """Return the experiment as YAML: keys in the schema's order, defaults left out, floats exact."""
    data = _lists(experiment.model_dump(exclude_defaults=True))
    if data.get("compile") == {}:
        data["compile"] = True
    text: str = yaml.dump(data, Dumper=_Dumper, sort_keys=False, width=10**6)
    return text


def read(path: Path) -> Experiment:
    """Read a frozen file. Raises BadFileError; names are not looked up again."""
    return load(path, check_names=False).experiment


def _lists(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _lists(item) for key, item in value.items()}
    return [_lists(item) for item in value] if isinstance(value, list | tuple) else value
