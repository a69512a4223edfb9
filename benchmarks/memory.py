"""Parameters, gradients and optimizer state in a rank's memory, by strategy, compared with ZeRO's formulas.

    python -m benchmarks.memory [--ranks 4] [--quick]

A transformer of about 20 million parameters in fp32 under AdamW, on CPU ranks, one micro-batch per rank. Each
storage is counted once, at its allocated size, at three moments of the second step (in the first the
optimizer has no state yet):

- ``forward's end``, when a model is most in one place;
- ``backward's end``, when all gradients are there;
- ``step's end``, before the gradients are dropped.

What is counted: the parameters' local parts and what fully_shard has gathered of them, gradients of the model
and of what is optimized, the optimizer's tensors. Not counted: activations, and what a collective needs for
as long as it runs. The result is the peak of each part on the largest rank.

The formulas (Rajbhandari et al. 2019, arXiv:1910.02054, section 3) with P parameters of 4 bytes, N ranks that
share, and 8 bytes of Adam's state (the paper's 12 are those of mixed precision): ddp 4P + 4P + 8P; stage 1
4P + 4P + 8P/N; stage 2 4P + 4P/N + 8P/N; stage 3, which is fsdp, 16P/N. hsdp is stage 3 over the half of the
ranks that shares a copy. Writes
benchmarks/results/memory.json. ``--quick``: two ranks.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from benchmarks.measuring import conditions, parser, report, table
from hpc_train.experiment.topology.degrees import Degrees
from hpc_train.registry import load
from hpc_train.training.datasets.types import Batch
from hpc_train.training.distributed.device import Precision
from hpc_train.training.strategies.base import RankContext
from tests.forwards import PlainForward

TITLE = "Memory of a rank at its peak, measured and by ZeRO's formulas"
STRATEGIES = ("ddp", "zero1", "zero2", "fsdp", "hsdp")
PARTS = ("parameters", "gradients", "optimizer state")
_WIDTH, _LAYERS, _HEADS, _TOKENS, _WORDS = 512, 6, 8, 32, 1000


class Transformer(nn.Module):
    """Six blocks of width 512, an embedding and a head for 1,000 words."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(_WORDS, _WIDTH)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(_WIDTH, _HEADS, 4 * _WIDTH, dropout=0.0, batch_first=True)
            for _ in range(_LAYERS)
        )
        self.head = nn.Linear(_WIDTH, _WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


def _loss(model: nn.Module, batch: Batch) -> Tensor:
    return nn.functional.cross_entropy(model(batch.inputs).flatten(0, 1), batch.targets.flatten())


class Rank:
    """One rank under one strategy."""

    def __init__(self, rank: int, degrees: Degrees, name: str) -> None:
        torch.manual_seed(0)
        precision = Precision("fp32", torch.float32, torch.float32)
        placement = RankContext(rank, degrees, torch.device("cpu"), precision)
        self.strategy: Any = load("strategies", name)(placement)  # type: ignore[operator]
        self.model = Transformer()
        self.num_parameters = sum(parameter.numel() for parameter in self.model.parameters())
        self.strategy.place(self.model, list(self.model.blocks))
        self.optimizer = torch.optim.AdamW(self.strategy.optimized().values())
        tokens = torch.randint(_WORDS, (1, _TOKENS), generator=torch.Generator().manual_seed(rank))
        self.batch = Batch(0, rank, 1 / degrees.world_size, tokens, tokens, torch.ones(1, dtype=torch.bool))

    def step(self) -> dict[str, dict[str, int]]:
        """Train one step; return bytes by part at each moment."""
        found = {}

        def note(loss: Tensor) -> Tensor:
            found["forward's end"] = self.held()
            return loss

        self.strategy.accumulate([self.batch], PlainForward(_loss, scale=note))
        found["backward's end"] = self.held()
        self.optimizer.step()
        self.strategy.weights_changed()
        found["step's end"] = self.held()
        self.optimizer.zero_grad()
        return found

    def held(self) -> dict[str, int]:
        optimized = list(self.strategy.optimized().values())
        parameters = [*self.model.parameters(), *optimized, *_gathered(self.model)]
        gradients = [each.grad for each in parameters if each.is_leaf and each.grad is not None]
        state = [value for values in self.optimizer.state.values() for value in values.values()]
        return dict(zip(PARTS, (_bytes(parameters), _bytes(gradients), _bytes(state)), strict=True))


def _gathered(model: nn.Module) -> Iterator[Tensor]:
    """Yield whole parameters that fully_shard holds, of which the model shows only one kind at a time."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            group = module._get_fsdp_state()._fsdp_param_group
            for parameter in group.fsdp_params if group is not None else ():
                yield parameter.sharded_param
                yield from parameter.all_gather_outputs


def _bytes(tensors: Iterable[Tensor]) -> int:
    """Sum the storages, each once; what fully_shard has let go is a storage of no bytes."""
    local = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in local}
    return sum(storages.values())


def degrees_of(name: str, ranks: int) -> Degrees:
    if name == "ddp":
        return Degrees(replicate=ranks)
    return Degrees(replicate=2, shard=ranks // 2) if name == "hsdp" else Degrees(shard=ranks)


def predicted(name: str, ranks: int, num_parameters: int) -> dict[str, float]:
    """Return ZeRO's bytes by part."""
    shared = degrees_of(name, ranks).shard
    whole = {
        "ddp": (1, 1, 1),
        "zero1": (1, 1, shared),
        "zero2": (1, shared, shared),
        "fsdp": (shared, shared, shared),
        "hsdp": (shared, shared, shared),
    }[name]
    return {part: size * num_parameters / by for part, size, by in zip(PARTS, (4, 4, 8), whole, strict=True)}


def _rank_main(rank: int, ranks: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    found: dict[str, Any] = {}
    for name in STRATEGIES:
        one = Rank(rank, degrees_of(name, ranks), name)
        one.step()
        found[name] = one.step()
        found["parameters of the model"] = one.num_parameters
        del one
    torch.save(found, Path(folder) / f"rank-{rank}")
    dist.barrier()
    dist.destroy_process_group()


def measure(ranks: int) -> list[dict[str, Any]]:
    """Return what each rank found."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_rank_main, (ranks, folder), nprocs=ranks)
        return [torch.load(Path(folder) / f"rank-{rank}", weights_only=True) for rank in range(ranks)]


def largest(found: list[dict[str, Any]]) -> dict[str, dict[str, dict[str, int]]]:
    """Return the largest rank's bytes by strategy, moment and part."""
    return {
        name: {
            moment: {part: max(rank[name][moment][part] for rank in found) for part in PARTS}
            for moment in found[0][name]
        }
        for name in STRATEGIES
    }


def result(
    measured: Mapping[str, Mapping[str, Mapping[str, int]]], formulas: Mapping[str, Mapping[str, float]]
) -> dict[str, Any]:
    """Return the table of the results file: each part at its peak. Both arguments are bytes by strategy."""
    rows: dict[str, dict[str, float | None]] = {}
    for name, moments in measured.items():
        peaks = {part: max(each[part] for each in moments.values()) for part in PARTS}
        rows[f"{name}, measured"] = _megabytes(peaks)
        rows[f"{name}, formula"] = _megabytes(formulas[name])
    return table(TITLE, "MB", rows, remark="Bytes of allocated storages, counted once")


def _megabytes(parts: Mapping[str, float]) -> dict[str, float | None]:
    return {part: size / 1e6 for part, size in parts.items()} | {"sum": sum(parts.values()) / 1e6}


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--ranks", type=int, default=4, help="a multiple of two")
    arguments = options.parse_args()
    ranks = 2 if arguments.quick else arguments.ranks
    found = measure(ranks)
    num_parameters = found[0]["parameters of the model"]
    formulas = {name: predicted(name, ranks, num_parameters) for name in STRATEGIES}
    measured_with = conditions() | {"ranks": ranks, "parameters": num_parameters}
    report("memory", arguments, measured_with, tables=[result(largest(found), formulas)])


if __name__ == "__main__":
    main()
