"""Folders of images of shapes, made by code: classes that a small model learns in seconds."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw

SHAPES = ("circle", "cross", "square", "triangle")
#: Left, top, width, height in pixels.
Box = tuple[int, int, int, int]


def draw(random: np.random.Generator, shape: str, width: int, height: int) -> tuple[Image.Image, Box]:
    """Return an image of one bright shape at a random place, and its box."""
    dark, bright = (tuple(random.integers(low, high, 3).tolist()) for low, high in ((20, 90), (160, 250)))
    image = Image.new("RGB", (width, height), dark)
    side = int(min(width, height) * random.uniform(0.35, 0.6))
    left, top = int(random.integers(width - side)), int(random.integers(height - side))
    right, bottom, third = left + side, top + side, side // 3
    pen = ImageDraw.Draw(image)
    match shape:
        case "circle":
            pen.ellipse((left, top, right, bottom), fill=bright)
        case "cross":
            pen.rectangle((left + third, top, right - third, bottom), fill=bright)
            pen.rectangle((left, top + third, right, bottom - third), fill=bright)
        case "square":
            pen.rectangle((left, top, right, bottom), fill=bright)
        case "triangle":
            pen.polygon([(left, bottom), (right, bottom), (left + side // 2, top)], fill=bright)
    return image, (left, top, side, side)


def write_folder(
    root: Path,
    counts: dict[str, int],
    size: tuple[int, int],
    *,
    shapes: tuple[str, ...] = SHAPES,
    mode: str = "RGB",
    suffix: str = "png",
) -> Path:
    """Write ``root/<split>/<shape>/*``; ``counts``: images per class, by split, ``.`` for the root itself."""
    random = np.random.default_rng(0)
    for split, count in counts.items():
        for shape in shapes:
            folder = root / split / shape
            folder.mkdir(parents=True)
            for number in range(count):
                draw(random, shape, *size)[0].convert(mode).save(folder / f"{number:05}.{suffix}")
    return root


def write_list(root: Path, counts: dict[str, int], size: tuple[int, int]) -> Path:
    """Write ``root/<split>.csv`` (columns filename and label), and the images in ``root/images``."""
    random = np.random.default_rng(0)
    (root / "images").mkdir(parents=True)
    for split, count in counts.items():
        rows = [["filename", "label"]]
        for number in range(count):
            shape = SHAPES[number % len(SHAPES)]
            rows.append([f"images/{split}-{number}.png", shape])
            draw(random, shape, *size)[0].save(root / rows[-1][0])
        with (root / f"{split}.csv").open("w", newline="") as file:
            csv.writer(file).writerows(rows)
    return root


def write_boxes(root: Path, counts: dict[str, int], size: tuple[int, int]) -> Path:
    """Write ``root/<split>.json`` in the format of COCO, and the images in ``root/<split>``."""
    random = np.random.default_rng(0)
    categories = [{"id": number, "name": shape} for number, shape in enumerate(SHAPES, start=1)]
    for split, count in counts.items():
        (root / split).mkdir(parents=True)
        document: dict[str, Any] = {"images": [], "annotations": [], "categories": categories}
        for number in range(count):
            label = number % len(SHAPES)
            image, box = draw(random, SHAPES[label], *size)
            image.save(root / split / f"{number}.jpg", quality=90)
            document["images"].append({
                "id": number, "file_name": f"{number}.jpg", "width": size[0], "height": size[1]
            })  # fmt: skip
            document["annotations"].append({
                "id": number, "image_id": number, "category_id": label + 1, "bbox": box, "iscrowd": 0,
                "area": box[2] * box[3],
            })  # fmt: skip
        (root / f"{split}.json").write_text(json.dumps(document))
    return root
