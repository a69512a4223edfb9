from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hpc_train.experiment.config.training_sections import DataConfig
from hpc_train.experiment.data_facts import data_size
from hpc_train.experiment.data_facts.by_name import training_samples


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


def test_a_folder_that_takes_too_long_to_count_is_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
