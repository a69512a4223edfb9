from __future__ import annotations

import errno
import io
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hpc_train.run import storage_errors
from hpc_train.training.main import tolerant

pytestmark = pytest.mark.fault(9)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "rank-0.log"


@pytest.fixture
def stream(path: Path) -> Iterator[Any]:
    with path.open("w", encoding="utf-8") as file, tolerant(file) as tolerating:
        yield tolerating


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    slept: list[float] = []
    monkeypatch.setattr(storage_errors.time, "sleep", slept.append)
    return slept


def refuse(monkeypatch: pytest.MonkeyPatch, number: int, times: int) -> None:
    really, left = os.write, [times]

    def write(descriptor: int, data: bytes) -> int:
        if left[0]:
            left[0] -= 1
            raise OSError(number, os.strerror(number))
        return really(descriptor, data)

    monkeypatch.setattr(os, "write", write)


def test_a_line_that_is_refused_for_a_moment_is_written(
    stream: Any, path: Path, pauses: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse(monkeypatch, errno.ESTALE, 2)
    print("größe", file=stream, flush=True)
    assert path.read_text(encoding="utf-8") == "größe\n"
    assert pauses == list(storage_errors.RETRY_AFTER_S)


def test_lines_are_dropped_while_the_server_stays_away_and_counted(
    stream: Any, path: Path, pauses: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse(monkeypatch, errno.ETIMEDOUT, 4)
    print("one", file=stream, flush=True)
    print("two", file=stream, flush=True)
    print("three", file=stream, flush=True)
    assert path.read_text() == "(8 bytes of this log could not be written)\nthree\n"
    assert pauses == list(storage_errors.RETRY_AFTER_S), "only the first line was waited for"


def test_another_error_is_raised(stream: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse(monkeypatch, errno.ENOSPC, 1)
    with pytest.raises(OSError, match="No space"):
        print("one", file=stream, flush=True)


@pytest.mark.parametrize("stream", [None, io.StringIO()])
def test_what_is_not_a_file_stays_as_it_is(stream: Any) -> None:
    assert tolerant(stream) is stream
