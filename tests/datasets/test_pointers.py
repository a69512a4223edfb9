"""Files of a clone without Git LFS: small texts in place of the data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import UnidentifiedImageError

from hpc_train.errors import BadFileError
from hpc_train.experiment.config.training_sections import DataConfig
from hpc_train.experiment.data_facts.root_layout import why_not_read
from hpc_train.training.datasets.building import build_source
from hpc_train.training.datasets.decoding import read_image
from hpc_train.training.models.weight_files import read_weights

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"4d" * 32 + b"\nsize 12345\n"
ANNEX = b"/annex/objects/SHA256E-s12345--4d4d.bin\n"


@pytest.mark.parametrize("download", [True, False])
@pytest.mark.parametrize(
    ("data", "name", "args"),
    [
        ("text", "train.txt", {}),
        ("text", "val.txt", {}),
        ("tokens", "train.bin", {"tokenizer": "bytes"}),
        ("tokens", "train.txt", {"tokenizer": "bytes"}),
        ("tokens", "train/a.jsonl", {"tokenizer": "bytes"}),
        ("tokens", "tokenizer.json", {"tokenizer": "tokenizer.json"}),
        ("image_list", "train.csv", {}),
        ("image_list", "train.parquet", {"train": "train.parquet"}),
        ("coco", "train.json", {}),
        ("webdataset", "a.tar", {"train": "a.tar"}),
        ("huggingface", "a.arrow", {}),
    ],
)
def test_a_pointer_in_place_of_data_is_refused_with_the_command_that_fetches_it(
    data: str,
    name: str,
    args: dict[str, Any],
    download: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HPC_TRAIN_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    root = tmp_path / "data"
    (root / name).parent.mkdir(parents=True)
    (root / "train").mkdir(exist_ok=True)
    if name in ("val.txt", "tokenizer.json"):
        (root / "train.txt").write_text("to be or not " * 20)
    if data == "huggingface":
        (root / "state.json").write_text(json.dumps({"_data_files": [{"filename": name}]}))
    (root / name).write_bytes(POINTER)
    if "tokenizer" in args and args["tokenizer"].endswith(".json"):
        args = {"tokenizer": str(root / name)}
    config = DataConfig(name=data, root=str(root), args=args)
    if data == "webdataset":  # without an index ranks read no shard
        download = True
    with pytest.raises(BadFileError, match=f"{name} is a pointer file of Git.*`git lfs pull`"):
        build_source(config, download=download)


def test_a_pointer_in_place_of_an_image_or_of_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnidentifiedImageError, match="git lfs pull"):
        read_image(POINTER, 3, 0)
    for name in ("w.pt", "w.safetensors"):
        (tmp_path / name).write_bytes(POINTER)
        with pytest.raises(BadFileError, match="git lfs pull"):
            read_weights(str(tmp_path / name), "model.pretrained")


def test_only_whole_pointers_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "train.txt"
    for content, is_pointer in ((ANNEX, True), (POINTER, True), (POINTER * 20, False), (b"version 1", False)):
        path.write_bytes(content)
        assert (why_not_read(path) is not None) == is_pointer, content
    assert why_not_read(tmp_path / "none") is None
