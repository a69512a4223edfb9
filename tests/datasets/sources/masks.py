"""Folders of small images and masks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

IGNORED = 255


def write_folder(
    root: Path,
    *,
    num_classes: int = 3,
    sides: tuple[int, int] = (10, 14),
    ignored: int = IGNORED,
    **counts: int,
) -> Path:
    """Write ``counts`` images per split; a pixel's class is visible in its color, its border is ignored."""
    for split, count in counts.items():
        for number in range(count):
            random = np.random.default_rng([number, *split.encode()])
            mask = random.integers(0, num_classes, sides, dtype=np.uint8)
            image = random.integers(0, 40, (*sides, 3), dtype=np.uint8)
            image[..., 0] += (mask * 200 // num_classes).astype(np.uint8)
            mask[0] = ignored
            save(root / split / "images" / f"{number:03d}.png", image)
            save(root / split / "masks" / f"{number:03d}.png", mask)
    return root


def save(path: Path, pixels: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)
