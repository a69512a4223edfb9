"""Digests see each byte of lists and small files, and the sampled ones of larger files."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import pytest

from hpc_train.experiment.config.training_sections import DataConfig
from hpc_train.experiment.data_facts import file_content
from hpc_train.experiment.data_facts.file_content import (
    EvenSample,
    block_digest,
    files_digest,
    resolved,
    sample_digest,
)
from hpc_train.experiment.data_facts.listed_data import index_path, listed_images

LONG_AGO = 1_600_000_000


def with_byte(path: Path, size: int, place: int | None) -> Path:
    """Write a file of a fixed size and modification time, with another byte at ``place``."""
    content = bytearray(size)
    if place is not None:
        content[place] = 1
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    os.utime(path, (LONG_AGO, LONG_AGO))
    return path


@pytest.mark.parametrize(
    ("size", "place", "is_seen"),
    [
        (4 << 12, 8000, True),  # read whole
        (1 << 20, 0, True),
        (1 << 20, 4095, True),
        (1 << 20, (1 << 20) - 1, True),
        (1 << 20, (1 << 20) - 4096, True),
        (1 << 20, 5000, False),  # the documented limit
    ],
)
def test_a_changed_byte_of_the_blocks_is_seen(size: int, place: int, is_seen: bool, tmp_path: Path) -> None:
    first, second = (
        block_digest(with_byte(tmp_path / name, size, change), 4, 4096)
        for name, change in (("a", None), ("b", place))
    )
    assert (first != second) == is_seen


def test_sizes_are_part_of_a_digest(tmp_path: Path) -> None:
    first, second = (block_digest(with_byte(tmp_path / "file", size, None), 2, 8) for size in (1000, 1001))
    assert first != second


@pytest.mark.parametrize("name", ["train.csv", "train.json", "train.parquet"])
def test_lists_are_read_whole(name: str, tmp_path: Path) -> None:
    size = 40 << 20  # more than is read of other files
    digests = [
        files_digest([with_byte(tmp_path / folder / name, size, change)])
        for folder, change in (("a", None), ("b", None), ("c", 20_000_001))
    ]
    assert digests[0] == digests[1] != digests[2]


def test_head_and_tail_of_each_shard_are_read(tmp_path: Path) -> None:
    def digest(folder: str, change: int | None) -> str:
        shards = [with_byte(tmp_path / folder / f"{n}.tar", 1 << 20, None) for n in range(200)]
        with_byte(shards[150], 1 << 20, change)
        return files_digest(shards)

    before = digest("a", None)
    assert digest("b", None) == before
    assert before not in {digest("c", 0), digest("d", (1 << 20) - 1)}


def test_a_digest_is_forgotten_when_a_file_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_content, "SETTLED_NS", 0)
    path = with_byte(tmp_path / "train.csv", 100, None)
    before = files_digest([path])
    assert files_digest([path]) == before
    path.unlink()
    assert files_digest([with_byte(path, 100, 50)]) != before


@pytest.mark.parametrize("count", [0, 1, 256, 257, 5000])
def test_a_sample_is_even_and_bounded(count: int) -> None:
    kept = EvenSample(range(count)).kept
    assert len(kept) == count if count <= 256 else 128 <= len(kept) <= 256
    assert len({after - before for before, after in itertools.pairwise(kept)}) <= 1


def test_a_pipe_is_refused_without_waiting_for_its_writer(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "0.png")
    with pytest.raises(OSError, match="not a regular file"):
        sample_digest(str(tmp_path), ["0.png"])


def test_a_location_is_that_behind_links_to_folders(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "link").symlink_to("data")
    (tmp_path / "data/train.csv").write_text("")
    assert resolved([tmp_path / "link/train.csv"]) == resolved([tmp_path / "data/train.csv"])


def write(folder: Path, name: str, content: bytes = b"path,target\n0.png,a\n") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / name).write_bytes(content)
    os.utime(folder / name, (LONG_AGO, LONG_AGO))
    return folder / name


@pytest.mark.parametrize("name", ["train.csv", "train.json", "train.tar"])
def test_an_index_is_of_one_folder_and_content(name: str, tmp_path: Path) -> None:
    data = DataConfig(name="image_list", root=".", cache=str(tmp_path))

    def index_of(folder: str, content: bytes = b"0.png,a") -> Path:
        return index_path(data, [write(tmp_path / folder, name, content)])

    first = index_of("first")
    assert index_of("first") == first
    assert index_of("second") != first, "the labels are the same, but the images may be others"
    assert index_of("first", b"0.png,b") != first, "equal size and time, as an archive restores them"
    (tmp_path / "link").symlink_to("first")
    assert index_of("link") == first


def test_the_sample_of_listed_images_is_bounded(tmp_path: Path) -> None:
    rows = "".join(f"{number}.png,a\n" for number in range(3000))
    write(tmp_path, "train.csv", f"path,target\n{rows}".encode())
    names = listed_images(DataConfig(name="image_list", root=str(tmp_path)))
    assert 128 <= len(names) <= 256 and names[0] == "0.png"
