"""The messages on bad files: ``messages.golden`` has a case for each kind, and every wording once."""

from __future__ import annotations

import re

import pytest

from hpc_train.experiment.validate.base import RULES
from tests.validate.messages import cases, lines_of

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


def test_codes_are_in_kebab_case() -> None:
    assert all(re.fullmatch(r"[a-z]+(-[a-z0-9]+)*\.[a-z0-9]+(-[a-z0-9]+)*", code) for code, _, _ in LINES)


def test_problems_are_single_short_lines_in_plain_words() -> None:
    for _, _, line in LINES:
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
