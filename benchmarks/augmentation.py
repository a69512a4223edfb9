"""Flips and padded crops of a batch of CIFAR-10's size, compared with torchvision's, one sample at a time.

    python -m benchmarks.augmentation [--rounds 21] [--quick]

Ours draws each sample's numbers from its own counter and changes the batch as a whole; torchvision's v2
transforms take one image at a time, as a Dataset's ``__getitem__`` calls them, and are stacked to the same
batch. uint8 tensors on the CPU, one thread. Writes benchmarks/results/augmentation.json.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable

import torch
from torch import Tensor
from torchvision.transforms import v2

from benchmarks.measuring import comparison, conditions, interleaved, parser, report, rounds_of
from hpc_train.experiment.config.training_sections import AugmentConfig
from hpc_train.training.datasets.augment import Augmentation

NUM_SAMPLES, IMAGE_SIZE, PADDING = 256, 32, 4
OURS, THEIRS = "hpc-train, a batch at a time", "torchvision v2, one sample at a time"
TITLE = "Flip and padded crop, CIFAR-10's image size"
#: Batches that one timing takes, so that it lasts tens of milliseconds.
REPEATS = 10


def main() -> None:
    arguments = parser(__doc__, rounds=21).parse_args()
    torch.set_num_threads(1)
    arms = _arms()
    for arm in arms.values():  # what is made at the first call
        arm()
    timed = {name: functools.partial(_seconds_per_sample, arm) for name, arm in arms.items()}
    values = interleaved(timed, rounds_of(arguments))
    measured_with = conditions(["torchvision"]) | {
        "threads of each arm": 1,
        "batch": [NUM_SAMPLES, 3, IMAGE_SIZE, IMAGE_SIZE],
    }
    compared = comparison(TITLE, "seconds per sample", values, THEIRS)
    report("augmentation", arguments, measured_with, [compared])


def _arms() -> dict[str, Callable[[], Tensor]]:
    """Return what is measured: each call makes one augmented batch."""
    generator = torch.Generator().manual_seed(0)
    shape = (NUM_SAMPLES, 3, IMAGE_SIZE, IMAGE_SIZE)
    images = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
    samples = torch.arange(NUM_SAMPLES)
    ours = Augmentation(AugmentConfig(hflip=0.5, crop_padding=PADDING), None, seed=0)
    theirs = v2.Compose([v2.RandomHorizontalFlip(0.5), v2.RandomCrop(IMAGE_SIZE, padding=PADDING)])
    alone = list(images)
    return {
        THEIRS: lambda: torch.stack([theirs(image) for image in alone]),
        OURS: lambda: ours(images, 0, samples),
    }


def _seconds_per_sample(arm: Callable[[], Tensor]) -> float:
    start = time.perf_counter()
    for _ in range(REPEATS):
        arm()
    return (time.perf_counter() - start) / (REPEATS * NUM_SAMPLES)


if __name__ == "__main__":
    main()
