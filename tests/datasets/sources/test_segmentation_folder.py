from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from hpc_train.errors import BadFileError
from hpc_train.experiment.config.training_sections import DataConfig
from hpc_train.experiment.data_facts.by_name import data_facts
from hpc_train.training.datasets.base import DataSource
from hpc_train.training.datasets.batches import evaluation_batches
from hpc_train.training.datasets.building import build_source
from hpc_train.training.datasets.images import PixelRules
from hpc_train.training.datasets.sources.segmentation_folder import read_mask
from hpc_train.training.tasks.segmentation import Segmentation
from tests.datasets.samples import CPU, experiment
from tests.datasets.sources.masks import png, save, write_folder


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "scenes", train=5, val=3)


def config(root: Path, **args: Any) -> DataConfig:
    return DataConfig(name="segmentation_folder", root=str(root), args={"num_classes": 3} | args)


def build(root: Path, **args: Any) -> DataSource:
    return build_source(config(root, **args))


def read(source: DataSource) -> list[Any]:
    """Read the validation data as ranks do."""
    assert source.val is not None
    task = Segmentation(experiment(micro_batch_size=1), source.info)
    return list(
        evaluation_batches(source.val, experiment(micro_batch_size=1), 0, 1, CPU, None, task.target_spec)
    )


def test_images_and_masks_come_in_pairs_in_the_order_of_their_names(root: Path) -> None:
    source = build(root, class_names=["road", "car", "sky"])
    assert (source.info.num_classes, source.info.ignore_index, source.info.channels) == (3, 255, 3)
    assert source.info.class_names == ("road", "car", "sky")
    assert len(source.train) == 5
    for number, batch in enumerate(read(source)):
        with Image.open(root / f"val/images/{number:03d}.png") as image:
            assert torch.equal(batch.inputs[0].permute(1, 2, 0), torch.from_numpy(np.array(image)))
        with Image.open(root / f"val/masks/{number:03d}.png") as mask:
            assert torch.equal(batch.targets[0], torch.from_numpy(np.array(mask)))
    assert number == 2


def test_val_comes_before_test_and_neither_means_no_evaluation(root: Path) -> None:
    (root / "val").rename(root / "test")
    assert len(build(root).val or []) == 3
    write_folder(root, val=2)
    assert len(build(root).val or []) == 2
    (root / "test").rename(root / "more")
    (root / "val").rename(root / "others")
    assert build(root).val is None


def test_palette_and_16_bit_masks_are_class_numbers(root: Path) -> None:
    numbers = np.full((10, 14), 2, dtype=np.uint8)
    palette = Image.fromarray(numbers, mode="L").convert("P")
    palette.putdata(numbers.flatten().tolist())
    palette.save(root / "val/masks/000.png")
    save(root / "val/masks/001.png", numbers.astype(np.uint16))
    first, second, _ = read(build(root))
    assert (first.targets == 2).all() and (second.targets == 2).all()


@pytest.mark.parametrize(
    ("pixels", "message"),
    [
        (np.full((10, 14), 3, np.uint8), r"images/001.png\) has the target .*values 3 to 3.*most 2"),
        (np.zeros((9, 14), np.uint8), r"001.png\) has .* 9x14 pixels, and its image has 10x14; make both"),
        (np.zeros((10, 14, 3), np.uint8), r"mask .*masks/001.png has colors \(mode RGB\); save one class"),
    ],
    ids=["class", "size", "colors"],
)
def test_a_wrong_mask_names_its_file(root: Path, pixels: np.ndarray, message: str) -> None:
    save(root / "val/masks/001.png", pixels)
    with pytest.raises(BadFileError, match=message):
        read(build(root))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda r: (r / "train/masks/003.png").unlink(), r"1 images have no mask: .*masks/003.png not found"),
        (
            lambda r: shutil.copy(r / "train/images/000.png", r / "train/images/000.jpg"),
            r"have the name of the mask .*/masks/000\.png .*; remove all but",
        ),
        (lambda r: move(r, "train/images"), r"no folder .*/train/images on this machine; the files must be"),
        (lambda r: move(r, "val/masks"), r"there is no folder .*/val/masks"),
        (lambda r: move(r, "train"), r"there is no folder .*/train/images"),
        (
            lambda r: [move(r, "train/images"), (r / "train/images").mkdir()],
            r"train/images contains no images; put some there",
        ),
    ],
    ids=["no mask", "two images", "no images", "no masks", "no split", "empty"],
)
def test_files_that_are_missing_or_do_not_fit_are_found_before_the_first_step(
    root: Path, spoil: Callable[[Path], object], message: str
) -> None:
    spoil(root)
    with pytest.raises(BadFileError, match=message):
        build(root)


