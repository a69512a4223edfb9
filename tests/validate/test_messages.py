"""The messages on bad files: ``messages.golden`` has a case for each kind, and every wording once."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hpc_train.experiment.validate.base import RULES
from tests.config.files import problems_of
from tests.validate.following import followed
from tests.validate.messages import NEWCOMERS, cases, lines_of, text_of, without_libraries

CASES = {case: lines for case, lines in cases().items() if case.startswith(">")}
LINES = [line.partition("  ") for lines in CASES.values() for line in lines]
#: Code, place and key.
_HEAD = re.compile(r"(\S+)  (command line|exp\.yaml:\d+:\d+): ([^;]*?):? ")


def heads(lines: list[str]) -> list[tuple[str, ...]]:
    """Return the code, the place and the key of each line, whatever its wording."""
    return [match.groups() if (match := _HEAD.match(line)) else (line,) for line in lines]


@pytest.mark.fault(23, 24, 28)
@pytest.mark.parametrize("case", CASES)
def test_a_problem_stands_at_its_place_with_its_remedy(case: str) -> None:
    lines = lines_of(case)
    assert heads(lines) == heads(CASES[case])
    assert lines == CASES[case], "another wording: write it by `python -m tests.validate.messages`"


def test_each_rule_has_a_case() -> None:
    assert set(RULES) <= {code for code, _, _ in LINES}


def test_problems_are_single_short_lines_in_plain_words() -> None:
    for code, _, line in LINES:
        assert re.fullmatch(r"[a-z]+(-[a-z0-9]+)*\.[a-z0-9]+(-[a-z0-9]+)*", code), code
        assert re.fullmatch(r"(exp\.yaml:\d+:\d+|command line): [ -~…×]+; [ -~…×]+", line), line
        assert len(line) < 450
        assert not re.search(r"[Ii]nput should|valid (string|integer)|pydantic|dictionary|\\A", line)


def test_no_secret_of_the_file_is_repeated() -> None:
    assert any("hunter2" in case for case in CASES)
    assert not any("hunter2" in line for _, _, line in LINES)


@pytest.mark.fault(23)
def test_all_problems_come_at_once_in_the_order_of_the_file() -> None:
    (case,) = (case for case in CASES if "name: Bad Name" in case)
    places = [tuple(map(int, re.findall(r":(\d+)", line)[:2])) for line in lines_of(case)]
    assert len(places) == 14 and places == sorted(places)


# Mistakes of people who come from other tools: the answer to each, and where it leads if it is followed.


NEWCOMER_CASES = {case: lines for case, lines in cases(NEWCOMERS).items() if case.startswith(">")}
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
    assert len(NEWCOMER_CASES) >= 120
    assert all(NEWCOMER_CASES.values()), "a mistake that is none"


# One test for the whole table, which costs a fifth of one test per row.
@pytest.mark.slow
def test_each_mistake_is_answered_at_its_place() -> None:
    answers = {case: lines_of(case) for case in NEWCOMER_CASES}
    wrong = {case: lines for case, lines in answers.items() if lines != NEWCOMER_CASES[case]}
    assert wrong == {}, "other wordings: write them by `python -m tests.validate.messages`"


@pytest.mark.slow
def test_answers_that_are_followed_literally_lead_to_a_valid_file() -> None:
    with without_libraries():
        remaining = {case: _remaining_problem(case) for case in NEWCOMER_CASES}
    assert {case: problem for case, problem in remaining.items() if problem} == {}
