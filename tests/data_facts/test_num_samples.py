"""Numbers of samples and bytes that follow from the file, without the data set."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hpc_train.experiment.config.training_sections import DataConfig
from hpc_train.experiment.data_facts import data_size
from hpc_train.experiment.data_facts.by_name import prefetched_bytes, training_samples
from hpc_train.training.datasets.sources.text import build
from tests.datasets.samples import experiment


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"name": "digits"}, 1438),
        ({"name": "synthetic"}, 1024),
        ({"name": "synthetic", "args": {"num_samples": 77}}, 77),
        ({"name": "torchvision/CIFAR10", "root": "nowhere"}, 50_000),
        ({"name": "torchvision/EMNIST", "root": "nowhere", "args": {"split": "letters"}}, None),
        ({"name": "imagefolder", "root": "nowhere"}, None),
        ({"name": "some.module:data"}, None),
        ({"name": "someones-plug-in"}, None),
    ],
)
def test_sizes_are_known_without_the_data(config: dict[str, Any], expected: int | None) -> None:
    assert training_samples(DataConfig(**config)) == expected


def _image_folder(root: Path) -> DataConfig:
    for name in ["train/a/1.jpg", "train/a/2.PNG", "train/b/deep/3.webp", "val/a/4.jpg"]:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    for ignored in ["train/a/notes.txt", "train/a/.hidden.jpg", "train/readme.jpg"]:
        (root / ignored).touch()
    return DataConfig(name="imagefolder", root=str(root))


def test_images_of_a_folder_are_counted(tmp_path: Path) -> None:
    assert training_samples(_image_folder(tmp_path)) == 3


def test_images_are_those_of_torchvision() -> None:
    from torchvision.datasets.folder import IMG_EXTENSIONS

    assert data_size.IMAGE_EXTENSIONS == IMG_EXTENSIONS


def test_a_folder_that_takes_too_long_is_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = _image_folder(tmp_path)
    monkeypatch.setattr(data_size, "COUNT_LIMIT_S", -1.0)
    assert training_samples(config) is None


@pytest.mark.slow
def test_the_data_sets_of_the_package_have_the_sizes_that_they_are_planned_with(tmp_path: Path) -> None:
    from PIL import Image

    from hpc_train.training.datasets.building import build_source

    _image_folder(tmp_path)
    for path in [*tmp_path.glob("*/**/*.jpg"), *tmp_path.glob("*/**/*.PNG"), *tmp_path.glob("*/**/*.webp")]:
        Image.new("RGB", (4, 4)).save(path)
    (tmp_path / "val" / "b").mkdir()
    Image.new("RGB", (4, 4)).save(tmp_path / "val" / "b" / "5.jpg")
    folder = DataConfig(name="imagefolder", root=str(tmp_path))
    for config in (DataConfig(name="digits"), DataConfig(name="synthetic"), folder):
        assert len(build_source(config).train) == training_samples(config)


ODD = "Größe: 8 €, 𝄞 and\r\n"


def config(root: Path, **args: Any) -> DataConfig:
    return DataConfig(name="text", root=str(root), args=args)


@pytest.mark.parametrize("read_bytes", [7, 1 << 22])
@pytest.mark.parametrize("tokens", ["characters", "bytes"])
@pytest.mark.parametrize("val_fraction", [None, 0, 0.5])
@pytest.mark.parametrize("length", [1, 3, 8])
def test_a_plan_counts_what_the_data_set_has(
    read_bytes: int,
    tokens: str,
    val_fraction: float | None,
    length: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Blocks of 7 bytes end within characters."""
    monkeypatch.setattr(data_size, "_READ_BYTES", read_bytes)
    file = tmp_path / "odd.txt"
    file.write_bytes((ODD * 5).encode())
    args = {"tokens": tokens, "sequence_length": length}
    data = config(file, **args) if val_fraction is None else config(file, **args, val_fraction=val_fraction)
    assert training_samples(data) == len(build("", data, download=False).train)


def test_of_a_folder_the_training_text_is_counted(tmp_path: Path) -> None:
    (tmp_path / "train.txt").write_text("a" * 101)
    (tmp_path / "val.txt").write_text("a" * 1000)
    assert training_samples(config(tmp_path, sequence_length=10)) == 10


def test_a_sequence_needs_the_token_behind_it(tmp_path: Path) -> None:
    (tmp_path / "train.txt").write_text("a" * 20)
    data = config(tmp_path, sequence_length=10)
    assert training_samples(data) == 1
    source = build("", data, download=False)
    _, targets = source.train.batch(torch.tensor([0]))  # type: ignore[attr-defined]
    assert targets.shape == (1, 10)


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("nowhere.txt", {}),
        ("short.txt", {"sequence_length": 100}),
        ("short.txt", {"sequence_length": 0}),
        ("short.txt", {"tokens": "words"}),
    ],
)
def test_what_is_not_known_is_left_to_the_data_set(name: str, args: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("a" * 50)
    assert training_samples(config(tmp_path / name, **args)) is None
    assert training_samples(DataConfig(name="text")) is None


def test_a_text_that_takes_too_long_is_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "long.txt"
    file.write_text("a" * 1000)
    monkeypatch.setattr(data_size, "COUNT_LIMIT_S", -1.0)
    assert training_samples(config(file)) is None
    assert training_samples(config(file, tokens="bytes")) == 7, "asked of the file system, which knows"


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"workers": 3, "image_size": 10}, 3 * 2 * 2 * 3 * 10 * 10),
        ({"workers": 3, "args": {"image_size": 10, "channels": 1}}, 3 * 2 * 2 * 10 * 10),
        ({"workers": 0}, 0),
        ({"workers": "auto"}, None),
        ({"workers": 1, "name": "imagefolder", "root": "/data"}, None),
        ({"workers": 1, "name": "package.module:factory"}, None),
    ],
)
def test_bytes_of_one_rank(keys: dict[str, Any], expected: int | None) -> None:
    assert prefetched_bytes(experiment(**keys)) == expected


def test_all_ranks_of_a_node_share_the_memory() -> None:
    one, eight = (prefetched_bytes(experiment(workers=2), ranks) for ranks in (1, 8))
    assert one is not None and eight == 8 * one
