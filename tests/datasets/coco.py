"""A small data set in COCO's format: grey images with bright rectangles, which are what to detect."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

SIDE = 32
#: Not in order, and with gaps.
CATEGORIES = [{"id": 7, "name": "bright"}, {"id": 3, "name": "dark"}]


def write_coco(root: Path, train: int = 8, val: int = 5, side: int = SIDE) -> Path:
    """Write images of ``side`` pixels; image i has i mod 3 boxes, so that some have none."""
    for part, count, seed in (("train", train, 0), ("val", val, 1)):
        generator = np.random.default_rng(seed)
        (root / part).mkdir(parents=True)
        document: dict[str, Any] = {"images": [], "annotations": [], "categories": CATEGORIES}
        for number in range(count):
            pixels = generator.integers(90, 110, (side, side, 3), dtype=np.uint8)
            for _ in range(number % 3):
                left, top, width, height = (int(each) for each in generator.integers(side // 4, side // 2, 4))
                label = int(generator.integers(2))
                pixels[top : top + height, left : left + width] = (30, 220)[label]
                document["annotations"].append({
                    "id": len(document["annotations"]) + 100,
                    "image_id": 10 * number,
                    "category_id": (3, 7)[label],
                    "bbox": [left, top, width, height],
                    "area": width * height,
                    "iscrowd": 0,
                })  # fmt: skip
            name = f"{number}.png"
            Image.fromarray(pixels).save(root / part / name)
            document["images"].append({"id": 10 * number, "file_name": name, "width": side, "height": side})
        document["annotations"].reverse()  # in another order than the images
        write(root, part, document)
    return root


def read(root: Path, part: str = "train") -> dict[str, Any]:
    document: dict[str, Any] = json.loads((root / f"{part}.json").read_text())
    return document


def write(root: Path, part: str, document: dict[str, Any]) -> None:
    (root / f"{part}.json").write_text(json.dumps(document))
