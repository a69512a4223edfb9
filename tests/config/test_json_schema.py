from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from hpc_train.experiment.config.keys import description_of, json_schema


def patterns(node: Any) -> Iterator[str]:
    if isinstance(node, dict):
        if isinstance(node.get("pattern"), str):
            yield node["pattern"]
        for value in node.values():
            yield from patterns(value)
    elif isinstance(node, list):
        for item in node:
            yield from patterns(item)


def test_it_is_json_of_draft_2020_12() -> None:
    schema = json_schema()
    assert json.loads(json.dumps(schema, allow_nan=False)) == schema
    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    assert schema["required"] == ["name", "task", "model", "data", "optimization"]


def test_patterns_are_ecmas() -> None:
    found = list(patterns(json_schema()))
    assert len(found) > 10
    for pattern in found:
        assert pattern.startswith("^") and pattern.endswith("$")
        assert not re.search(r"(?<!\\)(\\\\)*\\[AzZ\"'#]", pattern)


def test_short_forms_and_names_of_options() -> None:
    schema = json_schema()
    assert schema["properties"]["compile"]["anyOf"][0] == {"type": "boolean"}
    slurm = schema["$defs"]["SlurmConfig"]["properties"]
    assert slurm["time_limit"]["anyOf"][0]["type"] == "string"
    names = slurm["extra"]["propertyNames"]["pattern"]
    assert re.search(names, "nice") and not re.search(names, "No Name")
    assert "patternProperties" not in slurm["extra"]


def test_most_keys_say_what_they_mean() -> None:
    schema = json_schema()
    silent = {
        (name, key)
        for name, section in {**schema["$defs"], "Experiment": schema}.items()
        for key, node in section.get("properties", {}).items()
        if not node.get("description") and "$ref" not in str(node)
    }
    assert silent <= {("NormalizeConfig", "mean"), ("NormalizeConfig", "std")}, silent


def test_a_key_is_described_wherever_it_is_looked_up() -> None:
    json_schema().clear()  # a copy
    assert "learning rate" in description_of(("optimization", "optimizer", "lr")).lower()
    assert description_of(("optimization", "optimiser", "lr")) == ""
