"""Converts images of any kind to tensors (C, H, W) with the requested channels; resizing for evaluation.

torchvision, which takes a third of a second to import, is imported only when an image needs it.

Legend: B images, C channels, H rows, W columns.
"""

from __future__ import annotations

import io
import math
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageFile, UnidentifiedImageError
from torch import Tensor
from torch.nn import functional

from hpc_train.errors import BadFileError
from hpc_train.experiment.config.training_sections import DataConfig
from hpc_train.experiment.data_facts.root_layout import pointer_problem
from hpc_train.run.files import UnreadableFileError, read_regular
from hpc_train.training.datasets.base import RawImage, RawInput, RawTarget, Split
from hpc_train.training.datasets.targets import as_target
from hpc_train.training.datasets.types import Tensors, collate

_PIL_MODE = {1: "L", 3: "RGB", 4: "RGBA"}
#: Files with 16 bits that Pillow opens in mode I, of 32 bits: PNG before Pillow 10.3, and PGM.
_SIXTEEN_BITS = {"PNG", "PPM"}
#: PIL modes whose values have no defined range.
_NO_RANGE = {"F": "float", "I": "32-bit"}
#: Formats of image files, by Pillow's names. No other format is opened: for EPS Pillow runs Ghostscript,
#: whatever the name of the file. Pillow imports the second group only if no format of the first fits.
FORMATS = (
    ("JPEG", "PNG", "GIF", "BMP", "DIB", "PPM"),
    ("TIFF", "WEBP", "AVIF", "JPEG2000", "QOI", "FITS", "SGI", "PCX", "TGA"),
)
#: EXIF tag of the orientation, and the orientation of an image that is stored upright.
_ORIENTATION, UPRIGHT = 0x0112, 1
#: Orientations that exchange rows and columns.
_TRANSPOSED = {5, 6, 7, 8}
#: Orientation → dimensions of (C, H, W) that are flipped afterwards.
_FLIPPED = {2: (2,), 3: (1, 2), 4: (1,), 5: (), 6: (2,), 7: (1, 2), 8: (1,)}
#: Maximum size of an image file: Pillow refuses to decode as many pixels.
_MAX_IMAGE_BYTES = 4 << 30
#: Held while Pillow's pixel limit, a global variable, is changed.
_PIXEL_LIMIT = threading.RLock()
#: The accepted types of images.
_RULE = (
    "an image must be PIL, or uint8 or float of (C, H, W) as a tensor, (H, W, C) as an array; a row of "
    "features must be float of (F,)"
)


@dataclass(frozen=True)
class PixelRules:
    """The keys of ``data`` that determine how the values of an image file become pixels."""

    value_range: tuple[float, float] | None = None
    applies_orientation: bool = False
    #: Maximum number of pixels; None: Pillow's limit.
    max_pixels: int | None = None

    @classmethod
    def of(cls, data: DataConfig) -> PixelRules:
        """Return the rules of a file's ``data`` section."""
        return cls(data.value_range, data.exif_orientation == "apply", data.max_image_pixels)


#: The default values of these keys.
DEFAULT_RULES = PixelRules()


def image_content(path: str, where: object = None) -> bytes:
    """Return the content of an image file; the package reads image files by path only with this function.

    ``where``: the row that names it. Raises OSError if it can't be read, BadFileError if it is a folder, a
    pipe or a device.
    """
    row = "" if where is None else f" (named in {where})"
    try:
        return read_regular(path, _MAX_IMAGE_BYTES)
    except OSError as error:
        error.strerror = f"{error.strerror}{row}"
        raise
    except UnreadableFileError as error:
        remedy = "write the path of an image file" if row else "put an image file in its place, or remove it"
        raise BadFileError(f"data: {error}{row}; {remedy}") from error


