"""The rules for cells; how each source applies them is tested with the source."""

from __future__ import annotations

import math
import re
from decimal import Decimal
from typing import Any

import numpy as np
import pytest

from hpc_train.errors import BadFileError
from hpc_train.training.datasets.sources.named_files import class_remarks
from hpc_train.training.datasets.sources.values import ClassNumbers, Place, Targets, numbers_of

PLACE = Place("list:7", "label")


@pytest.mark.parametrize(
    ("cells", "names"),
    [
        (["b", "a"], ("a", "b")),
        (["10", "9", "-1"], ("-1", "9", "10")),
        ([10.0, 2.0, 0.0], ("0.0", "2.0", "10.0")),
        (["0.0", "10.0", "2.0"], ("0.0", "2.0", "10.0")),
        ([10, 2, 0], ("0", "2", "10")),
        (["1e3", "2E2", "-.5", "7."], ("-.5", "7.", "2E2", "1e3")),
        ([True, False], ("False", "True")),
        (["9", "10", "x"], ("10", "9", "x")),
        (["x1", "None"], ("None", "x1")),
        (["1e1", "+2", " 1 ", ".5"], (".5", " 1 ", "+2", "1e1")),
    ],
)
def test_numbers_are_sorted_by_size_names_by_alphabet(cells: list[Any], names: tuple[str, ...]) -> None:
    classes = ClassNumbers(None, None)
    numbers = classes.finish(np.array([classes.number(cell, PLACE) for cell in cells]))
    assert classes.names == names
    assert [names[number] for number in numbers] == [str(cell) for cell in cells]


@pytest.mark.parametrize(
    "cell",
    [None, "", "NaN", "<NA>", "NULL", math.nan, np.float64("nan"), 0.5, b"a", [1], {}, "\ud800", "a\0",
     10**20, pytest.param(10**5000, id="digits"), 1e300, math.inf],
)  # fmt: skip
def test_what_is_not_a_class_is_an_error_with_its_row(cell: Any) -> None:
    with pytest.raises(BadFileError, match=r"^data\.root: list:7 has .*; \w+ "):
        ClassNumbers(None, None).number(cell, PLACE)


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (("cat", "cat "), "'cat' and 'cat '"),
        (("Cat", "cat", "dog"), "2 of 3 classes .* 'Cat' and 'cat'"),
        (("caf\u00e9", "cafe\u0301"), r"'caf\\xe9' and 'cafe\\u0301'"),
        (("a  b", "a b"), "'a  b' and 'a b'"),
        (("cat", "cat\u200b"), r"'cat' and 'cat\\u200b'"),
        (("a", "b", "ab", "01", "1"), None),
        (
            ("0", "1", "10", "2", "x"),
            "4 of 5 classes are numbers, in .* 0 is class 0, .*, 2 is class 3, …; if",
        ),
        (("10", "9", "8"), None),
        (("-1", "0", "1"), "the class -1 is trained like the others; if it marks images without a label"),
        (("-1", "1"), None),
        (tuple(f"{number:02}" for number in range(20)), "20 classes for 20 training samples; if the targets"),
    ],
)
def test_classes_that_may_be_a_mistake_are_reported(names: tuple[str, ...], words: str | None) -> None:
    remarks = list(class_remarks(names, {"train": np.arange(len(names))}))
    assert len(remarks) == (words is not None)
    assert words is None or re.search(words, remarks[0])


def test_a_remedy_names_the_classes_key_only_if_there_is_one() -> None:
    for has_key in (True, False):
        classes, place = ClassNumbers(None, None), Place("row 7", "label", has_key)
        with pytest.raises(BadFileError) as missing:
            classes.number("nan", place)
        classes.finish(np.array([classes.number("a", place)]))
        with pytest.raises(BadFileError) as unknown:
            classes.number("b", place)
        assert [("data.args.classes" in str(error.value)) for error in (missing, unknown)] == [has_key] * 2


@pytest.mark.parametrize(("first", "second"), [("01", "1"), ("+1", "1"), ("1e1", "10")])
def test_two_spellings_of_a_number_are_an_error(first: str, second: str) -> None:
    classes = ClassNumbers(None, None)
    numbers = [classes.number(cell, PLACE) for cell in (first, second, "5")]
    with pytest.raises(BadFileError, match=r"list:7 has .* in label, and list:7 .*; write a number in one"):
        classes.finish(np.array(numbers))


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ([1_700_000_123, 1_700_000_124], "^a: float32 rounds its numbers by up to 5, and their standard dev"),
        ([[1, 1e-50], [2, 2e-50]], "^b: float32 rounds"),
        ([16_777_217, 2], None),
        ([0.1, 0.2], None),
        ([16_777_217, 16_777_217], None),
    ],
)
def test_numbers_that_float32_makes_equal_are_reported(values: list[Any], words: str | None) -> None:
    targets = Targets(None, ("a", "b"))
    targets.array(values)
    assert len(targets.remarks) == (words is not None)
    assert words is None or re.search(words, targets.remarks[0])


def test_decimals_are_numbers() -> None:
    assert numbers_of(Decimal("1.25"), PLACE, None) == 1.25


@pytest.mark.parametrize(("first", "second"), [(1, "1"), ("a", 1), (0, True), (True, "True")])
def test_classes_of_two_types_are_an_error(first: Any, second: Any) -> None:
    classes = ClassNumbers(None, None)
    classes.number(first, Place("list:2"))
    with pytest.raises(BadFileError, match=r"list:7 has .* list:2 has .*; write all classes as text"):
        classes.number(second, PLACE)


@pytest.mark.parametrize(
    "cell",
    [
        True,
        None,
        math.nan,
        -math.inf,
        1e300,
        pytest.param(10**400, id="digits"),
        "1_0",
        "1e300",
        "inf",
        "٣",
        "x",
        b"1",
        [],
        [1, "x"],
        {},
    ],
)
def test_what_is_not_a_number_is_an_error_with_its_row(cell: Any) -> None:
    with pytest.raises(BadFileError, match=r"^data\.root: list:7 has .* in label, not "):
        numbers_of(cell, PLACE, None)


def test_lists_of_numbers_have_one_length() -> None:
    assert numbers_of([1, "2.5", -3e3], PLACE, 3) == [1.0, 2.5, -3000.0]
    assert numbers_of(np.float32(0.5), PLACE, 0) == 0.5
    for cell, length in (([1.0], 0), (1.0, 1), ([1.0], 2)):
        with pytest.raises(BadFileError, match="list:7"):
            numbers_of(cell, PLACE, length)
