from __future__ import annotations

import io
import warnings

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2 import functional as tvf

from hpc_train.errors import BadFileError
from hpc_train.training.datasets.images import as_tensor, centre_square, resize, stack
from tests.datasets.samples import random_images

PIXELS = np.arange(6 * 4 * 3, dtype=np.uint8).reshape(6, 4, 3)


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "YCbCr", "I;16"])
@pytest.mark.parametrize("channels", [1, 3])
def test_every_pil_mode_becomes_the_channels_asked_for(mode: str, channels: int) -> None:
    if mode == "I;16":
        image = Image.fromarray(np.arange(24, dtype=np.uint16).reshape(6, 4) * 2700)
    else:
        image = Image.fromarray(PIXELS).convert(mode)
    tensor = as_tensor(image, channels)
    assert tensor.shape == (channels, 6, 4)
    assert tensor.dtype == torch.uint8


def test_rgb_pixels_are_kept() -> None:
    assert torch.equal(as_tensor(Image.fromarray(PIXELS), 3), torch.from_numpy(PIXELS).permute(2, 0, 1))
    assert torch.equal(as_tensor(PIXELS, 3), torch.from_numpy(PIXELS).permute(2, 0, 1))


def test_views_of_arrays_are_read_as_they_look() -> None:
    frozen = PIXELS[::-1, ::-1]
    frozen.flags.writeable = False
    assert torch.equal(as_tensor(frozen), torch.from_numpy(PIXELS).permute(2, 0, 1).flip(1, 2))


def test_sixteen_bits_keep_their_upper_eight() -> None:
    image = Image.fromarray(np.array([[0, 256, 65535]], dtype=np.uint16))
    assert as_tensor(image, 1).tolist() == [[[0, 1, 255]]]


def thirty_two_bits(file_format: str | None = None) -> Image.Image:
    image = Image.fromarray(np.array([[0, 256, 65535]], dtype=np.int32))
    image.format = file_format  # as Image.open leaves it
    return image


def test_files_of_sixteen_bits_may_be_opened_as_thirty_two() -> None:
    pgm = Image.open(io.BytesIO(b"P5 3 1 65535\n" + bytes([0, 0, 1, 0, 255, 255])))
    for image in (pgm, thirty_two_bits("PNG")):
        assert image.mode == "I" and as_tensor(image, 1).tolist() == [[[0, 1, 255]]]


@pytest.mark.parametrize("image", [thirty_two_bits(), thirty_two_bits("TIFF"), Image.new("F", (3, 1))])
def test_images_without_a_defined_range_are_refused(image: Image.Image) -> None:
    with pytest.raises(BadFileError, match=rf"^data: a .* \(PIL mode {image.mode}\) has no .*; store 8"):
        as_tensor(image, 1)


def test_a_palette_with_transparency_does_not_warn() -> None:
    image = Image.fromarray(PIXELS).convert("P")
    image.info["transparency"] = bytes(range(256))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert as_tensor(image, 3).shape == (3, 6, 4)


def test_gray_repeats_and_alpha_is_dropped() -> None:
    gray, colour = random_images(1, 1)[0], random_images(1, 4)[0]
    assert torch.equal(as_tensor(gray, 3), gray.expand(3, -1, -1))
    assert torch.equal(as_tensor(colour, 3), colour[:3])
    assert as_tensor(gray[0]).shape == (1, 12, 12)


def test_float_images_pass_unchanged() -> None:
    image = torch.randn(3, 5, 5)
    assert as_tensor(image, 3) is image
    array = np.random.default_rng(0).normal(size=(5, 6, 3))
    assert torch.equal(as_tensor(array), torch.from_numpy(array).permute(2, 0, 1))


@pytest.mark.parametrize(
    "image",
    ["a word", torch.zeros(3, 4, 4, dtype=torch.int64), torch.zeros(4, dtype=torch.uint8), torch.zeros(())],
)
def test_what_is_not_an_image_is_refused(image: object) -> None:
    with pytest.raises(BadFileError, match=r"data: a sample is .*an image must be PIL"):
        as_tensor(image)  # type: ignore[arg-type]


def test_five_channels_do_not_become_three() -> None:
    with pytest.raises(BadFileError, match="has 5 channels, not 3"):
        as_tensor(torch.zeros(5, 4, 4), 3)


@pytest.mark.parametrize(
    ("side", "ratio", "resized"),
    [(28, 0.875, 32), (224, 0.9, 248), (224, 224 / 232, 232), (299, 0.875, 341), (299, 299 / 342, 342)],
    ids=["ImageNet", "timm's BEiT", "torchvision's ResNet", "timm's Inception", "torchvision's Inception"],
)
def test_evaluation_crop_equals_a_resize_and_centre_crop(side: int, ratio: float, resized: int) -> None:
    image = random_images(1, 3, side + 12, side + 28)[0]
    expected = tvf.center_crop(tvf.resize(image, [resized], antialias=True), [side, side])
    assert torch.equal(centre_square(image, side, ratio), expected)


@pytest.mark.parametrize(("height", "width"), [(3, 50), (50, 3), (8, 8), (9, 8), (1, 1)])
def test_a_square_comes_of_any_shape(height: int, width: int) -> None:
    assert centre_square(random_images(1, 3, height, width)[0], 8, 0.875).shape == (3, 8, 8)


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
@pytest.mark.parametrize("sides", [(20, 24), (80, 33)])
def test_resizing_is_torchvisions(interpolation: str, dtype: torch.dtype, sides: tuple[int, int]) -> None:
    part = random_images(1, 3, 48, 64)[0].to(dtype)[:, 5:40, 3:50]
    expected = tvf.resize(part, list(sides), InterpolationMode(interpolation), antialias=True)
    for image in (part, part.permute(1, 2, 0).contiguous().permute(2, 0, 1)):
        assert torch.equal(resize(image, *sides, interpolation), expected)


def test_decoded_images_are_stacked_in_their_own_layout() -> None:
    images = random_images(4)
    decoded = [image.permute(1, 2, 0).contiguous().permute(2, 0, 1) for image in images]
    stacked = stack(decoded)
    assert torch.equal(stacked, images)
    assert stacked.is_contiguous(memory_format=torch.channels_last)
    assert stack(list(images)).is_contiguous()
