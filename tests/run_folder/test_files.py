"""Small files as another node's writes leave them."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from hpc_train.run_folder.files import read_json, write_json


def test_a_file_that_went_stale_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_json(tmp_path / "status.json", {"step": 1})
    read_text, stale = Path.read_text, [True, True]

    def read(path: Path, encoding: str | None = None) -> str:
        if stale.pop() if stale else False:
            raise OSError(errno.ESTALE, "Stale file handle")
        return read_text(path, encoding)

    monkeypatch.setattr(Path, "read_text", read)
    assert read_json(tmp_path / "status.json") == {"step": 1}


def test_other_errors_are_told(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError):
        read_json(tmp_path)
