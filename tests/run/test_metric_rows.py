from __future__ import annotations

from pathlib import Path

import pytest

from hpc_train.run import metric_rows
from hpc_train.run.metric_rows import iter_rows, lines_from_end


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
