"""The keys in which runs differ, and their short names, by which tables show them and options take them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpc_train.paths import RunPaths
from hpc_train.report.changed_keys import _Written, changed_keys, short_names

_KEYS = st.lists(
    st.lists(st.sampled_from(["seed", "args", "data", "lr"]), min_size=1, max_size=4).map(".".join),
    unique=True,
    max_size=8,
)


@pytest.mark.parametrize(
    ("keys", "names"),
    [
        (["seed", "data.args.seed"], ["seed", "args.seed"]),
        (["data.args.seed", "seed"], ["args.seed", "seed"]),
        (["args.seed", "data.args.seed"], ["args.seed", "data.args.seed"]),
        (["seed", "optimization.optimizer.lr"], ["seed", "lr"]),
    ],
)
def test_a_short_name_is_no_other_key(keys: list[str], names: list[str]) -> None:
    assert list(short_names(keys).values()) == names


@given(keys=_KEYS)
def test_no_two_keys_have_the_same_short_name(keys: list[str]) -> None:
    names = short_names(keys)
    assert len(set(names.values())) == len(keys)
    for key, name in names.items():
        assert f".{key}".endswith(f".{name}")
        assert name == key or name not in keys


def _run(folder: Path, resolved: dict[str, Any]) -> RunPaths:
    folder.mkdir()
    paths = RunPaths(folder)
    paths.run.write_text("{}")
    paths.resolved.write_text(json.dumps(resolved))
    return paths


def test_numbers_written_differently_differ_and_equal_sections_are_left_out(tmp_path: Path) -> None:
    equal = {"data": {"name": "digits"}, "seed": 0}
    values = (1, 1.0, True, 1)
    runs = [
        _run(tmp_path / str(place), equal | {"model": {"args": {"depth": value}, "name": "mlp"}})
        for place, value in enumerate(values)
    ]
    changed = changed_keys(runs)
    assert list(map(repr, changed.values())) == [repr({"model.args.depth": value}) for value in values]


_LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=3),
    st.lists(st.integers(), max_size=2),
)
_SECTIONS = st.dictionaries(
    st.sampled_from(["name", "sweep", "a", "a.b", 'q": 1']),
    st.recursive(_LEAVES, lambda item: st.dictionaries(st.sampled_from(["a", "b", "b.a"]), item, max_size=3)),
    max_size=4,
)


def _varied(section: Any, draw: st.DataObject) -> Any:
    """Return the section with some other values."""
    if isinstance(section, dict):
        return {key: _varied(value, draw) for key, value in section.items()}
    return draw.draw(_LEAVES) if draw.draw(st.booleans()) else section


@settings(max_examples=200)
@given(section=_SECTIONS, draw=st.data(), ascii_only=st.booleans(), indent=st.sampled_from([1, 1, None]))
def test_files_of_equal_layout_are_read_like_single_files(
    tmp_path_factory: pytest.TempPathFactory,
    section: dict[str, Any],
    draw: st.DataObject,
    ascii_only: bool,
    indent: int | None,
) -> None:
    folder, reader = tmp_path_factory.mktemp("runs"), _Written({})
    for place in range(3):
        paths = _run(folder / str(place), {})
        content = _varied(section, draw) if place else section
        paths.resolved.write_text(json.dumps(content, indent=indent, ensure_ascii=ascii_only) + "\n", "utf-8")
        assert repr(reader.settings(paths)) == repr(_Written({}).settings(paths)), paths.resolved.read_text()


def test_only_the_lines_that_differ_are_parsed(tmp_path: Path) -> None:
    first = {"name": "one", "steps": [1, 2], "model": {"args": {}, "lr": 0.1}, "seed": 0}
    other = first | {"name": "two", "model": {"args": {}, "lr": None}, "seed": 1.0}
    reader, texts = _Written({}), [json.dumps(content, indent=1) for content in (first, other)]
    for place, text in enumerate(texts):
        _run(tmp_path / str(place), {}).resolved.write_text(text)
    reader.settings(RunPaths(tmp_path / "0"))
    (template,) = reader.templates.values()
    assert template is not None
    flat = {"steps": [1, 2], "model.args": {}, "model.lr": None, "seed": 1.0}
    assert repr(template.settings(texts[1].split("\n"))) == repr(flat)
    assert reader.settings(RunPaths(tmp_path / "1")) == flat
