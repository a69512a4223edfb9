"""Large data cost a rank little memory: the data of benchmarks/data_scale.py. No test asserts a time."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks import data_scale
from hpc_train.experiment.config.training_sections import DataConfig

#: A fifth of the benchmark's million samples, whose lists take seconds to write.
SHARE = 5
#: Megabytes that opening the data may cost each rank: 200 with a million samples.
LIMIT_MB = 200 / SHARE


@pytest.mark.slow
@pytest.mark.parametrize("make", data_scale.CASES.values(), ids=lambda make: make.__name__)
def test_opening_large_data_costs_a_rank_little_memory(
    make: Callable[[Path, int], DataConfig], tmp_path: Path
) -> None:
    data = make(tmp_path / "data", SHARE)
    found = data_scale.opened(data)
    assert found[data_scale.SAMPLES] >= data_scale.NUM_SAMPLES // SHARE
    assert found[data_scale.PEAK_MB] < LIMIT_MB


def test_memory_that_is_freed_again_counts_at_its_peak() -> None:
    block = b"x" * 1_000_000
    memory = data_scale.MemoryGrowth()
    with mmap.mmap(-1, 64 * len(block)) as pages:  # what malloc is given back may stay
        for _ in range(64):
            pages.write(block)
    kept, peak = memory.megabytes()
    assert kept < 32 < 60 < peak