@contextmanager
def open_image(content: bytes | bytearray, max_pixels: int | None = None) -> Iterator[ImageFile.ImageFile]:
    """Open the content of an image file; the package opens images only with this function.

    Raises UnidentifiedImageError if the content has none of the ``FORMATS``, DecompressionBombError for an
    image with more than ``max_pixels`` pixels (None: twice Pillow's ``MAX_IMAGE_PIXELS``), and OSError,
    SyntaxError or ValueError like Pillow.
    """
    if (problem := pointer_problem(content)) is not None:
        raise UnidentifiedImageError(f"the file {problem}")
    with _limited_to(max_pixels):
        try:
            image = open_lazily(io.BytesIO(content))
        except Image.DecompressionBombError as error:
            raise Image.DecompressionBombError(
                f"{str(error).rstrip('.')}; if the file is right, write its number of pixels as "
                "data.max_image_pixels"
            ) from error
        with image:
            if max_pixels is not None and image.width * image.height > max_pixels:
                raise Image.DecompressionBombError(
                    f"an image has {image.width}x{image.height} pixels, and data.max_image_pixels is "
                    f"{max_pixels}; write a larger number if the file is right"
                )
            yield image


def open_lazily(source: Any, *_: Any, **__: Any) -> ImageFile.ImageFile:
    """Replacement for ``Image.open`` in other libraries that opens only ``FORMATS``.

    ``source``: a path or a file; the pixels are read later. Other arguments of ``Image.open`` are ignored.
    """
    common, others = FORMATS
    with suppress(UnidentifiedImageError):
        return Image.open(source, formats=common)
    Image.init()
    try:
        return Image.open(source, formats=[name for name in others if name in Image.OPEN])
    except UnidentifiedImageError as error:  # Pillow's message contains the address of the buffer
        raise UnidentifiedImageError("cannot identify the image format") from error


@contextmanager
def _limited_to(max_pixels: int | None) -> Iterator[None]:
    """Disable Pillow's pixel limit, which some formats check again while they decode."""
    if max_pixels is None:
        yield
        return
    with _PIXEL_LIMIT:
        limit, Image.MAX_IMAGE_PIXELS = Image.MAX_IMAGE_PIXELS, None
        try:
            yield
        finally:
            Image.MAX_IMAGE_PIXELS = limit


def orientation_of(image: Image.Image) -> int:
    """Return the EXIF orientation of an opened file, 1 to 8; 1 without a valid one."""
    try:
        orientation = image.getexif().get(_ORIENTATION, UPRIGHT)
    except Exception:  # any error of Pillow for damaged EXIF data; the pixels are not affected
        return UPRIGHT
    return orientation if orientation in _FLIPPED else UPRIGHT


def turned_upright(image: Tensor, orientation: int) -> Tensor:
    """Return (C, H, W) as its EXIF orientation displays it, stored as (H, W, C)."""
    if orientation == UPRIGHT:
        return image
    turned = image.transpose(1, 2) if orientation in _TRANSPOSED else image
    turned = turned.flip(_FLIPPED[orientation])
    return turned.permute(1, 2, 0).contiguous().permute(2, 0, 1)


def as_tensor(
    image: RawImage, channels: int | None = None, value_range: tuple[float, float] | None = None
) -> Tensor:
    """Return (C, H, W) uint8, or float unchanged, with ``channels`` channels (None: unchanged).

    A row of features, float (F,), is returned unchanged.

    Gray becomes colour by repetition, colour gray by luminance, alpha is dropped. With ``value_range`` the
    values of PIL images of 16 or 32 bits and of floats are scaled so that the range becomes 0 to 255; values
    outside are clipped. Without it, 16-bit gray keeps its upper eight bits. Raises BadFileError for other
    types, also for PIL images of floats (mode F) and of 32-bit integers (mode I), whose values have no
    defined range.
    """
    if isinstance(image, Image.Image):
        return _from_pil(_as_bytes(image, value_range), channels)
    if isinstance(image, np.ndarray):
        image = _from_array(image)
    if not isinstance(image, Tensor):
        raise BadFileError(f"data: a sample is {type(image).__name__}; {_RULE}")
    if image.dim() == 1 and image.is_floating_point():
        return image
    if image.dim() == 2:
        image = image[None]
    if image.dim() != 3 or not (image.dtype == torch.uint8 or image.is_floating_point()):
        raise BadFileError(f"data: a sample is {image.dtype} of shape {tuple(image.shape)}; {_RULE}")
    return image if channels is None else _with_channels(image, channels)


