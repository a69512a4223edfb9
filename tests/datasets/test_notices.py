"""Skipped files, conversions that lose information and masks of one class are reported once per data set."""

from __future__ import annotations

import ast
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import hpc_train
from hpc_train.experiment.config.training_sections import DataConfig
from hpc_train.training.datasets.building import build_source
from hpc_train.training.datasets.notices import batch_notices, data_notices
from hpc_train.training.datasets.types import DataInfo
from tests.datasets.sources.masks import png, save, write_folder

RAMP = (np.arange(64, dtype=np.uint16) * 4).reshape(8, 8)
COLORS = np.random.default_rng(0).integers(0, 256, (8, 8, 3), dtype=np.uint8)


def turned() -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = 6
    return exif


def write(path: Path, image: Image.Image, **options: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    image.save(path, **options)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for number in range(3):
        write(tmp_path / f"data/train/a/{number}.png", Image.fromarray(COLORS))
    return tmp_path / "data"


def notices(root: Path, name: str = "imagefolder", args: dict[str, Any] | None = None, **keys: Any) -> str:
    config = DataConfig(name=name, root=str(root), args=args or {}, **keys)
    return "\n".join(data_notices(build_source(config, download=True), config))


def test_nothing_is_reported_of_opaque_images_of_eight_bits(root: Path) -> None:
    write(root / "train/a/x.tif", Image.fromarray(COLORS).convert("LAB"))
    assert notices(root) == ""


@pytest.mark.parametrize(
    ("name", "image", "options", "words"),
    [
        ("x.png", Image.fromarray(RAMP), {}, "16 bits per pixel (values 0 to 252)"),
        (
            "x.tif",
            Image.frombytes("I;16B", (8, 8), RAMP.astype(">u2").tobytes()),
            {},
            "16 bits per pixel (values 0 to 252)",
        ),
        ("x.png", Image.fromarray(np.dstack([COLORS, COLORS[..., 0]])), {}, "transparent"),
        ("x.png", Image.fromarray(COLORS), {"exif": turned()}, "EXIF orientation"),
        ("x.jpg", Image.fromarray(COLORS), {"exif": turned()}, "EXIF orientation"),
        ("x.jpg", Image.fromarray(COLORS).convert("CMYK"), {}, "CMYK"),
        (
            "x.tif",
            Image.frombytes("RGBX", (8, 8), bytes(256)),
            {},
            "more than three bands, of which the first",
        ),
        (
            "x.tiff",
            Image.fromarray(COLORS),
            {"save_all": True, "append_images": [Image.fromarray(COLORS)]},
            "several frames",
        ),
    ],
)
def test_a_conversion_that_loses_information_is_counted(
    root: Path, name: str, image: Image.Image, options: dict[str, Any], words: str
) -> None:
    write(root / "train/a" / name, image, **options)
    said = notices(root)
    assert "1 of 4 inspected images" in said and words in said and name in said


def test_sixteen_bits_per_color_are_counted(root: Path) -> None:
    (root / "train/a/x.png").write_bytes(png([[0x1234, 0x5678, 0xFFFF]], 16, channels=3))
    assert "1 of 4 inspected images have 16 bits per color" in notices(root)


def test_values_outside_the_range_are_counted(root: Path) -> None:
    write(root / "train/a/x.png", Image.fromarray(RAMP))
    assert "1 of 4 inspected images have values of 0 to 252, which" in notices(root, value_range=(0, 251))
    assert "have values of 0 to 252, which" in notices(root, value_range=(1, 252))
    assert notices(root, value_range=(0, 252)) == ""


@pytest.mark.parametrize(
    ("spoil", "count"),
    [
        (lambda root: (root / "val").symlink_to("train"), 3),
        (lambda root: shutil.copytree(root / "train", root / "val"), 3),
        (lambda root: write(root / "val/a/1.png", Image.fromarray(COLORS[::-1])), 0),
        (lambda root: write(root / "val/a/new.png", Image.fromarray(COLORS)), 1),
    ],
    ids=["link", "copy", "other images of one name", "another name"],
)
def test_validation_images_that_are_training_images_are_counted(
    root: Path, spoil: Callable[[Path], object], count: int
) -> None:
    spoil(root)
    said = notices(root)
    assert ("inspected images are validation images that the training data contain too" in said) == (
        count > 0
    )
    assert not count or f"data: {count} of {3 + count} inspected" in said


def test_class_numbers_with_another_color_are_counted(tmp_path: Path) -> None:
    folder, colors = masks(tmp_path, 0, 1), [[0, 0, 0], [255, 0, 0]]
    args = {"num_classes": 2}
    for swapped in (False, True):
        for number in range(4):
            path = folder / f"train/masks/{number:03d}.png"
            order = slice(None, None, -1 if swapped and number % 2 else 1)
            with Image.open(path) as image:
                mask = Image.fromarray(np.asarray(image), "P")
            mask.putpalette(np.array(colors[order]).flatten().tolist())
            mask.save(path)
        said = notices(folder, "segmentation_folder", args)
        assert ("2 of 4 inspected images have masks in which a class number has another" in said) == swapped


def test_the_previews_in_a_jpeg_are_no_frames(root: Path) -> None:
    colors = Image.fromarray(COLORS)
    write(root / "train/a/x.jpg", colors, format="MPO", save_all=True, append_images=[colors])
    assert notices(root) == ""


def test_a_pack_has_the_notices_of_its_images(root: Path, tmp_path: Path) -> None:
    write(root / "train/a/x.png", Image.fromarray(RAMP))
    assert "16 bits per pixel" in notices(root, cache=str(tmp_path / "packs"))


def test_a_palette_with_transparency_is_reported_and_an_opaque_alpha_is_not(root: Path) -> None:
    opaque = np.dstack([COLORS, np.full((8, 8), 255, np.uint8)])
    write(root / "train/a/x.png", Image.fromarray(opaque))
    assert notices(root) == ""
    write(root / "train/a/y.png", Image.fromarray(COLORS).quantize(16), transparency=3)
    assert "transparent" in notices(root)


def test_what_a_listing_skips_is_counted(root: Path, tmp_path: Path) -> None:
    (tmp_path / "more").mkdir()
    (root / "train/a/more").symlink_to(tmp_path / "more")
    (root / "train/a/.hidden.png").touch()
    for name in ("1.gif", "2.gif", "3.npy"):
        (root / "train/a" / name).touch()
    write(root / "train/outside.png", Image.fromarray(COLORS))
    write(root / "train/__MACOSX/._0.png", Image.fromarray(COLORS), format="PNG")
    for split in ("val", "test"):
        write(root / split / "a/0.png", Image.fromarray(COLORS))
    said = notices(root)
    assert "1 links to folders" in said and "train/a/more" in said
    assert "2 hidden files" in said
    assert "3 files with other extensions (.gif 2, .npy 1; first: train/a/1.gif)" in said
    assert "1 files beside the class folders" in said and "train/outside.png" in said
    assert "the folders test in" in said


HALF = {"mean": [0.5] * 3, "std": [0.5] * 3}


@pytest.mark.parametrize(
    ("train", "val", "keys", "words"),
    [
        (
            torch.full((2, 3, 4, 4), 255.0),
            None,
            {},
            "images are floats of 255 to 255, and floats count as norm",
        ),
        (torch.full((2, 3, 4, 4), 2.5), torch.ones(2, 3, 4, 4), {}, None),
        (
            torch.ones(2, 3, 4, 4),
            torch.ones(2, 3, 4, 4, dtype=torch.uint8),
            {},
            "data: training images are floats of 1 to 1, which",
        ),
        (
            torch.ones(2, 3, 4, 4),
            torch.ones(2, 3, 4, 4, dtype=torch.uint8),
            {"normalize": {"mean": [0], "std": [1]}},
            None,
        ),
        (
            torch.ones(2, 3, 4, 4, dtype=torch.uint8),
            None,
            {},
            "bytes from 0 to 1, and bytes are divided by 255",
        ),
        (torch.full((2, 3, 4, 4), 2, dtype=torch.uint8), None, {}, None),
        (
            torch.rand(2, 3, 4, 4),
            None,
            {"normalize": HALF},
            "deviation are applied to bytes only",
        ),
        (
            torch.rand(2, 3, 4, 4),
            None,
            {"transform": "torchvision.transforms:ToTensor"},
            "applied to bytes only",
        ),
        (torch.rand(2, 3, 4, 4) - 0.5, None, {"normalize": HALF}, None),
        (torch.rand(2, 3, 4, 4), None, {"normalize": {"mean": [0.0] * 3, "std": [1.0] * 3}}, None),
        (torch.rand(2, 3, 4, 4), None, {}, None),
        (torch.rand(2, 8), None, {"normalize": HALF}, None),
        (torch.full((2, 300), 255.0), None, {}, None),
        ({"a": torch.full((2, 3, 4, 4), 255.0)}, None, {}, None),
    ],
)
def test_values_in_another_range_are_reported(
    train: Any, val: Any, keys: dict[str, Any], words: str | None
) -> None:
    batches: Any = [SimpleNamespace(inputs=inputs) for inputs in (train, val) if inputs is not None]
    info = DataInfo(10, 3, (0.5,) * 3, (0.5,) * 3)
    lines = list(batch_notices(batches, info, DataConfig.model_validate({"name": "digits"} | keys)))
    assert len(lines) == (words is not None)
    assert words is None or words in lines[0]


def masks(root: Path, *values: int) -> Path:
    write_folder(root, train=4)
    for number in range(4):
        mask = np.full((10, 14), values[0], np.uint8)
        mask[5:] = values[-1]
        save(root / f"train/masks/{number:03d}.png", mask)
    return root


def test_masks_of_0_and_255_are_reported(tmp_path: Path) -> None:
    folder = masks(tmp_path, 0, 255)
    said = notices(folder, "segmentation_folder", {"num_classes": 2})
    assert "only class 0 occurs in the 4 inspected masks, class 1 nowhere" in said
    assert "50% of their pixels are 255, which is ignored" in said and "mask_values: [0, 255]" in said
    assert notices(folder, "segmentation_folder", {"num_classes": 2, "mask_values": [0, 255]}) == ""


def test_masks_of_two_classes_are_not_reported(tmp_path: Path) -> None:
    assert notices(masks(tmp_path, 0, 1), "segmentation_folder", {"num_classes": 2}) == ""


def test_a_mask_that_is_turned_otherwise_than_its_image_is_reported(tmp_path: Path) -> None:
    folder = masks(tmp_path, 0, 1)
    mask = folder / "train/masks/002.png"
    Image.open(mask).save(mask, exif=turned())
    said = notices(folder, "segmentation_folder", {"num_classes": 2})
    assert "1 of 4 inspected images have another EXIF orientation than their masks" in said


def write_masks(root: Path, *, rare: int = 200) -> Path:
    """Write 40 training masks of classes 0 and 1, of which one has class ``rare``, and one of validation."""
    write_folder(root, num_classes=2, train=40, val=1)
    for path, value in ((root / "train/masks/007.png", rare), (root / "val/masks/000.png", 3)):
        with Image.open(path) as image:
            pixels = np.array(image)
        pixels[3, 3] = value
        save(path, pixels)
    return root


def mask_notices(root: Path, **more: Any) -> str:
    args = {"num_classes": 5, "class_names": ["road", "sky", "car", "pole", "dog"]}
    config = DataConfig(name="segmentation_folder", root=str(root), args=args)
    return "\n".join(data_notices(build_source(config), config, **more))


def test_classes_that_no_mask_has_are_named(tmp_path: Path) -> None:
    folder = write_masks(tmp_path, rare=2)
    absent = "car (2), pole (3), dog (4)"
    assert mask_notices(folder) == "", "of a sample, a rank does not report what is rare"
    said = mask_notices(folder, more_masks_s=1e-9)
    assert f"data: 3 of 5 classes occur in none of 32 of the 40 training masks: {absent}" in said
    assert "; validation masks have pole (3)" in said
    said = mask_notices(folder, more_masks_s=60)
    assert "data: 2 of 5 classes occur in none of the 40 training masks: pole (3), dog (4)" in said


def test_values_of_masks_that_are_no_class_are_named(tmp_path: Path) -> None:
    said = mask_notices(write_masks(tmp_path), more_masks_s=60)
    assert "1 of the 41 inspected masks have values that are neither classes (0 to 4) nor 255" in said
    assert "ignored: 200 (first: " in said and "train/masks/007.png); such masks can't be used" in said
    assert "data: 3 of 5 classes occur in none of the 40 training masks" in said


def test_a_mask_without_an_image_is_reported(tmp_path: Path) -> None:
    folder = masks(tmp_path, 0, 1)
    (folder / "train/images/003.png").unlink()
    said = notices(folder, "segmentation_folder", {"num_classes": 2})
    assert "1 masks without an image" in said and "003.png" in said


def test_pillow_opens_files_in_one_function_only() -> None:
    """It names its formats: for EPS, under any name of the file, Pillow starts Ghostscript."""
    package = Path(hpc_train.__file__).parent
    openers = set()
    for path in package.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in {"Image.open", "PIL.Image.open"}:
                assert any(keyword.arg == "formats" for keyword in node.keywords), f"{path}:{node.lineno}"
                openers.add(path.relative_to(package).as_posix())
            if isinstance(node, ast.ImportFrom) and node.module == "PIL.Image":
                assert "open" not in {name.name for name in node.names}, f"{path}:{node.lineno}"
    # The page of `report` reads the head of pictures that ranks have drawn.
    assert openers == {
        "training/datasets/images.py",
        "report/html/evaluation_files.py",
        "experiment/data_facts/survey/content.py",
        "experiment/data_facts/survey/looking.py",
    }
