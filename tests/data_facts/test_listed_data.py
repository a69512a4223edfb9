"""An index is named by the location and the content of the files that list the samples."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hpc_train.experiment.config.training_sections import DataConfig
from hpc_train.experiment.data_facts.listed_data import index_path, listed_images

LONG_AGO = 1_600_000_000


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
