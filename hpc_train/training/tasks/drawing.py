# ruff: noqa: N803, N806  (shape suffixes)
"""Drawing of predictions on images with Pillow: masks, boxes, captions. Called by the tasks.

Pictures are bitwise reproducible functions of their arguments, so a repeated evaluation has the same picture.
What is written on a picture is also in its ``info[DESCRIPTION]``, as JSON values, so that ``report`` can show
it as text.
Legend: H rows, W columns.
"""

from __future__ import annotations

import colorsys
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from hpc_train.errors import printable, shortened

Color: TypeAlias = tuple[int, int, int]

#: Key of a picture's description in its ``info``, and of a sheet's in the PNG file.
DESCRIPTION = "hpc-train"

#: Side lengths in pixels: larger images are shrunk, and smaller ones magnified by an integer.
LONGEST, SHORTEST = 384, 128
WHITE: Color = (255, 255, 255)
INK: Color = (30, 30, 30)
GRAY: Color = (120, 120, 120)
RIGHT: Color = (0, 125, 60)
WRONG: Color = (200, 20, 30)

#: Colors of the first classes: far apart in hue and lightness, after Trubetskoy's list of distinct colors.
_PALETTE: tuple[Color, ...] = (
    (67, 99, 216), (230, 25, 75), (255, 225, 25), (60, 180, 75), (245, 130, 49), (145, 30, 180),
    (66, 212, 244), (240, 50, 230), (191, 239, 69), (250, 190, 212), (0, 128, 128), (220, 190, 255),
    (154, 99, 36), (255, 250, 200), (128, 0, 0), (170, 255, 195), (128, 128, 0), (255, 216, 177),
    (0, 0, 117), (169, 169, 169),
)  # fmt: skip
#: A step by the golden ratio: each hue is far from the previous ones.
_HUE_STEP = 0.61803398875
#: The weight of the class color in a pixel, and the brightness of ignored pixels.
_OPACITY, _DIMMED = 0.6, 0.35
_TEXT_SIZE, _LINE, _PADDING = 13, 17, 4
#: Labels of boxes are close to their text because they hide a part of the image.
_LABEL_SIZE, _LABEL_LINE = 13, 15
_LONGEST_NAME = 24
_DASH = 5


@dataclass(frozen=True)
class Box:
    """A box to draw: ``corners`` are left, top, right and bottom in pixels of the image."""

    corners: Sequence[float]
    text: str
    color: Color
    is_dashed: bool = False


def color_of(number: int) -> Color:
    """Return the color of a class, the same in every picture."""
    if 0 <= number < len(_PALETTE):
        return _PALETTE[number]
    red, green, blue = colorsys.hsv_to_rgb(number * _HUE_STEP % 1, 0.45 + number % 3 * 0.2, 0.9)
    return round(255 * red), round(255 * green), round(255 * blue)


def short(name: object) -> str:
    """Return the name of a class for a picture: one line, no control characters, at most 24 long."""
    return shortened(" ".join(printable(str(name)).split()), _LONGEST_NAME)


def scale_of(width: int, height: int) -> float:
    """Return the factor by which an image of this size is scaled for display."""
    longest = max(width, height)
    return LONGEST / longest if longest > LONGEST else max(1, math.ceil(SHORTEST / longest))


def fitted(image: Image.Image) -> Image.Image:
    """Return the image in its displayed size."""
    scale = scale_of(*image.size)
    if scale == 1:
        return image
    width, height = (max(1, round(side * scale)) for side in image.size)
    # Pixels of small images stay visible as squares.
    method = Image.Resampling.NEAREST if scale > 1 else Image.Resampling.LANCZOS
    return image.resize((width, height), method)


