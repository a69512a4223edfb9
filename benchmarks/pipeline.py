"""The fraction of a step in which a pipeline's ranks wait, measured and by the formula.

    python -m benchmarks.pipeline [--ranks 2] [--steps 7] [--quick]

Four equal blocks, an MLP of width 256 each, in fp32 over CPU ranks of one thread: all stages take equally
long. In each step a rank counts the time that its stages compute, forward and backward; the bubble is what is
left of the step, from a barrier to the last rank's end, as a mean over ranks. The median of ``--steps`` steps
is shown, after two that are not counted. Both times are of the same step, so a slower machine changes neither
side alone; one with fewer free cores than ranks does, and makes the bubble larger.

What is measured includes the sends and the reduction of gradients at a step's end, which the formulas
exclude (``topology.degrees.bubble``). Writes benchmarks/results/pipeline.json.
``--quick``: two steps, and fewer slots.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

from benchmarks.measuring import conditions, parser, report, table
from hpc_train.experiment.config.training_sections import ParallelConfig
from hpc_train.experiment.topology.degrees import Degrees, bubble, problem_of_schedule
from hpc_train.registry import load
from hpc_train.training.datasets.types import Batch
from hpc_train.training.distributed.device import Precision
from hpc_train.training.strategies.base import RankContext
from hpc_train.training.strategies.pipeline import MicroBatchStage
from tests.forwards import PlainForward

TITLE = "Pipeline bubble, measured and by the formula"
SLOTS = (1, 2, 4, 8, 16)
QUICK_SLOTS, QUICK_STEPS = (1, 2), 2
SCHEDULES: dict[str, dict[str, Any]] = {
    "gpipe": {"strategy": "pipeline", "schedule": "gpipe"},
    "1f1b": {"strategy": "pipeline", "schedule": "1f1b"},
    "interleaved": {"strategy": "pipeline", "schedule": "interleaved"},
    "split": {"strategy": "split"},
}
_WIDTH, _ROWS, _BLOCKS, _WARM_UP = 256, 512, 4, 2


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(_WIDTH, 4 * _WIDTH), nn.Linear(4 * _WIDTH, _WIDTH)

    def forward(self, rows: Tensor) -> Tensor:
        return rows + self.down(nn.functional.relu(self.up(rows)))


class Blocks(nn.Module):
    """Blocks alone, so that stages are equal."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(_BLOCKS))

    def forward(self, rows: Tensor) -> Tensor:
        for layer in self.layers:
            rows = layer(rows)
        return rows


def _loss(model: nn.Module, batch: Batch) -> Tensor:
    return model(batch.inputs).square().mean()


class Busy:
    """Sums the time that the functions wrapped by it run."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **keys: Any) -> Any:
            began = time.perf_counter()
            try:
                return function(*args, **keys)
            finally:
                self.seconds += time.perf_counter() - began

        return wrapped


def _waiting(rank: int, ranks: int, parallel: ParallelConfig, slots: int, steps: int, busy: Busy) -> float:
    """Return the median over steps of the mean over ranks of the part of a step that is not busy."""
    precision = Precision("fp32", torch.float32, torch.float32)
    placement = RankContext(rank, Degrees(pipeline=ranks), torch.device("cpu"), precision, parallel=parallel)
    strategy: Any = load("strategies", parallel.strategy)(placement)  # type: ignore[operator]
    torch.manual_seed(0)
    model = Blocks()
    strategy.place(model, list(model.layers))
    rows = torch.randn(_ROWS, _WIDTH)
    valid = torch.ones(_ROWS, dtype=torch.bool)
    batches = [Batch(0, number, 1 / slots, rows, rows, valid) for number in range(slots)]
    shares = []
    for _ in range(_WARM_UP + steps):
        dist.barrier()
        busy.seconds, began = 0.0, time.perf_counter()
        strategy.accumulate(batches, PlainForward(_loss))
        own = busy.seconds
        dist.barrier()
        share = torch.tensor(1 - own / (time.perf_counter() - began))
        dist.all_reduce(share)
        shares.append(share.item() / ranks)
        for value in strategy.optimized().values():
            value.grad = None
    return statistics.median(shares[_WARM_UP:])


def _rank_main(rank: int, ranks: int, steps: int, slots: Sequence[int], folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    busy = Busy()
    for name in ("forward_one_chunk", "backward_one_chunk"):
        setattr(MicroBatchStage, name, busy.timed(getattr(MicroBatchStage, name)))
    found: dict[str, dict[int, float]] = {}
    for name, keys in SCHEDULES.items():
        parallel = ParallelConfig(**keys)
        fitting = [each for each in slots if problem_of_schedule(parallel, ranks, each) is None]
        found[name] = {each: _waiting(rank, ranks, parallel, each, steps, busy) for each in fitting}
    torch.save(found, Path(folder) / f"rank-{rank}")
    dist.barrier()
    dist.destroy_process_group()


def measure(ranks: int, steps: int, slots: Sequence[int]) -> dict[str, dict[int, float]]:
    """Return the bubble by schedule and slots."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_rank_main, (ranks, steps, slots, folder), nprocs=ranks)
        found: dict[str, dict[int, float]] = torch.load(Path(folder) / "rank-0", weights_only=True)
        return found


def result(found: Mapping[str, Mapping[int, float]], ranks: int) -> dict[str, Any]:
    """Return the table of the results file. ``found``: what ``measure`` returns."""
    rows: dict[str, dict[str, float | None]] = {}
    for name, by_slots in found.items():
        parallel = ParallelConfig(**SCHEDULES[name])
        rows[f"{name}, measured"] = {f"S = {slots}": share for slots, share in by_slots.items()}
        rows[f"{name}, formula"] = {f"S = {slots}": bubble(parallel, ranks, slots) for slots in by_slots}
    return table(TITLE, "fraction of a step", rows, remark="Medians of several steps of one run")


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--ranks", type=int, default=2, help="1, 2 or, except for interleaved, 4")
    options.add_argument("--steps", type=int, default=7)
    arguments = options.parse_args()
    steps = QUICK_STEPS if arguments.quick else arguments.steps
    measured_with = conditions() | {"ranks": arguments.ranks, "threads of each rank": 1}
    found = measure(arguments.ranks, steps, QUICK_SLOTS if arguments.quick else SLOTS)
    report("pipeline", arguments, measured_with, tables=[result(found, arguments.ranks)])


if __name__ == "__main__":
    main()
