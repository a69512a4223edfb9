"""In what order tests run."""

from __future__ import annotations

import json
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from tests import durations

GROUPS = {
    ("tests/a.py", False): ["a1", "a2"],
    ("tests/b.py", False): ["b1"],
    ("tests/c.py", False): ["c1", "c2", "c3"],
    ("tests/d.py::new", True): ["d1"],
    ("tests/d.py::long[x]", True): ["d2"],
    ("tests/e.py::new", True): ["e1"],
}
QUICK = [f"q{number}" for number in range(10)]


@pytest.fixture(autouse=True)
def _measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = {
        name: {"wall": wall, "tests": {}} for name, wall in (("tests/a.py", 40.0), ("tests/b.py", 90.0))
    }
    measured["tests/d.py"] = {"wall": 101.0, "tests": {"long[x]": (100.0, 5.0)}}
    monkeypatch.setattr(durations, "FILE", tmp_path / "durations.json")
    durations.FILE.write_text(json.dumps(measured))


def test_workers_begin_with_long_files_and_the_last_two_with_none_that_needs_slurm() -> None:
    order = durations.in_order(GROUPS, QUICK, 4)
    assert order[:4] == ["d2", *QUICK[:3]]
    assert order[4:9] == ["d1", "e1", "c1", "c2", "c3"]
    assert order[9:14] == ["b1", *QUICK[3:7]]
    assert order[14:] == ["a1", "a2", *QUICK[7:]]


def test_one_worker_begins_with_slurm_and_what_takes_long() -> None:
    assert durations.in_order(GROUPS, QUICK, 1) == [
        *("d2", "d1", "e1", "b1", "a1", "a2", "c1", "c2", "c3"),
        *QUICK,
    ]


def test_more_workers_than_files_omit_no_test() -> None:
    slow = [test for tests in GROUPS.values() for test in tests]
    assert sorted(durations.in_order(GROUPS, QUICK, 20)) == sorted([*slow, *QUICK])


def test_the_summary_adds_up_each_file_and_names_its_long_tests() -> None:
    measured = (["a.py::x", 0.4, 0.2], ["a.py::y[1]", 2.0, 3.0])
    assert durations._summary(measured) == {
        "a.py": {"count": 2, "wall": 2.4, "cpu": 3.2, "tests": {"y[1]": [2.0, 3.0]}}
    }


def test_junit_files_give_the_wall_times_of_tests_that_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = '<testcase classname="tests.d" name="%s" time="%s">%s</testcase>'
    first = [("long[x]", 80.0, ""), ("new", 3.0, ""), ("gone", 9.0, ""), ("skips", 0.1, "<skipped/>")]
    files = [tmp_path / "first.xml", tmp_path / "again.xml"]
    for file, cases in zip(files, (first, [("new", 4.0, "")]), strict=True):
        file.write_text(f"<testsuites>{''.join(case % each for each in cases)}</testsuites>")
    listed = "".join(f"tests/d.py::{name}\n" for name in ("long[x]", "new", "skips", "unmeasured"))
    monkeypatch.setattr("subprocess.run", lambda *_, **__: CompletedProcess([], 0, f"{listed}4 tests\n"))
    assert durations.main(["--from", *map(str, files)]) == 0
    assert json.loads(durations.FILE.read_text()) == {
        "tests/d.py": {"count": 2, "wall": 84.0, "tests": {"long[x]": [80.0], "new": [4.0]}}
    }
