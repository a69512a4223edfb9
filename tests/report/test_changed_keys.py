"""The keys in which runs differ, and their short names, by which tables show them and options take them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_train.paths import RunPaths
from hpc_train.report.changed_keys import changed_keys, short_names

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
