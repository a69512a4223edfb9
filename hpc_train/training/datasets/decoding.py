"""Decodes the content of an image file: ordinary JPEG by libjpeg-turbo (simplejpeg), other files by Pillow.

Both return the same pixels, since Pillow uses libjpeg-turbo with the same settings (accurate DCT, smooth
upsampling of chroma), so the choice affects only speed: simplejpeg takes two thirds of Pillow's time for
500 x 375 pixels and an eighth for 32 x 32 (measured). simplejpeg refuses damaged files; these are left to
Pillow, which reads them or raises the error.

Legend: C channels, H rows, W columns.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

import simplejpeg
import torch
from PIL import Image, ImageFile
from torch import Tensor

from hpc_train.errors import BadFileError
from hpc_train.training.datasets import images

_JPEG_START, _JPEG_END = b"\xff\xd8", b"\xff\xd9"
#: At the end of a file: the part of it that was allocated and not written.
_ZEROS = bytes(64)
#: Requested channels and the file's colorspace → the colorspace to decode to, if Pillow's result is the same.
#: Its conversions of color to gray and of CMYK to RGB differ from libjpeg's.
_DECODED_TO = {(3, "YCbCr"): "RGB", (3, "RGB"): "RGB", (3, "Gray"): "RGB", (1, "Gray"): "GRAY"}

#: The header that ``as_pixels`` writes: this, (C, H, W), whether the pixels are stored as (C, H, W).
_PIXELS_START = b"hpc-train pixels"
_PIXELS_HEAD = struct.Struct("<16sIII?")

#: JPEG decodes to these fractions of its sides faster than in full.
_REDUCTIONS = (8, 4, 2)


class UndecodableError(Exception):
    """Sample ``index`` can't be decoded; the cause is the decoder's error."""

    def __init__(self, index: int) -> None:
        super().__init__(f"sample {index} can't be decoded")
        self.index = index


@dataclass(frozen=True)
class EncodedImage:
    """The JPEG of sample ``index``, decoded on use. ``shape`` is (C, H, W)."""

    content: bytes | bytearray
    shape: tuple[int, int, int]
    #: The colorspace to which simplejpeg decodes it.
    colorspace: str
    index: int

    def dim(self) -> int:
        """Return the number of dimensions of the decoded image."""
        return len(self.shape)

    def decode(self, reduction: int = 1) -> Tensor:
        """Return the image (C, H, W) uint8, its pixels stored as (H, W, C).

        ``reduction``: 2, 4 or 8 divide the sides by this number, rounded up. Raises UndecodableError.
        """
        try:
            return self._decoded(reduction)
        except Exception as error:
            raise UndecodableError(self.index) from error

    def _decoded(self, reduction: int) -> Tensor:
        channels, height, width = self.shape
        sides = -(-height // reduction), -(-width // reduction)
        try:
            pixels = simplejpeg.decode_jpeg(self.content, self.colorspace, False, False, *sides)
        except ValueError:  # Pillow reads some damaged files, and has a better message for the others
            rules = images.PixelRules(max_pixels=height * width)
            return images.resize(_decode_by_pillow(self.content, channels, rules), *sides)
        return torch.from_numpy(pixels).permute(2, 0, 1)

    def resized_part(
        self, corner: tuple[int, int], sides: tuple[int, int], to: tuple[int, int], interpolation: str
    ) -> Tensor:
        """Return the rectangle at ``corner`` (top, left) of ``sides`` (height, width), resized to ``to``.

        The image is first decoded to the smallest fraction at which the rectangle has at least the sides
        ``to``; the rectangle is then rounded to that grid. Raises UndecodableError.
        """
        reduction = reduction_for(sides, to)
        image = self.decode(reduction)
        height, width = (length // reduction for length in sides)
        top = min(round(corner[0] / reduction), image.shape[1] - height)
        left = min(round(corner[1] / reduction), image.shape[2] - width)
        part = image[:, top : top + height, left : left + width]
        return images.resize(part, *to, interpolation)


def reduction_for(sides: tuple[int, int], to: tuple[int, int]) -> int:
    """Return the largest of 8, 4, 2, 1 at which a rectangle of ``sides`` has at least the sides ``to``."""
    fits = (r for r in _REDUCTIONS if all(a // r >= b for a, b in zip(sides, to, strict=True)))
    return next(fits, 1)


def read_image(
    content: bytes | bytearray, channels: int, index: int, rules: images.PixelRules = images.DEFAULT_RULES
) -> EncodedImage | Tensor:
    """Return the image of a file's ``content`` as 1 or 3 channels; for ordinary JPEG only the header is read.

    ``content`` may also be the result of ``as_pixels``, whose channels are kept; a bytearray is not copied. A
    JPEG that the rules turn upright is decoded. Raises OSError, SyntaxError or ValueError like Pillow if the
    content is not an image, or is damaged.
    """
    if is_decoded(content):
        return _of_pixels(content)
    encoded = None
    if content.startswith(_JPEG_START) and not (rules.applies_orientation and _is_turned(content, rules)):
        encoded = _read_header(content, channels, index, rules.max_pixels)
    return _decode_by_pillow(content, channels, rules) if encoded is None else encoded


def is_decoded(content: bytes | bytearray) -> bool:
    """Return True for the result of ``as_pixels``, False for an image file."""
    return content.startswith(_PIXELS_START)


def _is_turned(content: bytes | bytearray, rules: images.PixelRules) -> bool:
    with images.open_image(content, rules.max_pixels) as image:
        return images.orientation_of(image) != images.UPRIGHT


def as_pixels(image: Tensor) -> bytes:
    """Return a decoded image (C, H, W) uint8 in the format of ``read_image``, in the same memory layout."""
    is_channels_first = image.stride(0) != 1
    pixels = image if is_channels_first else image.permute(1, 2, 0)
    return _PIXELS_HEAD.pack(_PIXELS_START, *image.shape, is_channels_first) + pixels.numpy().tobytes()


def _of_pixels(content: bytes | bytearray) -> Tensor:
    _, channels, height, width, is_channels_first = _PIXELS_HEAD.unpack_from(content)
    pixels = torch.frombuffer(content, dtype=torch.uint8, offset=_PIXELS_HEAD.size)
    if is_channels_first:
        return pixels.view(channels, height, width)
    return pixels.view(height, width, channels).permute(2, 0, 1)


def _read_header(
    content: bytes | bytearray, channels: int, index: int, max_pixels: int | None
) -> EncodedImage | None:
    """Return the JPEG, or None if Pillow should decode it or report the error."""
    try:
        height, width, colorspace, _ = simplejpeg.decode_jpeg_header(content)
    except ValueError:
        return None
    decoded_to = _DECODED_TO.get((channels, colorspace))
    if decoded_to is None or height * width > (max_pixels or Image.MAX_IMAGE_PIXELS or height * width):
        return None
    return EncodedImage(content, (channels, height, width), decoded_to, index)


def decoded(image: Tensor | EncodedImage) -> Tensor:
    """Return the image as a tensor. Raises UndecodableError."""
    return image.decode() if isinstance(image, EncodedImage) else image


def decode(content: bytes, channels: int, rules: images.PixelRules = images.DEFAULT_RULES) -> Tensor:
    """Return the image (C, H, W) uint8 of a file's ``content`` with ``channels`` channels, 1 or 3.

    Pixels are stored as (H, W, C). Raises the same errors as ``read_image``.
    """
    image = read_image(content, channels, 0, rules)
    return image._decoded(1) if isinstance(image, EncodedImage) else image


def _decode_by_pillow(content: bytes | bytearray, channels: int, rules: images.PixelRules) -> Tensor:
    is_unfinished = content.startswith(_JPEG_START) and content.endswith(_ZEROS)
    if is_unfinished and not content.rstrip(b"\0").endswith(_JPEG_END):  # libjpeg decodes it to gray
        raise OSError("the JPEG file ends in zeros, like a file that was not written to its end")
    with images.open_image(content, rules.max_pixels) as image:
        if rules.value_range is not None and has_sixteen_bit_colors(image):
            raise BadFileError(
                "data: an image has 16 bits per color, of which Pillow reads 8, so data.value_range "
                "can't scale it; store 8 bits per color, or gray images of 16 bits"
            )
        value_range = None if states_its_range(image) else rules.value_range
        image.load()
        pixels = images.as_tensor(image, channels, value_range)
        return images.turned_upright(
            pixels, images.orientation_of(image) if rules.applies_orientation else images.UPRIGHT
        )


def states_its_range(image: ImageFile.ImageFile) -> bool:
    """Return True for an opened PGM file with an explicit maximum, which Pillow scales to 16 bits."""
    return bool(image.tile) and str(image.tile[0][0]).startswith("ppm")


def has_sixteen_bit_colors(image: ImageFile.ImageFile) -> bool:
    """Return True for an opened file with more bits per color than the eight that Pillow reads."""
    if image.mode not in {"RGB", "RGBA"}:
        return False
    rawmode, *more = _decoder_args(image)
    return ";16" in rawmode or (image.format == "PPM" and any(value > 255 for value in more))


def has_more_bands(image: ImageFile.ImageFile) -> bool:
    """Return True for an opened TIFF file with bands beside three colors, which Pillow drops."""
    return image.format == "TIFF" and image.mode == "RGB" and "X" in _decoder_args(image)[0]


def _decoder_args(image: ImageFile.ImageFile) -> tuple[Any, ...]:
    """Return the mode of the stored pixels, and other arguments of Pillow's decoder."""
    decoder_args = image.tile[0][3] if image.tile else ""
    rawmode, *more = decoder_args if isinstance(decoder_args, tuple) else (decoder_args,)
    return str(rawmode), *more
