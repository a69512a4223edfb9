"""An error of the operating system is shown with its path and its cause, or without a guess."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpc_train.run.storage_errors import error_clauses, error_words, storage_error

#: Runs as another user than the owner of the folder ``argv[1]``.
STRANGER = """
import os, sys
from pathlib import Path
from hpc_train.run.storage_errors import error_clauses, error_words
if os.geteuid() == 0:
    os.setgroups([])
    os.setgid(12345)
    os.setuid(12345)
try:
    (Path(sys.argv[1]) / "new" / "file").write_text("x")
except OSError as error:
    print(error_words(error))
    print(error_clauses(error))
"""


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that every user may enter, unlike ``tmp_path``."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name)


def test_what_refuses_is_the_folder_that_exists_with_owner_and_mode(open_folder: Path) -> None:
    """The path of the error does not exist: it could not be made."""
    if os.geteuid() != 0:
        pytest.skip("needs another user (root)")
    closed = open_folder / "new"
    closed.mkdir(mode=0o755)
    done = subprocess.run(
        [sys.executable, "-c", STRANGER, str(open_folder)], capture_output=True, text=True, check=True
    )
    whole, clause = done.stdout.splitlines()
    owner = f"its folder {closed} belongs to root and has mode 0755, and this process runs as "
    assert f"Permission denied; {owner}" in whole and whole.startswith(str(closed / "file"))
    assert clause.startswith(f"; {owner}") and "user 12345" in clause


@pytest.mark.parametrize(
    ("number", "remedy"),
    [
        (errno.ENOSPC, "free some space there"),
        (errno.EDQUOT, "ask for a larger quota"),
        (errno.EROFS, "have it mounted writable"),
    ],
)
def test_the_remedy_fits_the_error(number: int, remedy: str) -> None:
    error = OSError(number, os.strerror(number), "/nowhere/x")
    assert remedy in error_words(error) and remedy in str(storage_error(error, Path("/nowhere/x")))
    if number != errno.ENOSPC:
        assert "free some space there;" not in error_words(error)


def test_an_error_without_a_path_names_its_line_and_no_folder() -> None:
    try:
        raise OSError(errno.EROFS, "Read-only file system")
    except OSError as error:
        words = error_words(error)
    assert words.startswith("input/output: Read-only file system (test_storage_errors.py:")
    assert "run's folder" not in words and "free some space" not in words


def test_the_owner_of_a_refused_path_is_a_clause_also_of_the_error_that_it_caused(tmp_path: Path) -> None:
    error = ValueError("x")
    error.__cause__ = PermissionError(errno.EACCES, "Permission denied", str(tmp_path))
    assert error_clauses(error).startswith("; it belongs to ")
    error.__cause__ = PermissionError(errno.EPERM, "Operation not permitted")
    assert error_clauses(error) == ""
    assert error_clauses(ValueError("x")) == error_clauses(FileNotFoundError(2, "x", "/a")) == ""


def test_a_mode_that_permits_is_not_blamed(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("x")
    words = error_words(PermissionError(errno.EACCES, "Permission denied", str(path)))
    assert "Permission denied; it belongs to " in words
    assert "the mode permits it, so an access list, a security module or the file server refuses it" in words
