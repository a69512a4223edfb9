"""Seconds and memory that a rank needs to open large data: 10 GB of tokens, indexes of a million samples.

    python -m benchmarks.data_scale [--rounds 7] [--quick]

- 10 GB of token shards, 50 of 100 million tokens each with headers and an index as ``prepare`` writes them,
  and the same amount as one file of nanoGPT. The files are sparse: what is not read takes no disk space.
- ``image_list``, ``webdataset`` and ``coco`` with a million samples and their indexes; those of ``coco`` have
  two boxes each.
- ``synthetic`` with a million samples.

A process with a rank's imports opens the data by ``build_source`` and then draws its first micro-batch (of
tokens, reads it), which needs the permutation of the whole epoch. ``open`` is the time of the former, ``first
batch`` of the latter; memory is the resident memory added by both, at their end and at its peak. Medians of
the rounds, each in a process of its own. Writes benchmarks/results/data_scale.json; ``--quick``: a hundredth
of the samples.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from benchmarks.measuring import conditions, interleaved, parser, report, rounds_of, table
from hpc_train.experiment.config.training_sections import DataConfig
from hpc_train.experiment.data_facts.listed_data import webdataset_files
from hpc_train.experiment.data_facts.token_shards import INDEX, header_of, index_digest, size_of_shard
from hpc_train.training.datasets.base import ArraySplit
from hpc_train.training.datasets.building import build_source
from hpc_train.training.datasets.index_files import Index, Layout, ensure_index, packed_texts
from hpc_train.training.datasets.sampler import MicroBatchSampler, Position

TITLE = "Opening large data"
Result = TypeVar("Result")
SAMPLES, SECONDS, BATCH_SECONDS = "samples", "open, s", "first batch, s"
KEPT_MB, PEAK_MB = "memory, MB", "peak memory, MB"
NUM_SAMPLES = 1_000_000
NUM_SHARDS, SHARD_TOKENS = 50, 100_000_000
QUICK_SHARE = 100
BATCH, SEQUENCE = 32, 1024
NUM_CLASSES, SAMPLES_PER_TAR = 1000, 10_000


def main() -> None:
    arguments = parser(__doc__).parse_args()
    share = QUICK_SHARE if arguments.quick else 1
    with tempfile.TemporaryDirectory() as folder:
        made = {name: _forked(make, Path(folder) / make.__name__, share) for name, make in CASES.items()}
        timed = {name: functools.partial(_forked, opened, data) for name, data in made.items()}
        values = interleaved(timed, rounds_of(arguments))
    rows = {name: _medians(of_case) for name, of_case in values.items()}
    remark = f"Medians of {rounds_of(arguments)} rounds"
    report("data_scale", arguments, conditions(["numpy"]), tables=[table(TITLE, "", rows, remark=remark)])


def _forked(function: Callable[..., Result], *arguments: Any) -> Result:
    """Return what the function returns in a process of its own, which this one's imports are in."""
    with ProcessPoolExecutor(1, get_context("fork")) as pool:
        return pool.submit(function, *arguments).result()


def _medians(found: list[dict[str, float]]) -> dict[str, float | None]:
    columns = (SECONDS, BATCH_SECONDS, KEPT_MB, PEAK_MB)
    return {column: statistics.median(each[column] for each in found) for column in columns}


def opened(data: DataConfig) -> dict[str, float]:
    """Open the data and draw the first micro-batch in this process; return seconds and megabytes."""
    build_source(DataConfig(name="synthetic", args={"num_samples": 8}))  # what is imported at the first call
    memory = MemoryGrowth()
    begin = time.perf_counter()
    source = build_source(data)
    opened_at = time.perf_counter()
    sampler = MicroBatchSampler(
        len(source.train),
        global_batch_size=BATCH,
        micro_batch_size=BATCH,
        seed=0,
        position=Position(0),
        total_steps=10,
    )
    slot = next(iter(sampler))
    if data.name == "tokens":
        assert isinstance(source.train, ArraySplit)
        source.train.batch(slot.indices)
    end = time.perf_counter()
    kept, peak = memory.megabytes()
    return {
        SAMPLES: len(source.train),
        SECONDS: opened_at - begin,
        BATCH_SECONDS: end - opened_at,
        KEPT_MB: kept,
        PEAK_MB: peak,
    }


class MemoryGrowth:
    """Resident memory of this process that is added from now on."""

    def __init__(self) -> None:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # what was freed would be used again, and not count
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak is that from now on
        self._before = _resident_kb("VmRSS")

    def megabytes(self) -> tuple[float, float]:
        """Return what was added and is there now, and what was added at the peak."""
        now, peak = _resident_kb("VmRSS") - self._before, _resident_kb("VmHWM") - self._before
        return now * 1024 / 1e6, peak * 1024 / 1e6


