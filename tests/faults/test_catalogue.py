"""Each fault of the catalogue is caused by a test, and no test names a fault that is not in it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults import reliability
from tests.faults.catalogue import catalogue, marked_tests


def test_every_fault_has_a_test_or_says_why_not() -> None:
    caused = {number for numbers in marked_tests().values() for number in numbers}
    without = [row for row in catalogue() if row.number not in caused and not (row.waits_for or row.not_here)]
    assert without == []


def test_no_test_names_a_fault_that_is_not_there() -> None:
    known = {row.number for row in catalogue()}
    unknown = {test: numbers - known for test, numbers in marked_tests().items() if numbers - known}
    assert unknown == {}


def test_the_rows_are_numbered_from_1() -> None:
    assert [row.number for row in catalogue()] == list(range(1, len(catalogue()) + 1))


REPORT = """\
<testsuites><testsuite timestamp="2026-11-21T09:00:00.000000+00:00">
<testcase classname="tests.a.test_b" name="test_one[x]">{properties}</testcase>
<testcase classname="tests.a.test_b" name="test_one[y]">{properties}<failure message="no"/></testcase>
<testcase classname="tests.a.test_b" name="test_two">{properties}<skipped message="none"/></testcase>
<testcase classname="tests.a.test_b" name="test_three"/>
</testsuite></testsuites>
"""


def test_a_report_becomes_rows(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    marks = '<properties><property name="fault" value="6"/><property name="fault" value="13"/></properties>'
    report.write_text(REPORT.format(properties=marks))
    read = reliability.read(report)
    assert read.date == "2026-11-21"
    page = reliability.page(read)
    (row,) = [line for line in page.splitlines() if line.startswith("| 6 |")]
    assert "[one](../tests/a/test_b.py)" in row and "three" not in row
    assert "1 passed, 1 failed, 1 skipped" in row
    assert not reliability.is_sound(read), "most faults have no test that passed"


def test_what_is_not_as_promised_is_in_the_faults_row() -> None:
    page = reliability.page(reliability.Report("2026-11-21", [])).splitlines()
    departing = [row for row in catalogue() if row.departs]
    assert [row.number for row in departing] == [4, 34]
    for row in departing:
        (line,) = [line for line in page if line.startswith(f"| {row.number} |")]
        assert line.endswith(f"no test; differs from the promise: {row.departs} |")


def test_the_page_is_of_this_catalogue() -> None:
    """Results are as old as the page says; faults and promises are not."""
    if not reliability.PAGE.exists():
        pytest.skip("`make reliability` has not been run here")
    shown = reliability.PAGE.read_text(encoding="utf-8")
    for row in catalogue():
        assert f"| {row.number} | {row.fault} | {row.promise} |" in shown, "run `make reliability`"