def with_classes(image: Image.Image, classes_HW: NDArray[Any], ignored_HW: NDArray[Any]) -> Image.Image:
    """Return the image in gray, blended with the colors of its pixels' classes; ignored pixels are darker."""
    gray_HW1 = np.asarray(image.convert("L"), dtype=np.float32)[:, :, None]
    colors_HW3 = np.zeros((*classes_HW.shape, 3), dtype=np.float32)
    for number in np.unique(classes_HW[~ignored_HW]).tolist():
        colors_HW3[classes_HW == number] = color_of(number)
    mixed_HW3 = (1 - _OPACITY) * gray_HW1 + _OPACITY * colors_HW3
    shown_HW3 = np.where(ignored_HW[:, :, None], _DIMMED * gray_HW1, mixed_HW3)
    return Image.fromarray(shown_HW3.round().clip(0, 255).astype(np.uint8))


def with_boxes(image: Image.Image, boxes: Iterable[Box]) -> Image.Image:
    """Return the image in its displayed size with boxes; the last boxes are on top.

    Boxes with coordinates that are not finite are omitted.
    """
    scale = scale_of(*image.size)
    shown = fitted(image).copy()
    draw = ImageDraw.Draw(shown)
    drawn = [(box, _corners(box, scale, shown.size)) for box in boxes if all(map(math.isfinite, box.corners))]
    for box, corners in drawn:
        if box.is_dashed:
            draw.rectangle(corners, outline=INK)
            for line in _dashes(corners):
                draw.line(line, fill=box.color)
        else:
            draw.rectangle(corners, outline=box.color, width=2)
    for box, corners in drawn:  # after all lines, which would cross them
        if box.text:
            _draw_label(draw, box, corners, shown.size)
    return shown


def _corners(box: Box, scale: float, size: tuple[int, int]) -> tuple[int, int, int, int]:
    """Return the corners in the displayed image, clamped to it."""
    width, height = size
    left, right = (round(min(max(side * scale, 0), width - 1)) for side in box.corners[::2])
    top, bottom = (round(min(max(side * scale, 0), height - 1)) for side in box.corners[1::2])
    return left, top, max(left, right), max(top, bottom)


def _dashes(corners: tuple[int, int, int, int]) -> Iterator[tuple[int, int, int, int]]:
    left, top, right, bottom = corners
    for start in range(left, right + 1, 2 * _DASH):
        end = min(start + _DASH, right)
        yield start, top, end, top
        yield start, bottom, end, bottom
    for start in range(top, bottom + 1, 2 * _DASH):
        end = min(start + _DASH, bottom)
        yield left, start, left, end
        yield right, start, right, end


def _draw_label(
    draw: ImageDraw.ImageDraw, box: Box, corners: tuple[int, int, int, int], size: tuple[int, int]
) -> None:
    """Write the text above the box, or inside if there is no room above."""
    left, top, *_ = corners
    width, height = _width(box.text, _LABEL_SIZE) + 4, _LABEL_LINE
    left = max(0, min(left, size[0] - width))
    top = top - height if top >= height else top
    draw.rectangle((left, top, left + width - 1, top + height - 1), fill=box.color)
    draw.text((left + 2, top), box.text, fill=_readable_on(box.color), font=_font(_LABEL_SIZE))


def _readable_on(color: Color) -> Color:
    red, green, blue = color
    return INK if 0.299 * red + 0.587 * green + 0.114 * blue > 140 else WHITE


def panels(titled: Sequence[tuple[str, Image.Image]]) -> Image.Image:
    """Return images of equal height side by side, each below its title."""
    images = [fitted(image) for _, image in titled]
    width = sum(image.width for image in images) + _PADDING * (len(images) - 1)
    row = Image.new("RGB", (width, _LINE + max(image.height for image in images)), WHITE)
    draw, left, parts = ImageDraw.Draw(row), 0, []
    for (title, _), image in zip(titled, images, strict=True):
        draw.text((left, 0), title, fill=INK, font=_font())
        row.paste(image, (left, _LINE))
        parts.append((title, left, _LINE, *image.size))
        left += image.width + _PADDING
    return described(row, parts=parts)


