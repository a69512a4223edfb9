from __future__ import annotations

from pathlib import Path

import pytest

from hpc_train.paths import RunPaths
from hpc_train.run.bad_samples import BadSample, all_known, append, in_words


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    for attempt in (1, 2, 10):
        RunPaths(tmp_path).attempt(attempt).folder.mkdir(parents=True)
    return RunPaths(tmp_path)


def sample(index: int, why: str = "") -> BadSample:
    return BadSample("train", index, f"{index}.jpg", why)


def test_a_run_without_attempts_knows_none(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path / "none")
    assert (all_known(paths), in_words(paths)) == ({}, None)


def test_the_first_to_name_a_sample_counts(paths: RunPaths) -> None:
    append(paths.attempt(10).bad_samples(0), [sample(1, "third"), sample(3)])
    append(paths.attempt(2).bad_samples(10), [sample(1, "second"), sample(0)])
    append(paths.attempt(2).bad_samples(2), [sample(1, "first")])
    known = all_known(paths)
    assert list(known) == [("train", 1), ("train", 0), ("train", 3)]
    assert known["train", 1].why == "first"


@pytest.mark.parametrize(
    "rest", ["{", '{"split": "train", "ind', "[]", "3", '{"split": "other", "index": 1}']
)
def test_half_a_line_is_not_a_sample(paths: RunPaths, rest: str) -> None:
    file = paths.attempt(1).bad_samples(0)
    append(file, [sample(1), sample(2)])
    file.write_text(file.read_text() + rest)
    assert list(all_known(paths)) == [("train", 1), ("train", 2)]


def test_names_that_are_no_utf8_come_back(paths: RunPaths) -> None:
    odd = BadSample("val", 5, "b\udcff\n\u202e.jpg", "why")
    append(paths.attempt(1).bad_samples(0), [odd])
    assert all_known(paths) == {("val", 5): odd}


def test_titles_say_what_is_known() -> None:
    assert str(BadSample("train", 5, "sample 5", "why")) == "sample 5: why"
    assert str(BadSample("val", 5, "a.jpg", "why")) == "validation sample 5 (a.jpg): why"
