"""Every kind of file has Pillow's pixels, whichever library decodes it."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from hpc_train.datasets.decoding import decode
from hpc_train.datasets.images import as_tensor

#: Smooth and odd-sized, so that upsampled chroma and incomplete blocks count.
PIXELS = np.asarray(
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (5, 7, 3), dtype=np.uint8)).resize((53, 37))
)


def content(form: str = "JPEG", mode: str = "RGB", **options: Any) -> bytes:
    file = io.BytesIO()
    Image.fromarray(PIXELS).convert(mode).save(file, form, **options)
    return file.getvalue()


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


@pytest.mark.parametrize("data", [b"", b"\xff\xd8", b"\xff\xd8\xff", b"text"])
def test_what_is_no_image_is_refused(data: bytes) -> None:
    with pytest.raises(OSError, match="cannot identify the image format"):
        decode(data, 3)


def test_an_image_of_too_many_pixels_is_refused_as_by_pillow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", PIXELS.size // 3 // 4)
    with pytest.raises(Image.DecompressionBombError):
        decode(content(), 3)