def as_inputs(sample: RawInput, channels: int | None = None) -> Tensors:
    """Return a sample's inputs: ``as_tensor`` of an image or features, or a dict or tuple of tensors.

    In a structure a PIL image or uint8 (C, H, W) becomes an image with unchanged channels, and other values
    keep their dtype and shape.
    """
    if isinstance(sample, dict):
        return {str(key): _as_part(value) for key, value in sample.items()}
    if isinstance(sample, tuple):
        return tuple(map(_as_part, sample))
    return as_tensor(sample, channels)


def _as_part(part: Any) -> Tensors:
    if isinstance(part, (dict, tuple)):
        return as_inputs(part)
    is_bytes = str(getattr(part, "dtype", "")).endswith("uint8") and part.ndim == 3
    return as_tensor(part) if is_bytes or isinstance(part, Image.Image) else as_target(part)


def _from_array(image: np.ndarray[Any, Any]) -> Tensor:
    if not (image.flags.writeable and image.flags.c_contiguous):  # torch rejects flipped views
        image = np.array(image)
    tensor = torch.from_numpy(image)
    return tensor.permute(2, 0, 1) if tensor.dim() == 3 else tensor


def has_sixteen_bits(image: Image.Image) -> bool:
    """Return True for a gray image of 16 bits."""
    return image.mode.startswith("I;16") or (image.mode == "I" and image.format in _SIXTEEN_BITS)


def _as_bytes(image: Image.Image, value_range: tuple[float, float] | None) -> Image.Image:
    """Return the image with eight bits per channel."""
    is_sixteen_bits = has_sixteen_bits(image)
    if not is_sixteen_bits and image.mode not in _NO_RANGE:
        return image
    values = np.asarray(image)
    if value_range is not None:
        return Image.fromarray(_scaled(values, *value_range))
    if is_sixteen_bits:  # Pillow would clip at 255
        return Image.fromarray((values >> 8).astype(np.uint8))
    raise BadFileError(
        f"data: a {_NO_RANGE[image.mode]} image (PIL mode {image.mode}) has no defined range; store 8 or "
        "16 bits per channel, or for an image file write data.value_range: [<black>, <white>]"
    )


def _scaled(values: np.ndarray[Any, Any], low: float, high: float) -> np.ndarray[Any, Any]:
    if np.isnan(values).any():
        raise BadFileError("data: an image has pixels that are NaN; replace them by numbers")
    fractions = (np.clip(values.astype(np.float64), low, high) - low) / (high - low)
    return np.rint(fractions * 255).astype(np.uint8)


def _from_pil(image: Image.Image, channels: int | None) -> Tensor:
    if channels is None:
        channels = 1 if image.mode in {"1", "L", "LA"} else 3
    mode = _PIL_MODE.get(channels)
    if mode is None:
        raise BadFileError(f"data: a {image.mode} image has no {channels} channels; ask for 1, 3 or 4")
    if image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")  # a direct conversion to RGB warns
    pixels = np.array(image if image.mode == mode else image.convert(mode))
    tensor = torch.from_numpy(pixels)
    return tensor[None] if tensor.dim() == 2 else tensor.permute(2, 0, 1)


def _with_channels(image: Tensor, channels: int) -> Tensor:
    has = image.shape[0]
    if has == channels:
        return image
    if has == 1 and channels == 3:
        return image.expand(3, -1, -1)
    if has == 4 and channels in (1, 3):
        return _with_channels(image[:3], channels)
    if has == 3 and channels == 1:
        from torchvision.transforms.v2 import functional as tvf

        return tvf.rgb_to_grayscale(image)
    raise BadFileError(f"data: an image of shape {tuple(image.shape)} has {has} channels, not {channels}")


def inputs_and_target(sample: object) -> tuple[RawInput, RawTarget]:
    """Return the pair that a split's ``__getitem__`` returned. Raises BadFileError for anything else."""
    if isinstance(sample, (tuple, list)) and len(sample) == 2:
        return sample[0], sample[1]
    length = f" of {len(sample)}" if isinstance(sample, (tuple, list, dict)) else ""
    kind = f"{type(sample).__name__}{length}"
    raise BadFileError(f"data: __getitem__ returned a {kind} for a sample; return (inputs, target)")


