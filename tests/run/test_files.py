"""Small files as another node's writes leave them, and what somebody else put in their place."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Literal

import pytest

from hpc_train.run import files
from hpc_train.run.files import (
    UnreadableFileError,
    in_parallel,
    open_regular,
    read_json,
    read_tail,
    read_text,
    tail_text,
    write_json,
)
from tests.waiting import HANG_LIMIT_S


def _failing(monkeypatch: pytest.MonkeyPatch, *codes: int) -> None:
    """Let the next opens fail with these."""
    opened, left = os.open, list(codes)

    def fail(*arguments: object) -> int:
        if left:
            code = left.pop(0)
            raise OSError(code, os.strerror(code))
        return opened(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(files.os, "open", fail)


def test_a_file_that_went_stale_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_json(tmp_path / "status.json", {"step": 1})
    _failing(monkeypatch, errno.ESTALE, errno.ESTALE)
    assert read_json(tmp_path / "status.json") == {"step": 1}
    _failing(monkeypatch, errno.EACCES)
    with pytest.raises(PermissionError):
        read_json(tmp_path / "status.json")


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "status.json")
    with pytest.raises(UnreadableFileError, match="not a regular file"):
        open_regular(tmp_path / "status.json")
    assert read_json(tmp_path / "status.json") is None
    assert tail_text(tmp_path / "status.json", 10) == ""


def test_the_text_of_a_tail_may_begin_within_a_character(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("aéb")
    assert tail_text(tmp_path / "log", 2) == "\N{REPLACEMENT CHARACTER}b"
    assert tail_text(tmp_path / "log", 9) == "aéb"
    assert read_tail(tmp_path / "log", 9) == ("aéb".encode(), True)


@pytest.mark.timeout(HANG_LIMIT_S)
@pytest.mark.parametrize("mode", ["ab", "wb"])
@pytest.mark.parametrize("has_reader", [False, True])
def test_nothing_is_written_to_a_pipe(mode: Literal["ab", "wb"], has_reader: bool, tmp_path: Path) -> None:
    pipe = tmp_path / "rank-0.log"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK) if has_reader else None
    with pytest.raises(UnreadableFileError, match=r"rank-0\.log: "):
        open_regular(pipe, mode)
    if reader is not None:
        os.close(reader)


def test_a_file_grows_or_is_replaced_and_its_descriptor_blocks(tmp_path: Path) -> None:
    modes: list[tuple[Literal["ab", "wb"], bytes]] = [("ab", b"one"), ("ab", b"onetwo"), ("wb", b"two")]
    for (mode, expected), text in zip(modes, (b"one", b"two", b"two"), strict=True):
        with open_regular(tmp_path / "log", mode) as file:
            file.write(text)
            assert os.get_blocking(file.fileno()), "a rank inherits it"
        assert (tmp_path / "log").read_bytes() == expected


@pytest.mark.parametrize("name", ["/dev/zero", "."])
def test_devices_and_folders_are_no_files(tmp_path: Path, name: str) -> None:
    assert read_json(tmp_path / name) is None


@pytest.mark.parametrize("text", ['{"a":' * 100_000, '{"a":' + "[" * 100_000 + "]" * 100_000 + "}"])
def test_deep_nesting_is_unreadable(tmp_path: Path, text: str) -> None:
    (tmp_path / "status.json").write_text(text)
    assert read_json(tmp_path / "status.json") is None


def test_no_more_than_the_limit_is_read(tmp_path: Path) -> None:
    """A sparse file of a terabyte would fill the memory."""
    file = tmp_path / "status.json"
    for text in ("12345", "a" * 100_000):
        file.write_text(text)
        assert read_text(file, len(text)) == text
        with pytest.raises(UnreadableFileError, match=f"larger than {len(text) - 1} bytes"):
            read_text(file, len(text) - 1)
    os.truncate(file, 1 << 40)
    assert read_json(file) is None


def test_a_full_disk_is_reported_with_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(files.os, "fsync", refuse)
    with pytest.raises(OSError, match="No space left") as caught:
        write_json(tmp_path / "run.json", {}, sync=True)
    assert caught.value.filename == str(tmp_path / "run.json")
    assert not [*tmp_path.iterdir()]


def test_work_in_parallel_keeps_the_order_and_raises_the_first_error() -> None:
    assert in_parallel(str, range(20)) == [str(number) for number in range(20)]
    with pytest.raises(ZeroDivisionError):
        in_parallel(lambda number: 1 // number, [1, 0, 2])
