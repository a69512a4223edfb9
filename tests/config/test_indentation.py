"""Sections whose keys are not indented: one problem that names their lines."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.config.files import GOOD, problems_of

MODEL, DATA = "model:\n  name: acme.models:tiny\n", "data:\n  name: digits\n"
OPTIMIZATION = GOOD[GOOD.index("optimization:") :].replace("sgd, lr", "sgd,\n   lr")


def flush(text: str, indent: str = "  ") -> str:
    """Return the text without the indentation of its lines."""
    return text.replace(f"\n{indent}", "\n")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (
            GOOD.replace(DATA, "data:\nname: imagefolder\nroot: x\n"),
            "5:1: data: is empty; indent lines 6-7 below data:",
        ),
        (
            # The experiment's name is the repeated one.
            GOOD.replace("name: digits-test\n", "").replace(DATA, flush(DATA)) + "name: digits-test\n",
            "4:1: data: is empty; indent line 5 below data:",
        ),
        (
            # A name that is not valid for an experiment.
            GOOD.replace("name: digits-test\n", "").replace(MODEL, "model:\nname: Timm/x\n"),
            "2:1: model: is empty; indent line 3 below model:",
        ),
        (
            GOOD[: GOOD.index("optimization:")] + flush(OPTIMIZATION),
            "7:1: optimization: is empty; indent lines 8-12 below optimization:",
        ),
        (
            GOOD.replace("optimizer: {name: sgd, lr: 0.1}", "optimizer:\n  name: sgd\n  lr: 0.1\nseed: 1"),
            "11:3: optimization.optimizer: is empty; indent lines 12-13 below optimizer:",
        ),
        (
            GOOD + "early_stopping:\nmetric: loss\nmode: min\npatience: 3\n",
            "12:1: early_stopping: is empty; indent lines 13-15 below early_stopping:",
        ),
        (
            GOOD + "sweep:\n  grid:\n  optimization.optimizer.lr: [0.1, 0.2]\n",
            "13:3: sweep.grid: is empty; indent line 14 below grid:",
        ),
    ],
)  # fmt: skip
def test_keys_that_are_not_indented_are_one_problem(tmp_path: Path, text: str, problem: str) -> None:
    assert problems_of(tmp_path, text) == [f"exp.yaml:{problem}"]


def test_each_section_without_indentation_is_a_problem(tmp_path: Path) -> None:
    text = GOOD.replace(MODEL, flush(MODEL)).replace(DATA, flush(DATA)) + "sed: 1\n"
    assert problems_of(tmp_path, text) == [
        "exp.yaml:3:1: model: is empty; indent line 4 below model:",
        "exp.yaml:5:1: data: is empty; indent line 6 below data:",
        "exp.yaml:12:1: sed: unknown key; did you mean seed?",
    ]


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        ("slurm:\nprofile: {stepz: 1}\n", "profile.stepz: unknown key; did you mean steps?"),
        ("early_stopping:\nsed: 1\npatience: 3\n", "sed: unknown key"),
        ("early_stopping:\n  \n# a comment\nseed: x\n", "seed: needs a whole number"),
    ],
)
def test_keys_after_an_empty_section_can_be_where_they_belong(
    tmp_path: Path, more: str, problem: str
) -> None:
    said = problems_of(tmp_path, GOOD + more)
    assert any(problem in line for line in said) and not any("indent" in line for line in said), said


def test_keys_in_braces_have_no_indentation(tmp_path: Path) -> None:
    (said,) = problems_of(tmp_path, GOOD + "checkpoint: {best: , metric: loss}\n")
    assert "checkpoint.metric: unknown key" in said


def test_the_command_line_can_fill_the_section(tmp_path: Path) -> None:
    text = GOOD.replace(DATA, "data:\nroot: x\n")
    (said,) = problems_of(tmp_path, text, "data.name=digits")
    assert said == "exp.yaml:6:1: root: unknown key; did you mean data.root?"
