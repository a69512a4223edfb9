"""Decodes the content of an image file: ordinary JPEG by libjpeg-turbo (simplejpeg), all else by Pillow.

Both give the same pixels, since Pillow uses libjpeg-turbo with the same settings (accurate DCT, smooth
upsampling of chroma; EXIF orientation is not applied), so which one decodes is a matter of speed alone:
simplejpeg takes two thirds of Pillow's time for 500 x 375 pixels and an eighth for 32 x 32 (measured). It
refuses damaged files; whether such a file can be read, and the error, is left to Pillow.

Legend: C channels, H rows, W columns.
"""

from __future__ import annotations

import io
from dataclasses import dataclass

import simplejpeg
import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor

from hpc_train.datasets.images import as_tensor, resize

_JPEG_START = b"\xff\xd8"
#: Requested channels and the file's colorspace → the colorspace to decode to, where Pillow's is the same. Its
#: gray of a colour image is not libjpeg's, nor is its RGB of CMYK.
_DECODED_TO = {(3, "YCbCr"): "RGB", (3, "RGB"): "RGB", (3, "Gray"): "RGB", (1, "Gray"): "GRAY"}


#: JPEG decodes to these fractions of its sides in less time than to all of them.
_REDUCTIONS = (8, 4, 2)


class UndecodableError(Exception):
    """Sample ``index`` can't be decoded; the cause is the decoder's error."""

    def __init__(self, index: int) -> None:
        super().__init__(f"sample {index} can't be decoded")
        self.index = index


@dataclass(frozen=True)
class EncodedImage:
    """The image of sample ``index``, decoded when it is used. ``shape`` is (C, H, W)."""

    content: bytes
    shape: tuple[int, int, int]
    index: int
    #: What simplejpeg decodes it to; None: Pillow decodes it.
    decoded_to: str | None = None
    opened: Image.Image | None = None

    def dim(self) -> int:
        """Return the dimensions of the decoded image."""
        return len(self.shape)

    def decode(self, reduction: int = 1) -> Tensor:
        """Return the image (C, H, W) uint8, its pixels stored as (H, W, C).

        ``reduction``: 2, 4 or 8 return a JPEG that simplejpeg decodes with sides of that fraction, rounded
        up. Raises UndecodableError.
        """
        try:
            return self._decoded(reduction)
        except Exception as error:
            raise UndecodableError(self.index) from error

    def _decoded(self, reduction: int) -> Tensor:
        _, height, width = self.shape
        if self.decoded_to is None:
            return self._by_pillow()
        least = -(-height // reduction), -(-width // reduction)
        try:
            pixels = simplejpeg.decode_jpeg(self.content, self.decoded_to, False, False, *least)
        except ValueError:  # Pillow reads some damaged files, and has a better message for the others
            return resize(self._by_pillow(), *least)
        return torch.from_numpy(pixels).permute(2, 0, 1)

    def _by_pillow(self) -> Tensor:
        with self.opened or _opened(self.content) as image:
            image.load()
            return as_tensor(image, self.shape[0])

    def resized_part(
        self, corner: tuple[int, int], sides: tuple[int, int], to: tuple[int, int], interpolation: str
    ) -> Tensor:
        """Return the rectangle at ``corner`` (top, left) of ``sides`` (height, width), resized to ``to``.

        A JPEG is first decoded to the smallest fraction at which the rectangle has at least the sides
        ``to``; the rectangle is then rounded to that grid. Raises UndecodableError.
        """
        reduction = 1
        if self.decoded_to is not None:
            fits = (r for r in _REDUCTIONS if all(a // r >= b for a, b in zip(sides, to, strict=True)))
            reduction = next(fits, 1)
        image = self.decode(reduction)
        height, width = (length // reduction for length in sides)
        top = min(round(corner[0] / reduction), image.shape[1] - height)
        left = min(round(corner[1] / reduction), image.shape[2] - width)
        part = image[:, top : top + height, left : left + width]
        return resize(part, *to, interpolation)


def encoded_image(content: bytes, channels: int, index: int) -> EncodedImage:
    """Return the image of a file's ``content``, of which only the header is read, as 1 or 3 channels.

    Raises OSError, SyntaxError or ValueError as Pillow does if that is no image's.
    """
    if content.startswith(_JPEG_START):
        try:
            height, width, colorspace, _ = simplejpeg.decode_jpeg_header(content)
        except ValueError:
            pass
        else:
            decoded_to = _DECODED_TO.get((channels, colorspace))
            if decoded_to is not None and height * width <= (Image.MAX_IMAGE_PIXELS or height * width):
                return EncodedImage(content, (channels, height, width), index, decoded_to)
    image = _opened(content)
    return EncodedImage(content, (channels, image.height, image.width), index, opened=image)


def decoded(image: Tensor | EncodedImage) -> Tensor:
    """Return the image as a tensor. Raises UndecodableError."""
    return image.decode() if isinstance(image, EncodedImage) else image


def decode(content: bytes, channels: int) -> Tensor:
    """Return the image (C, H, W) uint8 of a file's ``content`` with ``channels`` channels, 1 or 3.

    Pixels are stored as (H, W, C). Raises OSError, SyntaxError or ValueError as Pillow does for what is not
    an intact image.
    """
    return encoded_image(content, channels, 0)._decoded(1)


def _opened(content: bytes) -> Image.Image:
    try:
        return Image.open(io.BytesIO(content))
    except UnidentifiedImageError as error:  # names the buffer's address
        raise UnidentifiedImageError("cannot identify the image format") from error
