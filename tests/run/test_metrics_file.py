"""``metrics.jsonl`` after kills, resumes and repeated steps."""

from __future__ import annotations

import errno
import json
import os
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hpc_train.errors import StorageError, TransientStorageError
from hpc_train.run import metric_rows, storage_errors
from hpc_train.run.metric_rows import MetricsFile, iter_rows, lines_from_end
from tests.waiting import HANG_LIMIT_S


def row(step: int, split: str = "train", **more: Any) -> dict[str, Any]:
    return {"split": split, "step": step, "loss": 1 / step} | more


def written(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(each) + "\n" for each in rows))
    return path


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "metrics.jsonl"


@pytest.fixture
def file(path: Path) -> Iterator[MetricsFile]:
    """The file of a new run."""
    made = MetricsFile(path, 0)
    yield made
    made.close()


def test_rows_past_the_resumed_step_are_dropped_and_may_be_written_again(path: Path) -> None:
    kept = [*(row(step, attempt=1) for step in range(1, 6)), row(5, "val", attempt=1)]
    written(path, *kept, row(6, attempt=1), row(7, attempt=1), row(6, "val", attempt=1))
    file = MetricsFile(path, 5)
    assert list(iter_rows(path)) == kept
    assert file.has("train", 5) and file.has("val", 5)
    assert not file.has("val", 4) and not file.has("val", 6)
    file.append(row(6, attempt=2))
    file.append(row(6, "val", attempt=2))
    file.close()
    assert [each["attempt"] for each in iter_rows(path)] == [1] * 6 + [2, 2]


def test_a_row_reaches_other_processes_at_once_and_is_written_once(path: Path, file: MetricsFile) -> None:
    assert path.read_text() == "", "of a new run"
    with pytest.raises(ValueError, match="JSON compliant"):
        file.append(row(1, grad_norm=float("nan")))
    file.append(row(1))
    assert list(iter_rows(path)) == [row(1)]
    file.append(row(1, "val"))
    with pytest.raises(AssertionError, match="has its row already"):
        file.append(row(1))
    assert len(list(iter_rows(path))) == 2


def test_a_file_cut_anywhere_keeps_its_whole_rows(path: Path) -> None:
    rows = [row(step, note="é") for step in (1, 2, 3)]
    whole = written(path, *rows).read_bytes()
    ends = [index for index, byte in enumerate(whole) if byte == ord("}")]
    for cut in range(len(whole) + 1):
        path.write_bytes(whole[:cut])
        MetricsFile(path, 3).close()
        count = sum(end < cut for end in ends)
        assert list(iter_rows(path)) == rows[:count], f"cut at byte {cut}"
        assert path.read_bytes().endswith(b"\n") or count == 0, "the next row begins a line of its own"


@pytest.mark.parametrize(
    "line", ["{", "[]", "3", '"step"', '{"split": "train"}', '{"step": 1}', "\0\0", "\xff"]
)
def test_a_line_that_is_not_a_row_is_skipped(line: str, path: Path) -> None:
    path.write_bytes(line.encode("latin-1") + b"\n" + json.dumps(row(1)).encode() + b"\n")
    MetricsFile(path, 1).close()
    assert path.read_text() == json.dumps(row(1)) + "\n"


@pytest.mark.timeout(HANG_LIMIT_S)
def test_a_pipe_in_its_place_is_refused_at_once(path: Path) -> None:
    os.mkfifo(path)
    with pytest.raises(StorageError, match=r"metrics\.jsonl: not a regular file; move it away"):
        MetricsFile(path, 1)
    assert path.is_fifo()


@pytest.mark.timeout(HANG_LIMIT_S)
def test_a_pipe_that_replaces_it_later_is_refused_at_once(path: Path, file: MetricsFile) -> None:
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(StorageError, match=r"metrics\.jsonl: "):
        file.append(row(1))
    with pytest.raises(StorageError, match=r"metrics\.jsonl: .*; move it away, then continue"):
        file.sync()


