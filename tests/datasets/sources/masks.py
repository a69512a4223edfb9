"""Folders of small images and masks."""

from __future__ import annotations

import struct
import zlib
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


def png(rows: list[list[int]], bits: int, channels: int = 1) -> bytes:
    """Return a PNG file with ``bits`` per channel, gray or RGB; Pillow writes gray of 8 and 16 bits only.

    ``rows``: the values of each row, pixel by pixel.
    """

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    texts = ("".join(f"{number:0{bits}b}" for number in row) for row in rows)
    packed = b"".join(
        b"\0" + int(text.ljust(-(-len(text) // 8) * 8, "0"), 2).to_bytes(-(-len(text) // 8)) for text in texts
    )
    color = {1: 0, 3: 2}[channels]
    header = struct.pack(">IIBBBBB", len(rows[0]) // channels, len(rows), bits, color, 0, 0, 0)
    parts = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(packed)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + parts