def _resident_kb(name: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def token_shards(root: Path, share: int = 1) -> DataConfig:
    """Write sparse shards with their index below ``root``."""
    per_shard = SHARD_TOKENS // share
    what = {"dtype": "uint16", "vocabulary_size": 50257, "tokenizer": "gpt2"}
    entry = {"tokens": per_shard, "documents": 0, "xxh3_128": ""}
    (folder := root / "tokens" / "gpt2-0123456789ab").mkdir(parents=True)
    names = [f"train-{number:05d}.tokens" for number in range(NUM_SHARDS)]
    for name in names:
        (folder / name).write_bytes(header_of({**what, **entry}))
        os.truncate(folder / name, size_of_shard(per_shard, 0, "uint16"))
    index = {
        **what,
        "end_of_document": 50256,
        "characters": None,
        "parts": {"train": [{"file": name, **entry} for name in names]},
    }
    index["fingerprint"] = index_digest(index)
    (folder / INDEX).write_text(json.dumps(index), encoding="utf-8")
    return _tokens(root)


def one_token_file(root: Path, share: int = 1) -> DataConfig:
    """Write one sparse file of tokens without a header, as nanoGPT does."""
    root.mkdir()
    with (root / "train.bin").open("wb") as file:
        file.seek(2 * NUM_SHARDS * SHARD_TOKENS // share - 4096)
        file.write(b"\1\0" * 2048)  # zeros at the end are taken for an interrupted write
    return _tokens(root)


def _tokens(root: Path) -> DataConfig:
    return DataConfig(name="tokens", root=str(root), args={"sequence_length": SEQUENCE})


def image_list(root: Path, share: int = 1) -> DataConfig:
    """Write a list and its index; the images do not exist."""
    root.mkdir()
    rows = (f"{name},{name[6:15]}\n" for name in _image_names(NUM_SAMPLES // share))
    (root / "train.csv").write_text("path,target\n" + "".join(rows), encoding="utf-8")
    data = DataConfig(name="image_list", root=str(root), cache=str(root / "cache"))
    build_source(data, download=True)
    return data


def webdataset(root: Path, share: int = 1) -> DataConfig:
    """Write the index of sparse shards, as if ``prepare`` had read them."""
    root.mkdir()
    count = NUM_SAMPLES // share
    num_tars = count // SAMPLES_PER_TAR or 1
    for number in range(num_tars):
        (root / f"train-{number:03d}.tar").touch()
    data = DataConfig(
        name="webdataset",
        root=str(root),
        cache=str(root / "cache"),
        args={"train": f"train-{{000..{num_tars - 1:03d}}}.tar"},
    )
    numbers = np.arange(count, dtype=np.int64)
    arrays = packed_texts([os.fsencode(name) for name in _image_names(count)]) | {
        "shards": (numbers * num_tars // count).astype(np.int32),
        "offsets": numbers * 110_592,
        "sizes": np.full(count, 110_000, dtype=np.int64),
        "targets": numbers % NUM_CLASSES,
    }
    classes = tuple(f"n{number:08d}" for number in range(NUM_CLASSES))
    layout = Layout(frozenset({"train"}), frozenset(arrays))
    ensure_index(data, webdataset_files(data), layout, lambda: Index({"train": arrays}, classes))
    return data


def coco(root: Path, share: int = 1) -> DataConfig:
    """Write the index of an empty ``train.json``, as if ``prepare`` had parsed it."""
    (root / "train").mkdir(parents=True)
    (root / "train.json").touch()
    data = DataConfig(name="coco", root=str(root), cache=str(root / "cache"))
    count = NUM_SAMPLES // share
    numbers = np.arange(count, dtype=np.int64)
    arrays = {
        "names": np.char.mod("%012d.jpg", numbers).astype(np.bytes_),
        "targets": numbers,
        "sides": np.full((count, 2), 100, dtype=np.int64),
        "corners": np.tile(np.array([0, 0, 50, 60], np.float32), (2 * count, 1)),
        "labels": np.ones(2 * count, dtype=np.int64),
        "crowds": np.zeros(2 * count, dtype=np.int64),
        "starts": np.arange(0, 2 * count + 1, 2),
    }
    layout = Layout(frozenset({"train"}), frozenset(arrays))
    ensure_index(data, [root / "train.json"], layout, lambda: Index({"train": arrays}, ("object",)))
    return data


def synthetic(root: Path, share: int = 1) -> DataConfig:
    """Return a data set that is computed, not read."""
    return DataConfig(name="synthetic", args={"num_samples": NUM_SAMPLES // share})


def _image_names(count: int) -> list[str]:
    """Return names as ImageNet's: ``train/n00000007/n00000007_1007.JPEG``."""
    classes = (f"n{number % NUM_CLASSES:08d}" for number in range(count))
    return [f"train/{each}/{each}_{number}.JPEG" for number, each in enumerate(classes)]


CASES: dict[str, Callable[..., DataConfig]] = {
    "tokens: 10 GB in 50 shards": token_shards,
    "tokens: 10 GB in one file": one_token_file,
    "image_list: 1,000,000 samples": image_list,
    "webdataset: 1,000,000 samples": webdataset,
    "coco: 1,000,000 samples": coco,
    "synthetic: 1,000,000 samples": synthetic,
}


if __name__ == "__main__":
    main()
