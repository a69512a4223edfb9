"""What people write who come from other tools, and what they are told to write here."""

from __future__ import annotations

import re

import pytest

from hpc_train.experiment.config.keys import (
    Node,
    all_keys,
    as_mapping,
    cached_schema,
    known_keys,
    members,
    node_at,
    split_key,
)
from hpc_train.experiment.config.marked_yaml import read_value
from hpc_train.experiment.config.remedies import in_flow
from hpc_train.experiment.config.schema import Experiment
from hpc_train.experiment.config.synonyms import (
    SBATCH_KEYS,
    advice_by_name,
    keys_by_name,
    keys_within,
    tables,
    values_by_name,
)


def test_no_name_of_other_tools_has_two_keys() -> None:
    names = [name for names in tables()["keys"].values() for name in names.split()]
    assert len(names) == len(set(names))


def test_every_target_is_a_key_and_no_name_is_a_key_where_it_is_read() -> None:
    keys = {".".join(map(str, path)) for path in all_keys()}
    free = ("model.args.", "optimization.optimizer.args.", "parallel.args.")
    for key in keys_by_name().values():
        assert all(part in keys or part.startswith(free) for part in key.split(" and ")), key
    assert not keys_by_name().keys() & advice_by_name().keys()
    for section in {*tables()["keys_within"], *tables()["arguments"], *tables()["advice_within"]}:
        path = tuple(int(part) if part.isdigit() else part for part in re.findall(r"\w+", section))
        for name, key in keys_within(section).items():
            assert node_at((*path, key.split(".")[0])) is not None, (section, key)
            assert name not in known_keys(path)
        assert not advice_by_name(section).keys() & {*known_keys(path), *keys_within(section)}


def test_every_option_of_sbatch_with_a_key_leads_to_it() -> None:
    options = {option.replace("-", "_"): key for option, key in SBATCH_KEYS.items()}
    assert options.items() <= keys_by_name().items()


def test_every_value_that_is_recommended_is_one() -> None:
    for key in tables()["values"]:
        for member in members(node_at(split_key(key)) or {}):
            assert "enum" not in member or set(values_by_name(key).values()) <= set(member["enum"])


def _required(path: tuple[str, ...], node: Node) -> list[tuple[str, ...]]:
    mapping = as_mapping(node) or {}
    below = mapping.get("properties", {})
    found = [(*path, key) for key in mapping.get("required", [])]
    return found + [each for key, child in below.items() for each in _required((*path, key), child)]


def test_every_required_key_has_an_example_that_is_valid() -> None:
    required = _required((), cached_schema())
    assert ("optimization", "optimizer", "lr") in required
    assert [path for path in required if "examples" not in (node_at(path) or {})] == []
    examples = {key: cached_schema()["properties"][key]["examples"][0] for key, *rest in required if not rest}
    Experiment.model_validate(examples)


def test_a_missing_section_is_shown_as_it_is_written() -> None:
    assert in_flow({"a": {"b": 1}, "c": [1]}) == "{a: {b: 1}, c: [1]}"


@pytest.mark.parametrize(
    "text", ["*.bias", "!head", "a, b", "{x", "a: b", "a #b", "1", "true", "", " ", "'", '"', "\x1b"]
)
def test_text_of_the_file_is_shown_in_quotes_where_yaml_needs_them(text: str) -> None:
    shown = in_flow({text: [text, None, True]})
    assert '"' in shown
    assert read_value(shown) == ({text: [text, None, True]}, [])


@pytest.mark.parametrize("text", ["layer1.*", "timm/resnet18", "acme.models:tiny", "90min", "a b"])
def test_text_of_the_file_that_needs_no_quotes_is_shown_without(text: str) -> None:
    assert in_flow([text]) == f"[{text}]"
