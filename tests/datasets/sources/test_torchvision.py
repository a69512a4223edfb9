from __future__ import annotations

import ast
import importlib
import io
import pickle
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torchvision.datasets
from PIL import Image, UnidentifiedImageError
from torchvision.datasets.folder import pil_loader

from hpc_train.errors import BadFileError
from hpc_train.experiment.config.training_sections import DataConfig
from hpc_train.training.datasets.base import TensorSplit
from hpc_train.training.datasets.building import build_source
from hpc_train.training.datasets.images import open_lazily
from tests.datasets.sources.masks import save

importlib.import_module("hpc_train.training.datasets.sources.torchvision")  # as for any of its data sets


def build(name: str, root: Path | None, **args: object):
    return build_source(
        DataConfig(name=f"torchvision/{name}", root=None if root is None else str(root), args=args)
    )


@pytest.fixture
def cifar10(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Files in CIFAR-10's own format, 4 images each; their checksums are not CIFAR-10's."""
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    rng = np.random.default_rng(0)
    for name in [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]:
        data = rng.integers(0, 256, (4, 3072), dtype=np.uint8)
        (folder / name).write_bytes(pickle.dumps({"data": data, "labels": [1, 2, 3, 9]}))
    (folder / "batches.meta").write_bytes(pickle.dumps({"label_names": [f"class {i}" for i in range(10)]}))
    monkeypatch.setattr(
        "torchvision.datasets.cifar.check_integrity", lambda path, md5=None: Path(path).is_file()
    )
    return tmp_path


def test_cifar_is_in_memory_with_the_pixels_of_torchvision(cifar10: Path) -> None:
    source = build("CIFAR10", cifar10)
    theirs = torchvision.datasets.CIFAR10(str(cifar10), train=True)
    assert isinstance(source.train, TensorSplit)
    assert isinstance(source.val, TensorSplit)
    assert (len(source.train), len(source.val)) == (20, 4)
    for index in range(20):
        image, target = theirs[index]
        assert torch.equal(source.train.images[index], torch.from_numpy(np.array(image)).permute(2, 0, 1))
        assert int(source.train.targets[index]) == target
    assert source.info.num_classes == 10
    assert source.info.mean[0] == 0.4914
    assert source.info.class_names[3] == "class 3"


@pytest.mark.parametrize(
    "name",
    ["CIFAR10", "MNIST", "SVHN", "Food101", "Flowers102", "ImageNet", "STL10", "Cityscapes",
     "VOCSegmentation"],
)  # fmt: skip
def test_missing_data_name_the_command_that_fetches_them(name: str, tmp_path: Path) -> None:
    with pytest.raises(BadFileError, match=rf"^data\.root: torchvision/{name} is not in .*; (run|put)"):
        build(name, tmp_path)
    assert list(tmp_path.iterdir()) == []


class Splits(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """A class of torchvision's kind: ``split=``, samples made one by one."""

    valid = ("train", "test")

    def __init__(self, root: str, split: str = "train", size: int = 4, download: bool = False) -> None:
        if split not in self.valid:
            raise ValueError(f"Unknown value '{split}' for argument split. Valid values are {self.valid}.")
        if size < 1:
            raise ValueError("size must be positive")
        if download:
            (Path(root) / "fetched").touch()
        self.split, self.size = split, size
        self._labels = [i % 3 for i in range(len(self))]

    def __len__(self) -> int:
        return 6 if self.split == "train" else 3

    def __getitem__(self, index: int) -> tuple[Any, int]:
        if index >= len(self):
            raise IndexError
        return Image.new("RGB", (self.size, self.size), (index, 0, 0)), self._labels[index]


@pytest.fixture
def splits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torchvision.datasets, "Splits", Splits, raising=False)


@pytest.mark.usefixtures("splits")
def test_a_class_with_splits_gives_train_and_test(tmp_path: Path) -> None:
    source = build("Splits", tmp_path, size=5)
    assert source.val is not None
    assert (len(source.train), len(source.val)) == (6, 3)
    assert source.train[2][0].shape == (3, 5, 5)  # type: ignore[union-attr]
    assert source.info.num_classes == 3
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("splits")
def test_data_are_downloaded_on_request(tmp_path: Path) -> None:
    build_source(DataConfig(name="torchvision/Splits", root=str(tmp_path / "new")), download=True)
    assert (tmp_path / "new" / "fetched").exists()


