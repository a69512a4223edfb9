"""Every kind of file has Pillow's pixels, whichever library decodes it."""

from __future__ import annotations

import io
import subprocess
from typing import Any

import numpy as np
import pytest
import simplejpeg
import torch
from PIL import Image, ImageOps, UnidentifiedImageError

from hpc_train.errors import BadFileError
from hpc_train.training.datasets.decoding import (
    EncodedImage,
    UndecodableError,
    decode,
    has_sixteen_bit_colors,
    read_image,
)
from hpc_train.training.datasets.images import PixelRules, as_tensor, resize
from tests.datasets.sources.masks import png

#: Smooth and odd-sized, so that upsampled chroma and incomplete blocks count.
PIXELS = np.asarray(
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (5, 7, 3), dtype=np.uint8)).resize((53, 37))
)


def encoded(image: Image.Image, form: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def content(form: str = "JPEG", mode: str = "RGB", **options: Any) -> bytes:
    return encoded(Image.fromarray(PIXELS).convert(mode), form, **options)


def by_pillow(data: bytes, channels: int) -> torch.Tensor:
    return as_tensor(Image.open(io.BytesIO(data)), channels)


def _rotated() -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = 6  # orientation
    return exif


FILES = {
    "4:2:0": content(),
    "4:2:2": content(subsampling=1),
    "4:4:4": content(subsampling=0),
    "progressive": content(progressive=True),
    "restart markers": content(restart_marker_blocks=3),
    "RGB in JPEG": content(keep_rgb=True),
    "gray": content(mode="L"),
    "CMYK": content(mode="CMYK"),
    "EXIF orientation": content(exif=_rotated()),
    "PNG": content("PNG"),
    "PNG with alpha": content("PNG", "RGBA"),
    "GIF": content("GIF"),
    "WebP": content("WEBP"),
    "JPEG with bytes after its end": content() + b"more",
    "JPEG with zeros after its end": content() + bytes(100),
}


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("name", FILES)
def test_pixels_are_those_of_pillow(name: str, channels: int) -> None:
    decoded = decode(FILES[name], channels)
    assert decoded.dtype == torch.uint8
    assert torch.equal(decoded, by_pillow(FILES[name], channels))


def test_ordinary_jpeg_is_not_left_to_pillow(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = by_pillow(FILES["4:2:0"], 3)
    monkeypatch.setattr(Image, "open", lambda *_: pytest.fail("Pillow was asked"))
    assert torch.equal(decode(FILES["4:2:0"], 3), expected)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("form", ["JPEG", "PNG"])
def test_a_truncated_file_has_pillows_error(form: str, channels: int) -> None:
    with pytest.raises(OSError, match="truncated"):
        decode(content(form)[:-40], channels)
    if form == "JPEG":
        with pytest.raises(OSError, match="not written to its end"):
            decode(content(form)[:-100] + bytes(100), channels)


@pytest.mark.parametrize("data", [b"", b"\xff\xd8", b"\xff\xd8\xff", b"text"])
def test_what_is_no_image_is_refused(data: bytes) -> None:
    with pytest.raises(OSError, match="cannot identify the image format"):
        decode(data, 3)


LARGE = Image.fromarray(PIXELS).resize((640, 480), Image.Resampling.BICUBIC)


def large() -> bytes:
    return encoded(LARGE, "JPEG")


def expected_part(data: bytes, box: tuple[int, int, int, int], to: tuple[int, int]) -> torch.Tensor:
    top, left, height, width = box
    return resize(by_pillow(data, 3)[:, top : top + height, left : left + width], *to)


def resized_part(data: bytes, box: tuple[int, int, int, int], to: tuple[int, int]) -> torch.Tensor:
    image = read_image(data, 3, 0)
    assert isinstance(image, EncodedImage)
    return image.resized_part(box[:2], box[2:], to, "bilinear")


@pytest.mark.parametrize("box", [(33, 101, 200, 255), (0, 0, 480, 640), (479, 639, 1, 1)])
def test_a_part_of_less_than_twice_its_new_sides_has_pillows_pixels(box: tuple[int, int, int, int]) -> None:
    to = box[2] // 2 + 1, box[3]
    assert torch.equal(resized_part(large(), box, to), expected_part(large(), box, to))


@pytest.mark.parametrize(
    ("to", "decoded_sides"),
    [((240, 320), (240, 320)), ((240, 321), (480, 640)), ((61, 80), (120, 160)), ((60, 80), (60, 80))],
)
def test_a_jpeg_is_decoded_no_smaller_than_its_part_becomes(
    monkeypatch: pytest.MonkeyPatch, to: tuple[int, int], decoded_sides: tuple[int, int]
) -> None:
    decoded: list[tuple[int, ...]] = []
    decode_jpeg = simplejpeg.decode_jpeg

    def spied(*args: Any) -> Any:
        pixels = decode_jpeg(*args)
        decoded.append(pixels.shape[:2])
        return pixels

    monkeypatch.setattr(simplejpeg, "decode_jpeg", spied)
    part = resized_part(large(), (0, 0, 480, 640), to)
    assert decoded == [decoded_sides]
    assert part.shape == (3, *to)


@pytest.mark.parametrize("box", [(40, 80, 400, 480), (3, 5, 477, 635), (101, 203, 161, 161)])
def test_a_part_of_a_reduced_image_is_at_most_one_of_its_pixels_off(box: tuple[int, int, int, int]) -> None:
    rows, columns = np.mgrid[:480, :640]
    slope = 0.39
    ramps = np.stack([rows * slope, columns * slope, (rows + columns) * slope / 2], axis=2)
    data = encoded(Image.fromarray(ramps.astype(np.uint8)), "JPEG", quality=95)
    ours, theirs = resized_part(data, box, (40, 40)), expected_part(data, box, (40, 40))
    assert (ours.double() - theirs.double()).abs().max() <= 8 * slope + 1  # 1: rounding


def test_a_damaged_jpeg_is_undecodable_and_says_why() -> None:
    image = read_image(large()[:-400], 3, index=7)
    assert isinstance(image, EncodedImage)
    for read in (image.decode, lambda: image.resized_part((0, 0), (480, 640), (60, 60), "bilinear")):
        with pytest.raises(UndecodableError) as raised:
            read()
        assert raised.value.index == 7
        assert "truncated" in str(raised.value.__cause__)


@pytest.mark.parametrize("channels", [1, 3])
def test_postscript_is_no_image_and_starts_no_program(channels: int, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Any] = []
    monkeypatch.setattr(subprocess, "check_call", lambda *args, **options: started.append(args))
    postscript = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 32 32\n%%EndComments\nshowpage\n%%EOF\n"
    with pytest.raises(UnidentifiedImageError):
        decode(postscript, channels)
    assert not started


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("form", ["JPEG", "PNG"])
def test_orientation_is_applied_as_by_pillow(form: str, orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = content(form, exif=exif)
    turned = as_tensor(ImageOps.exif_transpose(Image.open(io.BytesIO(data))), 3)
    assert torch.equal(decode(data, 3, PixelRules(applies_orientation=True)), turned)
    assert torch.equal(decode(data, 3), by_pillow(data, 3))


def test_value_range_scales_and_clips_gray_values_of_16_bits() -> None:
    data = encoded(Image.fromarray(np.array([[0, 100, 2047, 4095, 60000]], dtype=np.uint16)), "PNG")
    found = decode(data, 1, PixelRules(value_range=(100, 4095)))
    assert found.flatten().tolist() == [0, 0, 124, 255, 255]
    assert decode(data, 1).flatten().tolist() == [0, 0, 7, 15, 234]


def test_value_range_scales_floats() -> None:
    data = encoded(Image.fromarray(np.array([[-1.0, 0.0, 0.5, 2.0]], dtype=np.float32)), "TIFF")
    assert decode(data, 1, PixelRules(value_range=(0, 1))).flatten().tolist() == [0, 0, 128, 255]
    with pytest.raises(BadFileError, match="value_range"):
        decode(data, 1)
    data = encoded(Image.fromarray(np.array([[0.5, np.nan]], dtype=np.float32)), "TIFF")
    with pytest.raises(BadFileError, match="pixels that are NaN"):
        decode(data, 1, PixelRules(value_range=(0, 1)))


def portable(kind: bytes, maximum: int, *values: int) -> bytes:
    """Return a PGM (``P5``) or PPM (``P6``) file of one row, which states its maximum."""
    width = len(values) // (3 if kind == b"P6" else 1)
    return (
        b"%s %d 1 %d\n" % (kind, width, maximum)
        + np.array(values, ">u2" if maximum > 255 else "u1").tobytes()
    )


@pytest.mark.parametrize("value_range", [None, (0.0, 100.0)])
def test_a_pgm_file_is_scaled_by_the_maximum_that_it_states(value_range: tuple[float, float] | None) -> None:
    data = portable(b"P5", 4095, 0, 2048, 4095)
    assert decode(data, 1, PixelRules(value_range=value_range)).flatten().tolist() == [0, 128, 255]


@pytest.mark.parametrize(
    ("data", "pixels", "is_scalable"),
    [
        (png([[0x1234, 0x5678, 0xFFFF]], 16, channels=3), [0x12, 0x56, 0xFF], False),
        (png([[0x12, 0x56, 0xFF]], 8, channels=3), [0x12, 0x56, 0xFF], True),
        (portable(b"P6", 65535, 0, 0x5678, 65535), [0, 0x56, 255], False),
        (portable(b"P6", 256, 0, 128, 256), [0, 128, 255], False),
        (portable(b"P6", 255, 0, 128, 255), [0, 128, 255], True),
        (portable(b"P6", 200, 0, 100, 200), [0, 128, 255], True),
    ],
)
def test_a_value_range_needs_eight_bits_per_color(data: bytes, pixels: list[int], is_scalable: bool) -> None:
    """Pillow reads eight of them, so the range can't be applied."""
    expected = decode(data, 3)
    assert expected.permute(1, 2, 0).flatten().tolist() == pixels
    rules = PixelRules(value_range=(0.0, 4095.0))
    if is_scalable:
        assert torch.equal(decode(data, 3, rules), expected)
    else:
        with pytest.raises(BadFileError, match="16 bits per color, of which Pillow reads 8"):
            decode(data, 3, rules)


@pytest.mark.parametrize(
    "exif", [b"no EXIF data at all", b"Exif\0\0II*\0\x08\0\0\0\x01\0\x12\x01\x03\0\x01\0\0\0\x09" + bytes(7)]
)
def test_damaged_exif_data_turn_nothing(exif: bytes) -> None:
    """Not a TIFF header; an orientation of 9."""
    data = content("PNG", exif=exif)
    assert torch.equal(decode(data, 3, PixelRules(applies_orientation=True)), by_pillow(data, 3))


@pytest.mark.parametrize("form", ["JPEG", "PNG", "TIFF"])
def test_an_image_above_pillows_limit_can_be_allowed(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    with pytest.raises(Image.DecompressionBombError, match="max_image_pixels"):
        decode(content(form), 3)
    assert decode(content(form), 3, PixelRules(max_pixels=53 * 37)).shape == (3, 37, 53)
    assert Image.MAX_IMAGE_PIXELS == 100
    for limit in (100, 100_000_000):  # whichever is the larger
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", limit)
        with pytest.raises(Image.DecompressionBombError):
            decode(content(form), 3, PixelRules(max_pixels=53 * 37 - 1))


@pytest.mark.parametrize(
    ("file_format", "options"), [("TIFF", {"compression": "tiff_lzw"}), ("PPM", {}), ("PNG", {}), ("BMP", {})]
)
def test_eight_bits_per_color_are_not_taken_for_sixteen(file_format: str, options: dict[str, str]) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (40, 50, 3), dtype=np.uint8)
    data = encoded(Image.fromarray(pixels), file_format, **options)
    with Image.open(io.BytesIO(data)) as image:
        assert not has_sixteen_bit_colors(image)
    with Image.open(io.BytesIO(b"P6 1 1 65535\n" + bytes(6))) as image:
        assert has_sixteen_bit_colors(image)
