"""In what order tests run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests import durations

FILES = {
    ("tests/a.py", False): ["a1", "a2"],
    ("tests/b.py", False): ["b1"],
    ("tests/c.py", False): ["c1", "c2", "c3"],
    ("tests/d.py", True): ["d1", "d2"],
    ("tests/e.py", True): ["e1"],
}
QUICK = [f"q{number}" for number in range(10)]


@pytest.fixture(autouse=True)
def _measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = {"tests/a.py": 40.0, "tests/b.py": 90.0, "tests/d.py": 100.0, "tests/e.py": 50.0}
    monkeypatch.setattr(durations, "FILE", tmp_path / "durations.json")
    durations.FILE.write_text(json.dumps({name: {"wall": wall} for name, wall in seconds.items()}))


def test_workers_begin_with_long_files_and_the_last_one_with_none_that_needs_slurm() -> None:
    order = durations.in_order(FILES, QUICK, 3)
    assert order[:6] == ["d1", "d2", *QUICK[:4]]
    assert order[6:12] == ["e1", "a1", "a2", "c1", "c2", "c3"]
    assert order[12:] == ["b1", *QUICK[4:]]


def test_one_worker_begins_with_slurm_and_what_takes_long() -> None:
    assert durations.in_order(FILES, QUICK, 1) == [
        *("d1", "d2", "e1", "b1", "a1", "a2", "c1", "c2", "c3"),
        *QUICK,
    ]


def test_more_workers_than_files_omit_no_test() -> None:
    slow = [test for tests in FILES.values() for test in tests]
    assert sorted(durations.in_order(FILES, QUICK, 20)) == sorted([*slow, *QUICK])


def test_the_summary_adds_up_each_file_and_names_its_long_tests() -> None:
    lines = [json.dumps(line) for line in (["a.py::x", 0.4, 0.2], ["a.py::y[1]", 2.0, 3.0])]
    assert durations._summary(lines) == {
        "a.py": {"count": 2, "wall": 2.4, "cpu": 3.2, "tests": {"y[1]": (2.0, 3.0)}}
    }