@pytest.mark.usefixtures("splits")
@pytest.mark.parametrize(
    ("args", "words"),
    [
        ({"sise": 3}, r"^data\.args: torchvision/Splits can't be called with these arguments: .*'sise'"),
        ({"size": 0}, r"^data\.args: .* size must be"),
    ],
)
def test_arguments_that_do_not_fit_are_named(args: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(BadFileError, match=words):
        build("Splits", tmp_path, **args)


def test_an_array_of_something_else_is_not_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Turned(Splits):
        def __init__(self, root: str, split: str = "train") -> None:
            super().__init__(root, split)
            self.data = np.ones((len(self), 4, 4, 3), dtype=np.uint8)

    monkeypatch.setattr(torchvision.datasets, "Turned", Turned, raising=False)
    assert not isinstance(build("Turned", tmp_path).train, TensorSplit)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("CIFAR1O", r"^data\.name: .* has no data set for this 'CIFAR1O'; did you mean .*/CIFAR10\?"),
        ("folder", r"^data\.name: torchvision has no data set for this 'folder'"),
        ("FakeData", r"^data\.name: torchvision/FakeData does not separate training from validation"),
    ],
)
def test_names_that_are_no_data_sets_are_refused(name: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(BadFileError, match=words):
        build(name, tmp_path)


def test_a_missing_root_is_named() -> None:
    words = r"^data\.root: is missing, and torchvision/CIFAR10 needs it; .* data/cifar10$"
    with pytest.raises(BadFileError, match=words):
        build_source(DataConfig(name="torchvision/CIFAR10"))


def write_cityscapes(root: Path) -> np.ndarray:
    """Write an image per split; the mask has every number of Cityscapes' files."""
    numbers = np.arange(34, dtype=np.uint8).reshape(2, 17)
    for split, city in (("train", "aachen"), ("val", "lindau")):
        name = f"{city}_000000_000019"
        save(
            root / "leftImg8bit" / split / city / f"{name}_leftImg8bit.png", np.full((2, 17, 3), 9, np.uint8)
        )
        save(root / "gtFine" / split / city / f"{name}_gtFine_labelIds.png", numbers)
    return numbers


def test_cityscapes_has_the_evaluated_classes(tmp_path: Path) -> None:
    numbers = write_cityscapes(tmp_path)
    source = build("Cityscapes", tmp_path)
    content, mask = source.train.file_content(0)
    assert Image.open(io.BytesIO(content)).size == (17, 2) and len(source.val) == 1
    by_number = dict(zip(numbers.flatten().tolist(), mask.flatten().tolist(), strict=True))
    known = {each.id: each for each in torchvision.datasets.Cityscapes.classes}
    for number, found in by_number.items():
        assert found == (255 if known[number].ignore_in_eval else known[number].train_id)
    assert source.info.num_classes == len(source.info.class_names) == 19
    assert [source.info.class_names[number] for number in (0, 13, 18)] == ["road", "car", "bicycle"]
    assert source.train.path(0).name == "aachen_000000_000019_leftImg8bit.png"


def test_voc_has_the_numbers_of_its_palette(tmp_path: Path) -> None:
    folder = tmp_path / "VOCdevkit" / "VOC2012"
    for split in ("train", "val"):
        save(folder / "JPEGImages" / f"{split}.jpg", np.full((4, 6, 3), 50, np.uint8))
        mask = Image.fromarray(np.array([[0, 15, 255], [1, 2, 20]], np.uint8))
        mask.putpalette(list(range(256)) * 3)
        (folder / "SegmentationClass").mkdir(exist_ok=True)
        mask.save(folder / "SegmentationClass" / f"{split}.png")
        (folder / "ImageSets" / "Segmentation").mkdir(parents=True, exist_ok=True)
        (folder / "ImageSets" / "Segmentation" / f"{split}.txt").write_text(f"{split}\n")
    source = build("VOCSegmentation", tmp_path)
    _, mask = source.val.file_content(0)
    assert mask.tolist() == [[0, 15, 255], [1, 2, 20]] and source.val.path(0).name == "val.jpg"
    assert source.info.class_names[15] == "person" and source.info.ignore_index == 255


def test_no_file_makes_pillow_start_a_program(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """torchvision opens images itself, and Pillow tells EPS by content, not by name."""
    started: list[object] = []
    for name in ("check_call", "run", "Popen"):
        monkeypatch.setattr(subprocess, name, lambda *args, **_: started.append(args))
    path = tmp_path / "0.png"
    path.write_text("%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\nshowpage\n%%EOF\n")
    with pytest.raises(UnidentifiedImageError):
        pil_loader(str(path))
    with Image.open(path) as image, pytest.raises(OSError, match="Ghostscript"):
        image.load()
    assert not started


def test_torchvision_opens_the_stated_formats_only(tmp_path: Path) -> None:
    image = Image.new("RGB", (16, 16), (10, 20, 30))
    for folder, form in (("bad", "ICO"), ("good", "TIFF")):
        (tmp_path / folder / "a").mkdir(parents=True)
        image.save(tmp_path / folder / "a/0.png", form)
    good, _ = torchvision.datasets.ImageFolder(str(tmp_path / "good"))[0]
    assert isinstance(good, Image.Image) and good.getpixel((0, 0)) == (10, 20, 30)
    with pytest.raises(UnidentifiedImageError, match="cannot identify"):
        torchvision.datasets.ImageFolder(str(tmp_path / "bad"))[0]


def test_no_module_of_torchvision_has_pillows_own_open() -> None:
    """A new version may import it under another name."""
    folder = Path(torchvision.datasets.__file__).parent
    opened = 0
    for path in folder.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("Image.open"):
                module = importlib.import_module(f"torchvision.datasets.{path.stem}")
                assert eval(ast.unparse(node.func), vars(module)) is open_lazily, f"{path.name}:{node.lineno}"
                opened += 1
    assert opened > 10
