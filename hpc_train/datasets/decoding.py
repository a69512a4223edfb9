"""Decodes the content of an image file: ordinary JPEG by libjpeg-turbo (simplejpeg), all else by Pillow.

Both give the same pixels, since Pillow uses libjpeg-turbo with the same settings (accurate DCT, smooth
upsampling of chroma; EXIF orientation is not applied), so which one decodes is a matter of speed alone:
simplejpeg takes two thirds of Pillow's time for 500 x 375 pixels and an eighth for 32 x 32 (measured). It
refuses damaged files; whether such a file can be read, and the error, is left to Pillow.
"""

from __future__ import annotations

import io

import simplejpeg
import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor

from hpc_train.datasets.images import as_tensor

_JPEG_START = b"\xff\xd8"
#: Requested channels and the file's colorspace → the colorspace to decode to, where Pillow's is the same. Its
#: gray of a colour image is not libjpeg's, nor is its RGB of CMYK.
_DECODED_TO = {(3, "YCbCr"): "RGB", (3, "RGB"): "RGB", (3, "Gray"): "RGB", (1, "Gray"): "GRAY"}


def decode(content: bytes, channels: int) -> Tensor:
    """Return the image (C, H, W) uint8 of a file's ``content`` with ``channels`` channels, 1 or 3.

    Pixels are stored channels-last. Raises OSError, SyntaxError or ValueError as Pillow does for what is not
    an intact image.
    """
    decoded = _decode_jpeg(content, channels) if content.startswith(_JPEG_START) else None
    return _decode_by_pillow(content, channels) if decoded is None else decoded


def _decode_jpeg(content: bytes, channels: int) -> Tensor | None:
    """Return the image, or None if Pillow should decode it or say why it can't be decoded."""
    try:
        height, width, colorspace, _ = simplejpeg.decode_jpeg_header(content)
        decoded_to = _DECODED_TO.get((channels, colorspace))
        if decoded_to is None or height * width > (Image.MAX_IMAGE_PIXELS or height * width):
            return None
        pixels = simplejpeg.decode_jpeg(content, decoded_to)
    except ValueError:
        return None
    return torch.from_numpy(pixels).permute(2, 0, 1)


def _decode_by_pillow(content: bytes, channels: int) -> Tensor:
    try:
        image = Image.open(io.BytesIO(content))
    except UnidentifiedImageError as error:  # names the buffer's address
        raise UnidentifiedImageError("cannot identify the image format") from error
    with image:
        image.load()
        return as_tensor(image, channels)
