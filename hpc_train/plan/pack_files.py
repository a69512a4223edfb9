"""The names of packs: image folders packed into one file by ``hpc-train prepare``, below ``data.cache``.

A pack's name contains a hash of its source's resolved location and fingerprint, so other images have another
file. No torch: ``plan`` shows them too; ``datasets.packed`` reads them.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

from hpc_train.config.training_sections import DataConfig
from hpc_train.data_facts.by_name import data_facts
from hpc_train.errors import BadFileError
from hpc_train.paths import expanded
from hpc_train.plan.input_files import image_fingerprint


def pack_files(data: DataConfig, limit_s: float | None = None) -> list[Path] | None:
    """Return the possible packs of the current content of ``data.root``, whether they exist or not.

    The first contains small decoded images of one size; the other, decoded images of any size with
    ``data.cache_pixels``, else the image files. Decoded images depend on the number of channels; the choice
    of images of any size to decode depends on the size of random crops, which is in the name. None if the
    images can't be listed within ``limit_s``, or are not on this machine. Raises BadFileError if an image is
    missing or may not be read, OSError if the disk fails.
    """
    assert data.cache is not None and data.root is not None, "the file has both keys"
    root = os.path.realpath(expanded(data.root))
    try:
        fingerprint = image_fingerprint(root, limit_s)
    except (FileNotFoundError, PermissionError) as error:
        raise BadFileError(
            f"data.root: {error.filename} can't be read: {error.strerror}; fix it or remove it"
        ) from error
    if "images" not in fingerprint:
        return None
    digest = hashlib.sha256(json.dumps([root, fingerprint], sort_keys=True).encode()).hexdigest()[:20]
    decoded = f"{digest}-{data_facts(data.name).channels(data)}{_conversion(data)}"
    names = f"{decoded}.pack", f"{decoded}-{_pixels(data)}.pack" if data.cache_pixels else f"{digest}.pack"
    return [expanded(data.cache) / name for name in names]


def _conversion(data: DataConfig) -> str:
    """Return the part of the name for keys that change the pixels of decoded images; empty without them."""
    scaled = "" if data.value_range is None else "-{}to{}".format(*data.value_range)
    return scaled + ("-upright" if data.exif_orientation == "apply" else "")


def _pixels(data: DataConfig) -> str:
    crops_to = data.height_and_width if data.augment.random_resized_crop is not None else None
    return "pixels" if crops_to is None else f"pixels{min(crops_to)}"


def missing_pack(data: DataConfig) -> tuple[str, str]:
    """Return the problem and the remedy if no pack matches the current ``data.root``."""
    message = f"{data.cache} has no pack of the images that {data.root} contains now"
    return message, "run `hpc-train prepare` with this file, which writes it"
