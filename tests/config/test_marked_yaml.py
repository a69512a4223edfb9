from __future__ import annotations

import math
import re
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from hpc_train.experiment.config.marked_yaml import MAX_VALUES, read_document, read_value
from hpc_train.experiment.config.problems import Place
from tests.calls import count_calls
from tests.config.files import GOOD, code_and_key, problems_of


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 1e-3),
        ("5.0e-4", 5e-4),
        (".5", 0.5),
        ("1.", 1.0),
        ("+12", 12),
        ("-7", -7),
        ("010", 10),
        ("0o17", 15),
        ("0x1F", 31),
        ("1_000", "1_000"),
        ("on", "on"),
        ("Yes", "Yes"),
        ("24:00:00", "24:00:00"),
        ("2026-01-01", "2026-01-01"),
        ("true", True),
        ("True", True),
        ("TRUE", True),
        ("tRUE", "tRUE"),
        ("FALSE", False),
        ("~", None),
        ("null", None),
        ("Null", None),
        ("", None),
        (".inf", math.inf),
        ("-.INF", -math.inf),
        ("inf", "inf"),
        ("'1e-3'", "1e-3"),
        ('"true"', "true"),
        ("[1, {a: on}]", [1, {"a": "on"}]),
    ],
)
def test_scalars_are_read_as_yaml_1_2_reads_them(text: str, value: object) -> None:
    found, problems = read_value(text)
    assert not problems
    assert found == value and type(found) is type(value)


def test_nan_is_read() -> None:
    assert math.isnan(read_value(".nan")[0])


def test_every_key_and_value_has_its_place() -> None:
    document = read_document(b"a: 1\nb:\n  c: [x, {d: 2}]\n  'e':\n")
    assert document.data == {"a": 1, "b": {"c": ["x", {"d": 2}], "e": None}}
    places = {path: (marks.key, marks.value) for path, marks in document.marks.items()}
    assert places[("b",)] == (Place(2, 1), Place(3, 3))
    assert places[("b", "c", 1, "d")] == (Place(3, 11), Place(3, 14))
    assert places[("b", "e")] == (Place(4, 3), Place(4, 7))


@pytest.mark.fault(27)
def test_no_tag_runs_anything(tmp_path: Path) -> None:
    sentinel = tmp_path / "ran"
    tags = [
        f"!!python/object/apply:os.system ['touch {sentinel}']",
        f"!!python/object/apply:pathlib.Path.touch [!!python/object/apply:pathlib.Path ['{sentinel}']]",
        f"!!python/object/new:os.system ['touch {sentinel}']",
        "!!python/name:os.system",
        "!anything 3",
        "!!str 3",
        "! 3",
    ]
    for tag in tags:
        lines = problems_of(tmp_path, GOOD + f"seed: {tag}\n")
        assert ("yaml.tag", "seed") in map(code_and_key, lines), lines
    assert not sentinel.exists()


def laughs(levels: int) -> str:
    """Return a list of three and ``levels`` lists of nine aliases each: 3 * 9 ** levels values, if heeded."""
    return "a: &a [ha, ha, ha]\n" + "".join(
        f"{after}: &{after} [{', '.join([f'*{before}'] * 9)}]\n"
        for before, after in pairwise("abcdefghi"[: levels + 1])
    )


@pytest.mark.fault(25)
def test_a_billion_laughs_are_refused_at_the_first_alias(tmp_path: Path) -> None:
    calls_3, calls_6 = (count_calls(partial(problems_of, tmp_path, laughs(levels))) for levels in (3, 6))
    assert calls_6 < 2 * calls_3, "twice the text, 729 times the values"
    lines = problems_of(tmp_path, laughs(8))
    assert {("yaml.anchor", "a"), ("yaml.alias", "b[0]")} <= set(map(code_and_key, lines))


@pytest.mark.slow
@pytest.mark.fault(26)
@pytest.mark.parametrize("opening", ["[", "{a: ", "- ", "? ", "{? ", "a:\n"])
def test_deep_nesting_ends_in_a_clear_error(tmp_path: Path, opening: str) -> None:
    def nested(depth: int) -> str:
        if opening == "a:\n":
            return "".join(f"{' ' * level}a:\n" for level in range(depth))
        return "a: " * (opening not in "- ? ") + opening * depth

    # The scanner looks up to 1024 characters ahead for the colon of a key.
    deep, deeper = (200, 1000) if opening == "a:\n" else (2000, 20_000)
    assert code_and_key(problems_of(tmp_path, nested(deeper))[-1])[0] == "yaml.depth"
    calls_deep, calls_deeper = (
        count_calls(partial(problems_of, tmp_path, nested(n))) for n in (deep, deeper)
    )
    assert calls_deeper < 1.1 * calls_deep, "what lies below is read too"


def test_sixty_four_levels_are_read() -> None:
    assert not read_value("[" * 64 + "]" * 64)[1]
    assert read_value("[" * 65 + "]" * 65)[1]


@pytest.mark.fault(25)
def test_a_file_of_two_mebibytes_is_refused(tmp_path: Path) -> None:
    lines = problems_of(tmp_path, "# " + "x" * 2**21)
    assert lines == ["exp.yaml:1:1: the file is larger than 1 MiB; give an experiment file"]


@pytest.mark.slow
@pytest.mark.fault(25)
def test_more_values_than_an_experiment_has_are_not_read(tmp_path: Path) -> None:
    fitting, too_many = (f"a: [{'1,' * number}]" for number in (MAX_VALUES - 3, MAX_VALUES - 2))
    assert "yaml.size" not in [code_and_key(line)[0] for line in problems_of(tmp_path, fitting)]
    (line,) = problems_of(tmp_path, too_many)
    assert code_and_key(line)[0] == "yaml.size"


@pytest.mark.parametrize("line", ["sed{}: 1\n", "a{}: &x 1\n"])
def test_of_very_many_problems_the_first_are_shown(tmp_path: Path, line: str) -> None:
    few, many = (
        problems_of(tmp_path, GOOD + "".join(line.format(n) for n in range(number))) for number in (20, 5000)
    )
    assert len(few) == 20 and len(many) == 101
    assert many[:20] == few[:20]
    assert re.fullmatch(r"exp\.yaml:\d+:\d+: there are more problems; fix those above first", many[-1])


class _NoAliases(yaml.SafeDumper):
    def ignore_aliases(self, data: object) -> bool:
        return True


_PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**9), 10**9)
    | st.floats(allow_nan=False)
    | st.text("abc: -#'", max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text("xyz", min_size=1), inner, max_size=3)
    ),
    max_leaves=10,
)


@pytest.mark.slow
@given(st.dictionaries(st.text("klm", min_size=1), _PLAIN, min_size=1))
def test_what_pyyaml_writes_without_ambiguity_is_read_back(data: dict[str, object]) -> None:
    text = yaml.dump(data, Dumper=_NoAliases)
    assert read_document(text.encode()).data == data