def test_sync_puts_the_file_on_the_disk(
    path: Path, file: MetricsFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []
    really = os.fsync

    def note(descriptor: int) -> None:
        synced.append(os.fstat(descriptor).st_ino)
        really(descriptor)

    monkeypatch.setattr(os, "fsync", note)
    file.append(row(1))
    assert synced == []
    file.sync()
    assert synced == [path.stat().st_ino]


@pytest.fixture
def large(path: Path) -> Path:
    """A file of 40,000 rows, 4 MB."""
    return written(path, *(row(step, note="x" * 60) for step in range(1, 40_001)))


def test_a_resume_holds_a_small_part_of_a_large_file(large: Path) -> None:
    size = large.stat().st_size
    tracemalloc.start()
    MetricsFile(large, 39_000).reopened(38_000)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < size / 8
    assert list(iter_rows(large))[-1] == row(38_000, note="x" * 60)


def test_a_resume_parses_only_the_rows_that_it_drops(large: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parsed = 0
    really = metric_rows._decode

    def count(text: str) -> tuple[Any, int]:
        nonlocal parsed
        parsed += 1
        return really(text)

    monkeypatch.setattr(metric_rows, "_decode", count)
    MetricsFile(large, 39_990)
    assert parsed == 12, "ten rows past the step, the step's own, and the one before it"


def test_it_tells_whether_rows_were_withdrawn(path: Path) -> None:
    written(path, row(1), row(2))
    assert not MetricsFile(path, 2).has_withdrawn
    assert MetricsFile(path, 1).has_withdrawn
    assert not MetricsFile(path, 1).has_withdrawn


@pytest.fixture
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage_errors, "RETRY_AFTER_S", (0.0, 0.0))


def refuse(monkeypatch: pytest.MonkeyPatch, name: str, number: int, times: int) -> list[int]:
    """Let the next calls of a function of ``os`` fail, a write half-way; return how many are left to."""
    really, left = getattr(os, name), [times]

    def call(descriptor: int, *arguments: Any) -> Any:
        if left[0] == 0:
            return really(descriptor, *arguments)
        left[0] -= 1
        if arguments:
            data, offset = arguments
            really(descriptor, data[: len(data) // 2], offset)
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, name, call)
    return left


@pytest.mark.fault(9)
@pytest.mark.usefixtures("_at_once")
@pytest.mark.parametrize("number", sorted(storage_errors.TRANSIENT))
def test_a_row_that_is_refused_for_a_moment_is_written_once(
    number: int, path: Path, file: MetricsFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    file.append(row(1))
    left = refuse(monkeypatch, "pwrite", number, 2)
    file.append(row(2))
    file.append(row(3))
    file.sync()
    assert left == [0] and list(iter_rows(path)) == [row(1), row(2), row(3)]


@pytest.mark.fault(9)
@pytest.mark.usefixtures("_at_once")
@pytest.mark.parametrize("number", sorted(storage_errors.TRANSIENT))
def test_rows_that_an_fsync_did_not_write_are_written_again(
    number: int, path: Path, file: MetricsFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    file.append(row(1))
    file.sync()
    file.append(row(2))
    file.append(row(3))
    before = path.stat().st_ino
    refuse(monkeypatch, "fsync", number, 1)
    with path.open("r+b") as lost:  # what the failed fsync did to them
        lost.seek(-20, os.SEEK_END)
        lost.write(bytes(20))
    file.sync()
    assert list(iter_rows(path)) == [row(1), row(2), row(3)]
    assert path.stat().st_ino != before, "another fsync of the same file proves nothing"
    file.append(row(4))
    file.sync()
    assert list(iter_rows(path))[-1] == row(4)


@pytest.mark.usefixtures("_at_once")
@pytest.mark.parametrize(
    ("number", "kind"), [(errno.EIO, TransientStorageError), (errno.ENOSPC, StorageError)]
)
def test_an_error_that_stays_names_the_file(
    number: int, kind: type[Exception], path: Path, file: MetricsFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse(monkeypatch, "pwrite", number, 99)
    with pytest.raises(kind, match=r"metrics\.jsonl: the disk"):
        file.append(row(1))


@pytest.mark.usefixtures("_at_once")
def test_a_later_attempts_file_is_not_written_to(
    path: Path, file: MetricsFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    file.append(row(1))
    MetricsFile(path, 0)
    refuse(monkeypatch, "pwrite", errno.ESTALE, 1)
    with pytest.raises(StorageError, match="another attempt has replaced the file"):
        file.append(row(2))
    assert path.read_bytes() == b""


@pytest.mark.parametrize("block_bytes", [1, 2, 3, 7, 1 << 16])
@pytest.mark.parametrize("text", [b"", b"\n", b"a", b"a\n", b"a\nbb", b"\na\n\nbbb\r\nc\n", b"\r\n\r\n"])
def test_lines_come_from_the_end_with_their_offsets(
    text: bytes, block_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metric_rows, "_BLOCK_BYTES", block_bytes)
    path = tmp_path / "file"
    path.write_bytes(text)
    with path.open("rb") as file:
        forward, offset = [], 0
        for line in file:
            forward.append((offset, line))
            offset += len(line)
        assert list(lines_from_end(file)) == forward[::-1]


def test_a_file_that_is_not_there_has_no_rows(tmp_path: Path) -> None:
    assert list(iter_rows(tmp_path / "metrics.jsonl")) == []
