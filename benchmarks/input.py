"""Images per second of CPU time that one core reads, decodes and augments, beside timm and torchvision.

    python -m benchmarks.input [--images FOLDER] [--cifar10 FOLDER] [--rounds 7] [--quick]

Each arm delivers the same batches of uint8 images (B, C, H, W) to one process with one thread and no loader
processes, so an arm's figure is what one core delivers; normalizing belongs to the device and no arm does
it. CPU time rather than wall time, because a loader process shares its node. Three sources:

- JPEG files of 500 x 375 pixels, random resized crop to 224 and flip. They are made here, each of four
  images below ``--images`` side by side, as JPEG of quality 95.
- CIFAR-10 as JPEG files of 32 x 32 pixels (``--cifar10``: ``train/<class>/*.jpg``), padded crop and flip.
- The same CIFAR-10 images in memory, padded crop and flip.

Files are also read from a pack (``data.cache``), which contains CIFAR-10's decoded pixels, and JPEG files of
500 x 375 as they are, or with ``data.cache_pixels`` decoded; a second table of each compares that with the
folder. All files fit into the page cache, so disks are not measured.

timm's arm is ``timm.data.create_loader`` up to its fast collate, which also returns uint8; torchvision's is
``ImageFolder``, v1 transforms as in its reference training, and ``DataLoader``. Rounds are interleaved and
ratios taken within a round. Writes benchmarks/results/input.json; with ``--quick``, a trial, it only prints.
"""

from __future__ import annotations

import functools
import itertools
import json
import random
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps
from timm.data.loader import create_loader
from timm.data.transforms import ToNumpy
from torch.utils.data import DataLoader, Dataset
from torchvision import transforms
from torchvision.datasets import ImageFolder

from benchmarks.measuring import (
    ROOT,
    cannot_run,
    comparison,
    conditions,
    interleaved,
    parser,
    rounds_of,
    write,
)
from hpc_train.experiment.config.schema import Experiment
from hpc_train.training.datasets.base import DataSource, TensorSplit
from hpc_train.training.datasets.batches import training_batches
from hpc_train.training.datasets.building import build_source
from hpc_train.training.datasets.sampler import Position

OURS, PACKED, PIXELS = "hpc-train", "hpc-train, packed cache", "hpc-train, packed pixels"
TIMM, TORCHVISION = "timm", "torchvision"
BATCH, CROP, PADDING = 64, 224, 4
WIDTH, HEIGHT, QUALITY = 500, 375, 95
#: Images of a round, by source: about a second for the slowest arm.
COUNTS = {"jpeg": 512, "cifar": 4096, "memory": 8192}
#: Of different pixels: a round reads them again, as epochs do.
NUM_JPEGS, NUM_CIFAR = 256, 4096
SEED = 0
CPU = torch.device("cpu")

#: One source: by arm, what returns an iterable of batches.
Arms = dict[str, Callable[[], Iterable[Any]]]


