from __future__ import annotations

import json
from pathlib import Path

import pytest

from hpc_train.errors import StorageError
from hpc_train.paths import RunPaths
from hpc_train.run.found_micro_batch import Found, keep, kept


@pytest.mark.parametrize("too_large", [16, None])
def test_the_size_is_read_as_it_was_written(too_large: int | None, tmp_path: Path) -> None:
    paths, found = RunPaths(tmp_path), Found(size=8, too_large=too_large, ranks=4, attempt=2)
    assert kept(paths) is None
    assert keep(paths, found) == found == kept(paths)
    content = {"version": 1, "size": 8, "too_large": too_large, "ranks": 4, "attempt": 2}
    assert json.loads(paths.micro_batch.read_text()) == content
    assert keep(paths, Found(size=4, too_large=8, ranks=1, attempt=3)) == found, "the first one counts"


@pytest.mark.parametrize("key", ["size", "ranks", "attempt"])
def test_a_file_without_one_of_its_numbers_is_an_error(key: str, tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    keep(paths, Found(size=8, too_large=None, ranks=4, attempt=2))
    content = json.loads(paths.micro_batch.read_text())
    for value in (0, None):
        paths.micro_batch.write_text(json.dumps(content | {key: value}))
        with pytest.raises(StorageError, match="would be another run"):
            kept(paths)