def move(root: Path, folder: str) -> None:
    (root / folder).rename(root / "elsewhere")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"class_names": ["a"]}, r"class_names: 1 names for 3 classes; write one per class"),
        (
            {"ignore_index": 2},
            r"ignore_index: 2 is one of the 3 classes; write .* from 3 on, .* data\.args\.ma",
        ),
        ({"num_classes": 0}, r"^data\.args\.num_classes: needs a whole number of 1 to 255, got 0; write"),
        ({"num_classes": 256}, r"^data\.args\.num_classes: needs a whole number of 1 to 255, got 256"),
        ({"ignored": 2}, r"data\.args\.ignored: .* no argument .*; did you mean 'ignore_index'\?"),
    ],
)
def test_wrong_arguments_are_refused(root: Path, args: dict[str, Any], message: str) -> None:
    with pytest.raises(BadFileError, match=message):
        build(root, **args)


def test_the_login_node_counts_images_and_not_masks(root: Path, tmp_path: Path) -> None:
    facts = data_facts("segmentation_folder")
    (root / "train/images/deeper").mkdir()
    (root / "train/images/000.png").rename(root / "train/images/deeper/000.png")
    assert facts.num_samples(config(root)) == 5
    assert facts.num_samples(config(tmp_path / "nowhere")) is None
    assert facts.target == "mask" and facts.is_in_root


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_gray_masks_of_fewer_bits_are_the_numbers_that_they_store(tmp_path: Path, bits: int) -> None:
    numbers = [[0, 1, 1, 0, 1], [1, 0, 0, 1, 2 if bits > 1 else 1]]
    (tmp_path / "mask.png").write_bytes(png(numbers, bits))
    assert read_mask(str(tmp_path / "mask.png")).tolist() == numbers


def test_a_mask_is_turned_as_its_own_orientation_says(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # its first row becomes the last column
    Image.fromarray(np.array([[1, 2, 3], [4, 5, 6]], dtype=np.uint8)).save(tmp_path / "mask.png", exif=exif)
    assert read_mask(str(tmp_path / "mask.png")).tolist() == [[1, 2, 3], [4, 5, 6]]
    turned = read_mask(str(tmp_path / "mask.png"), PixelRules(applies_orientation=True))
    assert turned.tolist() == [[4, 1], [5, 2], [6, 3]]


def test_a_mask_of_changed_values_is_refused(root: Path) -> None:
    mask = root / "val/masks/001.png"
    Image.fromarray(np.ones((10, 14), dtype=np.uint8)).save(mask, "JPEG")
    with pytest.raises(
        BadFileError, match=r"mask .*001\.png is JPEG, whose compression changes class numbers"
    ):
        read(build(root))


def test_mask_values_are_classes_in_their_order(root: Path) -> None:
    mask = np.array([[0, 255], [7, 0]], dtype=np.uint8)
    for split, count in (("train", 5), ("val", 3)):
        for number in range(count):
            save(root / f"{split}/masks/{number:03d}.png", mask)
            save(root / f"{split}/images/{number:03d}.png", np.zeros((2, 2, 3), dtype=np.uint8))
    first, *_ = read(build(root, num_classes=2, mask_values=[255, 0], ignore_index=7))
    assert first.targets[0].tolist() == [[1, 0], [7, 1]]
    first, *_ = read(build(root, num_classes=2, mask_values=[7, 255], ignore_index=0))
    assert first.targets[0].tolist() == [[255, 1], [0, 255]]
    with pytest.raises(BadFileError, match=r"ignore_index: 7 is one of data\.args\.mask_values"):
        build(root, num_classes=2, mask_values=[7, 255], ignore_index=7)
    with pytest.raises(BadFileError, match=r"000\.png has the value 7, .*mask_values"):
        read(build(root, num_classes=2, mask_values=[255, 0]))
    with pytest.raises(BadFileError, match=r"mask_values: 1 different values for 2 classes"):
        build(root, num_classes=2, mask_values=[255, 255])


def test_a_mask_of_the_turned_image_needs_its_orientation(root: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.fromarray(np.zeros((14, 10, 3), dtype=np.uint8)).save(root / "val/images/000.png", exif=exif)
    with pytest.raises(BadFileError, match=r"data\.exif_orientation: apply"):
        read(build(root))
    source = build_source(config(root).model_copy(update={"exif_orientation": "apply"}))
    given = experiment(micro_batch_size=1)
    given = given.model_copy(update={"data": given.data.model_copy(update={"exif_orientation": "apply"})})
    spec = Segmentation(given, source.info).target_spec
    assert source.val is not None
    first, *_ = evaluation_batches(source.val, given, 0, 1, CPU, None, spec)
    assert first.inputs.shape[-2:] == first.targets.shape[-2:] == (10, 14)