def main() -> None:
    made = parser(__doc__)
    made.add_argument(
        "--images", type=Path, default=ROOT / "data" / "camvid", help="a folder with images below it"
    )
    made.add_argument(
        "--cifar10",
        type=Path,
        default=ROOT / "data" / "cifar10-images",
        help="a folder with train/<class>/*.jpg",
    )
    options = made.parse_args()
    for option, folder in (("--images", options.images), ("--cifar10", options.cifar10)):
        if not folder.is_dir():
            cannot_run(f"{folder} does not exist; {option} names a folder with images")
    torch.set_num_threads(1)
    share, rounds = 4 if options.quick else 1, rounds_of(options)
    with tempfile.TemporaryDirectory() as folder:
        jpegs, cifar = Path(folder, "jpeg"), Path(folder, "cifar")
        make_jpegs(options.images, jpegs, NUM_JPEGS // share)
        link_images(options.cifar10, cifar, NUM_CIFAR // share)
        sources = {
            f"JPEG files of {WIDTH} x {HEIGHT}, random resized crop to {CROP}, flip": (
                folder_arms(jpegs, _RESIZED_CROP, CROP),
                COUNTS["jpeg"] // share,
            ),
            "CIFAR-10 as JPEG files, padded crop, flip": (
                folder_arms(cifar, _PADDED_CROP, None),
                COUNTS["cifar"] // share,
            ),
            "CIFAR-10 in memory, padded crop, flip": (memory_arms(cifar), COUNTS["memory"] // share),
        }
        comparisons = [
            table for title, (arms, count) in sources.items() for table in compare(title, arms, count, rounds)
        ]
    if not options.quick:
        measured_with = conditions(("torchvision", "timm", "pillow", "simplejpeg"))
        write("input", measured_with | {"threads": 1, "batch": BATCH}, comparisons)


def compare(title: str, arms: Arms, count: int, rounds: int) -> list[dict[str, Any]]:
    """Measure all arms of a source; print and return its table, and that of its pack beside its folder."""
    timed = {arm: functools.partial(images_per_cpu_second, make, count) for arm, make in arms.items()}
    for arm in timed.values():  # what is made at the first call
        arm()
    values, unit = interleaved(timed, rounds), "images per second of CPU time"
    results = [comparison(title, unit, values, TIMM)]
    if PACKED in values:
        own = {arm: values[arm] for arm in (OURS, PACKED, PIXELS) if arm in values}
        results.append(comparison(f"{title}: packed cache and folder", unit, own, OURS))
    print(json.dumps(results, indent=1), flush=True)
    return results


def images_per_cpu_second(make: Callable[[], Iterable[Any]], count: int) -> float:
    batches = iter(make())
    start = time.process_time()
    seen = sum(BATCH for _ in itertools.islice(batches, count // BATCH))
    assert seen == count, f"the arm ended after {seen} of {count} images"
    return count / (time.process_time() - start)


def folder_arms(root: Path, change: dict[str, Any], size: int | None) -> Arms:
    """Return the arms that read ``root/train/<class>/*``, as files and from a pack."""
    source = build_source(_experiment(root, change, size).data)
    cached = _experiment(root, change, size).data.model_copy(update={"cache": f"{root}-packs"})
    packed = build_source(cached, download=True)
    side = size or 32
    theirs = _torchvision_changes(size)
    arms: Arms = {
        OURS: lambda: _ours(source, _experiment(root, change, size)),
        PACKED: lambda: _ours(packed, _experiment(root, change, size)),
    }
    if size is not None:  # else the pack is of pixels anyway
        pixels = build_source(cached.model_copy(update={"cache_pixels": True}), download=True)
        arms[PIXELS] = lambda: _ours(pixels, _experiment(root, change, size))
    return arms | {
        TIMM: lambda: _timm(ImageFolder(str(root / "train")), side, size),
        TORCHVISION: lambda: _torchvision(ImageFolder(str(root / "train"), theirs)),
    }


def memory_arms(root: Path) -> Arms:
    """Return the arms that read the images of ``root`` from memory."""
    folder = ImageFolder(str(root / "train"))
    images = np.stack([np.asarray(image) for image, _ in folder])
    targets = torch.tensor(folder.targets)
    split = TensorSplit(torch.from_numpy(images).permute(0, 3, 1, 2).contiguous(), targets)
    experiment = _experiment(root, _PADDED_CROP, None)
    info = build_source(experiment.data).info
    return {
        OURS: lambda: _ours(DataSource(split, None, info), experiment),
        TIMM: lambda: _timm(InMemory(images, folder.targets), 32, None),
        TORCHVISION: lambda: _torchvision(InMemory(images, folder.targets, _torchvision_changes(None))),
    }


class InMemory(Dataset[Any]):
    """Images (N, H, W, C) as torchvision's CIFAR10 returns them: one PIL image per sample."""

    def __init__(self, images: np.ndarray[Any, Any], targets: list[int], transform: Any = None) -> None:
        self.images, self.targets, self.transform = images, targets, transform

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        image = Image.fromarray(self.images[index])
        return self.transform(image) if self.transform else image, self.targets[index]


_RESIZED_CROP = {"random_resized_crop": {}, "hflip": 0.5}
_PADDED_CROP = {"crop_padding": PADDING, "hflip": 0.5}


def _experiment(root: Path, augment: dict[str, Any], size: int | None) -> Experiment:
    data = {"name": "imagefolder", "root": str(root)}
    return Experiment.model_validate(
        {
            "name": "input",
            "seed": SEED,
            "task": "classification",
            "model": {"name": "timm/resnet18"},
            "data": {**data, "augment": augment, "image_size": size},
            "optimization": {
                "steps": 10**6,
                "global_batch_size": BATCH,
                "micro_batch_size": BATCH,
                "optimizer": {"name": "sgd", "lr": 0.1},
            },
        }
    )


def _ours(source: DataSource, experiment: Experiment) -> Iterable[Any]:
    return training_batches(source, experiment, Position(0), 10**6, 0, 1, CPU)


def _timm(dataset: Any, side: int, size: int | None) -> Iterable[Any]:
    # color_jitter and the default's two interpolations: the others don't do these.
    loader: Any = create_loader(
        dataset,
        (3, side, side),
        BATCH,
        is_training=True,
        color_jitter=None,
        interpolation="bilinear",
        num_workers=0,
        persistent_workers=False,
        device=CPU,
    )
    if size is None:
        crop = [transforms.RandomCrop(side, padding=PADDING), transforms.RandomHorizontalFlip()]
        loader.dataset.transform = transforms.Compose([*crop, ToNumpy()])
        if isinstance(dataset, InMemory):
            assert dataset.transform is loader.dataset.transform
    return _epochs(loader.loader)  # without PrefetchLoader, which normalizes on the device


def _torchvision_changes(size: int | None) -> Any:
    if size is None:
        crop: Any = transforms.RandomCrop(32, padding=PADDING)
    else:
        crop = transforms.RandomResizedCrop(size)
    return transforms.Compose([crop, transforms.RandomHorizontalFlip(), transforms.PILToTensor()])


def _torchvision(dataset: Dataset[Any]) -> Iterable[Any]:
    return _epochs(DataLoader(dataset, BATCH, shuffle=True, drop_last=True))


def _epochs(loader: Iterable[Any]) -> Iterable[Any]:
    while True:
        yield from loader


def make_jpegs(images: Path, root: Path, count: int) -> None:
    """Write ``count`` JPEG files of WIDTH x HEIGHT to ``root/train/<class>/``, of four images each."""
    files = sorted(path for path in images.rglob("*") if path.suffix.lower() in (".jpg", ".jpeg"))
    drawn = random.Random(SEED)
    half = -(-WIDTH // 2), -(-HEIGHT // 2)
    for number in range(count):
        whole = Image.new("RGB", (WIDTH, HEIGHT))
        for quarter in range(4):
            with Image.open(drawn.choice(files)) as image:
                part = ImageOps.fit(image.convert("RGB"), half)
            whole.paste(part, (quarter % 2 * half[0], quarter // 2 * half[1]))
        path = root / "train" / f"class{number % 4}" / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        whole.save(path, quality=QUALITY)


def link_images(cifar10: Path, root: Path, count: int) -> None:
    """Link the first ``count`` images of CIFAR-10's classes in turn to ``root/train/<class>/``."""
    for folder in sorted(path for path in (cifar10 / "train").iterdir() if path.is_dir()):
        target = root / "train" / folder.name
        target.mkdir(parents=True)
        for file in sorted(folder.glob("*.jpg"))[: -(-count // 10)]:
            (target / file.name).symlink_to(file.absolute())


if __name__ == "__main__":
    main()
