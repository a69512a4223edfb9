"""Flips and padded crops of a batch of CIFAR-10's size beside torchvision's, one sample at a time.

    python -m benchmarks.augmentation [--rounds 21]

Ours draws each sample's numbers from its own counter and changes the batch as a whole; torchvision's v2
transforms take one image at a time, as a Dataset's ``__getitem__`` calls them, and are stacked to the same
batch. uint8 tensors on the CPU, one thread. Rounds are interleaved and each ratio is taken within its round,
so that a busy machine disturbs both alike. Writes the medians to benchmarks/results/augmentation.json.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import time
from collections.abc import Callable
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torchvision.transforms import v2

from hpc_train.config.training_sections import AugmentConfig
from hpc_train.datasets.augment import Augmentation

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results" / "augmentation.json"
NUM_SAMPLES, IMAGE_SIZE, PADDING = 256, 32, 4
OURS, THEIRS = "hpc-train, a batch at a time", "torchvision v2, a sample at a time"
#: Batches that one timing takes, so that it lasts tens of milliseconds.
REPEATS = 10
MIN_ROUNDS = 7


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=21)
    rounds = max(parser.parse_args().rounds, MIN_ROUNDS)
    torch.set_num_threads(1)
    arms = _arms()
    for arm in arms.values():  # what is made at the first call
        arm()
    seconds = [_round(arms) for _ in range(rounds)]
    ratios = [each[THEIRS] / each[OURS] for each in seconds]
    result = _conditions(rounds) | {
        "median us a sample": {
            arm: round(statistics.median(s[arm] for s in seconds) * 1e6, 2) for arm in arms
        },
        "torchvision's time over ours": {
            "median": round(statistics.median(ratios), 2),
            "lowest": round(min(ratios), 2),
            "highest": round(max(ratios), 2),
        },
    }
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    RESULTS.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result, indent=1))


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
        OURS: lambda: ours(images, 0, samples),
        THEIRS: lambda: torch.stack([theirs(image) for image in alone]),
    }


def _round(arms: dict[str, Callable[[], Tensor]]) -> dict[str, float]:
    """Time every arm once, in random order; return its seconds a sample."""
    return {arm: _seconds_a_sample(arms[arm]) for arm in random.sample(list(arms), len(arms))}


def _seconds_a_sample(arm: Callable[[], Tensor]) -> float:
    start = time.perf_counter()
    for _ in range(REPEATS):
        arm()
    return (time.perf_counter() - start) / (REPEATS * NUM_SAMPLES)


def _conditions(rounds: int) -> dict[str, Any]:
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": f"cpu: {_processor()}",
        "cores": len(os.sched_getaffinity(0)),
        "threads": torch.get_num_threads(),
        "versions": {"python": platform.python_version()}
        | {name: metadata.version(name) for name in ("hpc-train", "torch", "torchvision")},
        "rounds": rounds,
        "batch": [NUM_SAMPLES, 3, IMAGE_SIZE, IMAGE_SIZE],
    }


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown"
    )


if __name__ == "__main__":
    main()
