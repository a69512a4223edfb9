"""Pieces of a tensor, cut anyhow, give any other cut of it."""

from __future__ import annotations

import json
import math
import os
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from hpc_train.errors import BadFileError
from hpc_train.paths import CheckpointPaths
from hpc_train.run.checkpoints import FileEntry, hash_file
from hpc_train.training.checkpoint import shards
from hpc_train.training.checkpoint.saved_tensors import SavedPiece, SavedTensor, read_into
from hpc_train.training.checkpoint.shards import DTYPES, Entry, open_shard, write_safetensors
from hpc_train.training.strategies.base import Piece


@st.composite
def cuts(draw: st.DrawFn, size: int) -> list[tuple[int, int]]:
    """Split 0…size into consecutive spans, some perhaps empty."""
    inner = sorted(draw(st.lists(st.integers(0, size), max_size=3)))
    return list(zip([0, *inner], [*inner, size], strict=True))


@st.composite
def layouts(draw: st.DrawFn) -> tuple[tuple[int, int], list[list[tuple[int, int]]]]:
    shape = draw(st.integers(1, 7)), draw(st.integers(1, 5))
    return shape, [draw(cuts(shape[0])), draw(cuts(shape[1])), draw(cuts(shape[0])), draw(cuts(shape[1]))]


@settings(max_examples=60)
@given(layouts())
def test_any_layout_reads_any_other(layout: tuple[tuple[int, int], list[list[tuple[int, int]]]]) -> None:
    shape, (rows, columns, wanted_rows, wanted_columns) = layout
    full = torch.arange(math.prod(shape), dtype=torch.int32).reshape(shape)
    with tempfile.TemporaryDirectory() as folder:
        checkpoint, pieces = CheckpointPaths(Path(folder)), []
        for top, bottom in rows:
            for left, right in columns:
                part = full[top:bottom, left:right].contiguous()
                if part.numel():
                    shard = checkpoint.shard(len(pieces))
                    write_safetensors(shard, {"t": Entry.of(part)}, {})
                    pieces.append(SavedPiece(len(pieces), (top, left), tuple(part.shape)))
        saved = {"t": SavedTensor("I32", shape, tuple(pieces))}
        for top, bottom in wanted_rows:
            for left, right in wanted_columns:
                local = torch.full((bottom - top, right - left), -1, dtype=torch.int32)
                read_into(checkpoint, saved, {"t": [Piece(shape, (top, left), local, is_writer=True)]})
                assert torch.equal(local, full[top:bottom, left:right])


@pytest.mark.parametrize("block_bytes", [1, 50, 1 << 20])
def test_a_target_of_any_layout_is_read_a_few_rows_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block_bytes: int
) -> None:
    monkeypatch.setattr(shards, "_BLOCK_BYTES", block_bytes)
    saved = {"t": torch.arange(210.0).reshape(7, 6, 5), "scalar": torch.tensor(2.5)}
    path = tmp_path / "x"
    write_safetensors(path, {name: Entry.of(tensor) for name, tensor in saved.items()}, {})
    turned, wide = torch.zeros(3, 5, 4).transpose(1, 2), torch.zeros((), dtype=torch.float64)
    with open_shard(path) as shard:
        shard.read_into(turned, "t", "F32", (7, 6, 5), (slice(2, 5), slice(1, 5), slice(0, 5)))
        shard.read_into(wide, "scalar", "F32", (), ())
    assert torch.equal(turned, saved["t"][2:5, 1:5]) and wide.item() == 2.5


def test_a_file_that_is_cut_while_it_is_read_is_an_error_of_its_name(tmp_path: Path) -> None:
    path = tmp_path / "x"
    write_safetensors(path, {"t": Entry.of(torch.ones(4096))}, {})
    with open_shard(path) as shard, pytest.raises(BadFileError, match=r"x: .*it ends early"):
        os.truncate(path, path.stat().st_size - 1)
        shard.read_into(torch.zeros(4096), "t", "F32", (4096,), (slice(0, 4096),))


def test_a_pipe_in_the_place_of_a_shard_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "x")
    with pytest.raises(BadFileError, match="not a regular file"), open_shard(tmp_path / "x"):
        pass


def test_a_shard_that_holds_nothing_needed_is_not_opened(tmp_path: Path) -> None:
    checkpoint = CheckpointPaths(tmp_path)
    write_safetensors(checkpoint.shard(1), {"t": Entry.of(torch.ones(2, 3))}, {})
    pieces = (SavedPiece(0, (0, 0), (2, 3)), SavedPiece(1, (2, 0), (2, 3)))
    local = torch.zeros(2, 3)
    target = Piece((4, 3), (2, 0), local, is_writer=True)
    read_into(checkpoint, {"t": SavedTensor("F32", (4, 3), pieces)}, {"t": [target]})
    assert local.sum() == 6


def test_the_file_is_what_safetensors_reads(tmp_path: Path) -> None:
    tensors = {f"{name}é": torch.zeros(3, 5).to(dtype) for name, dtype in DTYPES.items()}
    tensors |= {"scalar": torch.tensor(2.5), "empty": torch.zeros(0, 4), "large": torch.rand(1200, 700)}
    path = tmp_path / "x.safetensors"
    entries = {name: Entry.of(tensor) for name, tensor in tensors.items()}
    written = write_safetensors(path, entries, {"step": "5"})
    assert written == FileEntry(path.stat().st_size, hash_file(path))
    with safe_open(path, framework="pt") as file:
        assert file.metadata() == {"step": "5"}
        assert set(file.keys()) == set(tensors)
        for name, tensor in tensors.items():
            found = file.get_tensor(name)
            assert found.dtype == tensor.dtype and found.shape == tensor.shape
            assert torch.equal(found.float(), tensor.float())


def test_the_size_of_a_tensor_is_that_of_its_elements() -> None:
    assert SavedTensor("BF16", (3, 5), ()).nbytes == 30
    assert SavedTensor("F64", (), ()).nbytes == 8


def test_tensors_are_aligned_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    tensors = {"a": torch.zeros(3, dtype=torch.bool), "b": torch.zeros(3), "c": torch.zeros(5).double()}
    write_safetensors(path, {name: Entry.of(tensor) for name, tensor in tensors.items()}, {})
    octets = path.read_bytes()
    length = int.from_bytes(octets[:8], "little")
    header = json.loads(octets[8 : 8 + length])
    for name, tensor in tensors.items():
        assert (8 + length + header[name]["data_offsets"][0]) % tensor.element_size() == 0
