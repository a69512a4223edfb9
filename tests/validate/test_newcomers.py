"""Mistakes of people who come from other tools: the answer to each, and where it leads if it is followed."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpc_train.config.problems import ProblemLine
from hpc_train.errors import BadFileError
from hpc_train.validate.loading import load
from tests.validate.following import followed
from tests.validate.messages import NEWCOMERS, cases, lines_of, text_of, without_libraries

CASES = {case: lines for case, lines in cases(NEWCOMERS).items() if case.startswith(">")}
#: Rounds of answers until a file of many mistakes is valid.
_MAX_ROUNDS = 12


def _problems(text: str) -> list[ProblemLine]:
    path = Path("exp.yaml")
    path.write_text(text, encoding="utf-8")
    try:
        load(path)
    except BadFileError as error:
        return [line for line in error.problems if isinstance(line, ProblemLine)]
    return []


def test_the_table_has_enough_mistakes() -> None:
    assert len(CASES) >= 120
    assert all(CASES.values()), "a mistake that is none"


@pytest.mark.parametrize("case", CASES)
def test_a_mistake_is_answered_at_its_place(case: str) -> None:
    assert lines_of(case) == CASES[case], "another wording: write it by `python -m tests.validate.messages`"


@pytest.mark.parametrize("case", CASES)
def test_answers_that_are_followed_literally_lead_to_a_valid_file(case: str) -> None:
    with without_libraries():
        text = text_of(case)
        for _ in range(_MAX_ROUNDS):
            problems = _problems(text)
            if not problems:
                return
            text = followed(text, problems[0])
    pytest.fail(f"still wrong: {problems[0]}")