def with_legend(image: Image.Image, entries: Sequence[tuple[str, Color]]) -> Image.Image:
    """Return the image above a legend: squares of color with names, on as many lines as needed."""
    places, left, line = [], 0, 0
    for name, _ in entries:
        width = _LINE + _width(name) + 2 * _PADDING
        if left > 0 and left + width > image.width:
            left, line = 0, line + 1
        places.append((left, image.height + _PADDING + line * _LINE))
        left += width
    extended = _extended(image, _PADDING + _LINE * (line + 1) if entries else 0)
    draw = ImageDraw.Draw(extended)
    for (name, color), (x, y) in zip(entries, places, strict=True):
        draw.rectangle((x, y + 2, x + _LINE - 6, y + _LINE - 4), fill=color, outline=GRAY)
        draw.text((x + _LINE - 2, y), name, fill=INK, font=_font())
    extended.info.update(image.info)
    return described(extended, legend=[(name, f"#{bytes(color).hex()}") for name, color in entries])


def with_caption(image: Image.Image, lines: Sequence[tuple[str, Color]]) -> Image.Image:
    """Return the image above lines of text, widened to the longest line."""
    width = max([image.width, *(_width(text) + 1 for text, _ in lines)])
    extended = _extended(image, _PADDING + _LINE * len(lines), width)
    draw = ImageDraw.Draw(extended)
    for number, (text, color) in enumerate(lines):
        draw.text((0, image.height + _PADDING + number * _LINE), text, fill=color, font=_font())
    return described(extended, parts=[("", 0, 0, *image.size)], lines=[text for text, _ in lines])


def described(image: Image.Image, **facts: Any) -> Image.Image:
    """Return the image with these facts in its description. ``report`` reads:

    ``parts``: images within the picture, each with its title, left, top, width and height; ``lines``: the
    caption; ``legend``: names and colors (``#ff0000``); ``classes``: names of the classes that the sample has
    or was predicted to have; ``error``: how wrong the prediction is, 0: right.
    """
    image.info[DESCRIPTION] = image.info.get(DESCRIPTION, {}) | facts
    return image


def framed(image: Image.Image, color: Color) -> Image.Image:
    """Return the image in a frame of this color."""
    frame = Image.new("RGB", (image.width + 6, image.height + 6), color)
    frame.paste(image, (3, 3))
    return frame


def sheet(titled: Sequence[tuple[str, Image.Image]]) -> Image.Image:
    """Return all pictures on one roughly square sheet, each below its title.

    Its description is the list of the pictures' descriptions, with their titles.
    """
    width = max(max(image.width, _width(title)) for title, image in titled) + 4 * _PADDING
    height = max(image.height for _, image in titled) + _LINE + 4 * _PADDING
    columns = min(len(titled), max(1, math.ceil(math.sqrt(len(titled) * height / width))))
    rows = math.ceil(len(titled) / columns)
    page = Image.new("RGB", (columns * width, rows * height), WHITE)
    draw, samples = ImageDraw.Draw(page), []
    for number, (title, image) in enumerate(titled):
        left = number % columns * width + 2 * _PADDING
        top = number // columns * height + 2 * _PADDING
        draw.text((left, top), title, fill=GRAY, font=_font())
        page.paste(image, (left, top + _LINE))
        facts = image.info.get(DESCRIPTION, {})
        parts = [
            (name, left + x, top + _LINE + y, *size)
            for name, x, y, *size in facts.get("parts", [("", 0, 0, *image.size)])
        ]
        samples.append(facts | {"title": title, "parts": parts})
    page.info[DESCRIPTION] = samples
    return page


def _extended(image: Image.Image, height: int, width: int = 0) -> Image.Image:
    """Return the image with white below it, and to its right up to ``width``."""
    canvas = Image.new("RGB", (max(width, image.width), image.height + height), WHITE)
    canvas.paste(image)
    return canvas


def _width(text: str, size: int = _TEXT_SIZE) -> int:
    return math.ceil(_font(size).getlength(text))


@cache
def _font(size: int = _TEXT_SIZE) -> Any:
    """Return Pillow's built-in font."""
    return ImageFont.load_default(size)
