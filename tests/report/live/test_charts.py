"""Curves drawn as text."""

from __future__ import annotations

import math
import sys

import pytest

from hpc_train.report.live.details import MIN_LINES, charts


def test_a_line_goes_from_one_corner_to_the_other() -> None:
    titles, *rows = charts({"loss": [(10.0 * x, 1.0 - x / 10) for x in range(11)]}, 20, 6)
    assert titles == ("loss: 0 at step 100 ", "")
    assert [line for _, line in rows] == [
        "        1 ⠑⠢⡀⠀⠀⠀⠀⠀⠀⠀",
        "          ⠀⠀⠈⠒⢄⠀⠀⠀⠀⠀",
        "          ⠀⠀⠀⠀⠀⠑⠤⡀⠀⠀",
        "        0 ⠀⠀⠀⠀⠀⠀⠀⠈⠢⢄",
        "     step 0      100",
    ]


def test_as_many_curves_as_fit_stand_side_by_side() -> None:
    curves = {name: [(1.0, 1.0), (2.0, value)] for name, value in (("a", 2.0), ("b", 3.0), ("c", 4.0))}
    for width, names in ((30, "a"), (79, "ab"), (160, "abc")):
        (titles, _), *rows = charts(curves, width, 8)
        assert [name for name in "abc" if f"{name}: " in titles] == list(names)
        assert len(rows) == 7 and all(len(line) <= width for _, line in rows)


@pytest.mark.parametrize(
    "values",
    [[1.0], [math.nan, 1.0], [], [math.inf, -math.inf, 1.0]],
    ids=["one point", "one finite", "none", "one finite of three"],
)
def test_without_two_finite_points_nothing_is_drawn(values: list[float]) -> None:
    assert charts({"loss": list(enumerate(values))}, 80, 10) == []
    assert charts({"loss": [(1.0, 1.0), (2.0, 2.0)]}, 80, MIN_LINES - 1) == []


@pytest.mark.parametrize(
    "values",
    [
        [5.0] * 100, [sys.float_info.max, -sys.float_info.max], [5e-324, 0.0], [math.nan, 1.0, math.inf, 2.0],
        [float(value) for value in range(10_000)],
    ],
    ids=["constant", "huge", "tiny", "with gaps", "many"],
)  # fmt: skip
def test_any_values_are_drawn(values: list[float]) -> None:
    drawn = charts({"loss": list(enumerate(values))}, 80, 8)
    assert len(drawn) == 8
    dots = "".join(line for _, line in drawn)
    assert any("⠀" < character <= "⣿" for character in dots)


def test_values_over_decades_have_a_logarithmic_scale() -> None:
    (title, _), *_ = charts({"loss": [(1.0, 100.0), (2.0, 0.01)]}, 60, 8)
    assert title.startswith("loss, logarithmic: 0.01 at step 2")
