"""Mistakes of people who come from other tools: the answer to each, and where it leads if it is followed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.config.files import problems_of
from tests.validate.following import followed
from tests.validate.messages import NEWCOMERS, cases, lines_of, text_of, without_libraries

CASES = {case: lines for case, lines in cases(NEWCOMERS).items() if case.startswith(">")}
#: Rounds of answers until a file of several mistakes is valid.
_MAX_ROUNDS = 12


def _remaining_problem(case: str) -> str:
    """Return the first problem that remains after all answers were followed; empty for a valid file."""
    text = text_of(case)
    for _ in range(_MAX_ROUNDS):
        problems = problems_of(Path(), text)
        if not problems:
            return ""
        try:
            text = followed(text, problems[0])
        except AssertionError as error:
            return f"{problems[0]}: {error}"
    return problems[0]


def test_the_table_has_enough_mistakes() -> None:
    assert len(CASES) >= 120
    assert all(CASES.values()), "a mistake that is none"


# One test for the whole table, which costs a fifth of one test per row.
@pytest.mark.slow
def test_each_mistake_is_answered_at_its_place() -> None:
    answers = {case: lines_of(case) for case in CASES}
    wrong = {case: lines for case, lines in answers.items() if lines != CASES[case]}
    assert wrong == {}, "other wordings: write them by `python -m tests.validate.messages`"


@pytest.mark.slow
def test_answers_that_are_followed_literally_lead_to_a_valid_file() -> None:
    with without_libraries():
        remaining = {case: _remaining_problem(case) for case in CASES}
    assert {case: problem for case, problem in remaining.items() if problem} == {}
