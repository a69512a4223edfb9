"""The short names of keys, by which tables show them and options take them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_train.report.changed_keys import short_names

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
