"""Sequences of tokens per second of CPU time, beside nanoGPT's loader.

    python -m benchmarks.token_windows [--rounds 7] [--quick]

Both arms deliver batches of inputs and targets, int64 (B, T), of the same file of random uint16 tokens as
nanoGPT's ``prepare.py`` writes, in one process with one thread and no loader processes. nanoGPT's arm is its
``get_batch``: a memory map, random places, a copy per sequence for inputs and one for targets. Ours visits
each sequence once per epoch, in an order that a resume continues, and checks that tokens are of the
vocabulary. Two sizes: those of nanoGPT's GPT-2 and of its Shakespeare model. The file is in the page cache.
Rounds are interleaved and ratios taken within a round. Writes benchmarks/results/token_windows.json; with
``--quick``, a trial, it only prints.
"""

from __future__ import annotations

import functools
import itertools
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.measuring import comparison, conditions, interleaved, parser, report, rounds_of
from hpc_train.experiment.config.schema import Experiment
from hpc_train.registry import load
from hpc_train.training.datasets.batches import training_batches
from hpc_train.training.datasets.building import build_source
from hpc_train.training.datasets.sampler import Position

OURS, PEER = "hpc-train", "nanoGPT's get_batch"
#: Title → sequences per batch and tokens per sequence.
SIZES = {
    "Tokens: batches of 12 x 1024, as for GPT-2": (12, 1024),
    "Tokens: batches of 64 x 256, as for Shakespeare": (64, 256),
}
NUM_TOKENS, VOCABULARY = 100_000_000, 50257
#: Of a round: about a second.
NUM_BATCHES = 3000
CPU = torch.device("cpu")


def main() -> None:
    arguments = parser(__doc__).parse_args()
    torch.set_num_threads(1)
    share = 20 if arguments.quick else 1
    with tempfile.TemporaryDirectory() as folder:
        write_tokens(Path(folder) / "train.bin", NUM_TOKENS // share)
        comparisons = [
            compare(title, Path(folder), *size, NUM_BATCHES // share, rounds_of(arguments))
            for title, size in SIZES.items()
        ]
    report("token_windows", arguments, conditions(["numpy"]) | {"threads": 1}, comparisons)


def write_tokens(path: Path, count: int) -> None:
    generator = np.random.default_rng(0)
    generator.integers(VOCABULARY, size=count, dtype=np.uint16).tofile(path)


def compare(title: str, root: Path, batch: int, length: int, count: int, rounds: int) -> dict[str, Any]:
    """Measure both arms; return their table."""
    arms = {OURS: _ours(root, batch, length), PEER: lambda: _nanogpt(root / "train.bin", batch, length)}
    timed = {
        arm: functools.partial(sequences_per_cpu_second, make, count, batch) for arm, make in arms.items()
    }
    for arm in timed.values():  # what is made at the first call, and pages of the file
        arm()
    return comparison(title, "sequences per second of CPU time", interleaved(timed, rounds), PEER)


def sequences_per_cpu_second(make: Callable[[], Iterable[Any]], count: int, batch: int) -> float:
    batches = iter(make())
    start = time.process_time()
    for inputs, targets in itertools.islice(batches, count):
        assert inputs.shape == targets.shape and len(inputs) == batch
    return count * batch / (time.process_time() - start)


def _ours(root: Path, batch: int, length: int) -> Callable[[], Iterator[tuple[Tensor, Tensor]]]:
    experiment = Experiment.model_validate(
        {
            "name": "input",
            "seed": 0,
            "task": "causal_lm",
            "model": {"name": "gpt"},
            "data": {"name": "tokens", "root": str(root), "args": {"sequence_length": length}},
            "optimization": {
                "steps": 10**6,
                "global_batch_size": batch,
                "micro_batch_size": batch,
                "optimizer": {"name": "adamw", "lr": 0.001},
            },
        }
    )
    source = build_source(experiment.data)
    make_task: Any = load("tasks", "causal_lm")
    spec = make_task(experiment, source.info).target_spec

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        steps = training_batches(source, experiment, Position(0), 10**6, 0, 1, CPU, target_spec=spec)
        for _, micro_batches in steps:
            for each in micro_batches:
                yield each.inputs, each.targets

    return batches


def _nanogpt(path: Path, batch_size: int, block_size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield what nanoGPT's train.py reads: its ``get_batch`` without the copy to a GPU."""
    while True:
        # Recreated for every batch, as there: https://stackoverflow.com/questions/45132940
        data = np.memmap(path, dtype=np.uint16, mode="r")
        ix = torch.randint(len(data) - block_size, (batch_size,))
        x = torch.stack([torch.from_numpy((data[i : i + block_size]).astype(np.int64)) for i in ix])
        y = torch.stack([torch.from_numpy((data[i + 1 : i + 1 + block_size]).astype(np.int64)) for i in ix])
        yield x, y


if __name__ == "__main__":
    main()