@dataclass(frozen=True)
class ImageSplit:
    """A split whose samples are converted to tensors with ``channels`` channels."""

    split: Split
    channels: int

    def __len__(self) -> int:
        return len(self.split)

    def __getitem__(self, index: int, /) -> tuple[Tensors, RawTarget]:
        inputs, target = inputs_and_target(self.split[index])
        return as_inputs(inputs, self.channels), target

    def path(self, index: int) -> Path | None:
        """Return the file of a sample, if the split has its path."""
        return sample_path(self.split, index)


def sample_path(split: Any, index: int) -> Path | None:
    """Return the file of a sample if the split has a ``path`` method, else None."""
    method = getattr(split, "path", None)
    return method(index) if callable(method) else None


def resize(image: Tensor, height: int, width: int, interpolation: str = "bilinear") -> Tensor:
    """Resize (C, H, W) with antialiasing; uint8 stays uint8.

    The pixels equal those of torchvision's ``resize``, whose call takes longer.
    """
    if tuple(image.shape[-2:]) == (height, width):
        return image
    if image.dtype == torch.uint8:
        # Vectorised for three channels only in this layout: 1.4 times as fast (measured).
        layout = torch.channels_last
    else:
        layout = torch.contiguous_format
    resized = functional.interpolate(
        image[None].contiguous(memory_format=layout), size=(height, width), mode=interpolation, antialias=True
    )
    return resized[0]


def centre_square(
    image: Tensor, side: int, crop_ratio: float = 1.0, interpolation: str = "bilinear"
) -> Tensor:
    """Resize and crop to the centre square of ``side`` pixels, ``crop_ratio`` of the shorter side."""
    height, width = image.shape[-2:]
    # Rounded down as timm does; torchvision's ratios are those of whole numbers.
    shorter = max(side, math.floor(side / crop_ratio + 1e-6))
    if height <= width:
        height, width = shorter, int(shorter * width / height)
    else:
        height, width = int(shorter * height / width), shorter
    top, left = round((height - side) / 2), round((width - side) / 2)
    return resize(image, height, width, interpolation)[:, top : top + side, left : left + side]


def stack_inputs(samples: Sequence[Tensors]) -> Tensors:
    """Return the inputs of several samples as those of a batch. Raises BadFileError if they differ."""
    return collate(samples, lambda parts, name: stack(parts) if name == "" else _stack_part(parts, name))


def _stack_part(parts: Sequence[Tensor], name: str) -> Tensor:
    first = parts[0]
    other = next((part for part in parts if (part.dtype, part.shape) != (first.dtype, first.shape)), None)
    if other is not None:
        raise BadFileError(
            f"data: samples have the input '{name}' of {first.dtype}, shape {tuple(first.shape)}, and of "
            f"{other.dtype}, shape {tuple(other.shape)}; return one dtype and shape"
        )
    return torch.stack(list(parts))


def stack(images: Sequence[Tensor]) -> Tensor:
    """Return (B, C, H, W). Raises BadFileError if shapes differ."""
    shapes = {tuple(image.shape) for image in images}
    if len(shapes) > 1 and len(images[0].shape) == 1:
        lengths = sorted(shapes)[:2]
        raise BadFileError(
            f"data: rows of features differ in length ({lengths[0][0]} and {lengths[1][0]}); "
            "return the same number for each sample"
        )
    if len(shapes) > 1:
        (_, *one), (_, *other) = sorted(shapes)[:2]
        raise BadFileError(
            f"data.image_size: images differ in shape ({_sides(one)} and {_sides(other)}); "
            "write the size in pixels to which all are resized"
        )
    if images[0].dim() == 3 and images[0].stride(0) == 1:  # decoded pixels are stored as (H, W, C)
        return torch.stack([image.permute(1, 2, 0) for image in images]).permute(0, 3, 1, 2)
    return torch.stack(list(images))


def _sides(sides: Sequence[int]) -> str:
    return "x".join(str(side) for side in sides)
