"""What a checkpoint costs: hpc-train beside a raw write, ``torch.save`` and DCP, on the same disk.

    python -m benchmarks.checkpoint [--rounds 5] [--folder PATH]

86 million parameters with Adam (a ViT-B of plain torch): 1.03 GB of state. Each round goes through all arms:

- ``raw``: as many bytes from memory to a new file, with fsync;
- ``torch.save`` of the same state, with fsync, which is how long a plain loop stands still;
- ``ours, between``: ``Checkpointer.save``, hashes, manifest, rename and the removal of the oldest included;
- ``ours, beside``: ``begin``, a real forward and backward, ``wait_staged``, ``optimizer.step``. What counts
  is how long the loop stood still in ``begin`` and ``wait_staged`` (``checkpoint_stall_s``);
- ``ours, nothing beside``: the same with nothing in between, as if a step took no time;
- ``DCP``: ``async_save`` by its defaults: how long the call takes, after which training may go on.

The arms' order changes by round, the disk is left alone before each until all is written, and a first round
is not counted. Ratios are taken within a round. Writes benchmarks/results/checkpoint.json; with fewer rounds
than three (a trial) it only prints.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

from hpc_train.checkpoint.checkpointer import Checkpointer, Save
from hpc_train.checkpoint.state import TrainingState
from hpc_train.distributed.precision import Precision
from hpc_train.paths import RunPaths
from hpc_train.strategies.base import RankContext
from hpc_train.strategies.ddp import DDPStrategy
from hpc_train.topology.degrees import Degrees

RESULTS = Path(__file__).parent / "results" / "checkpoint.json"
_CHUNK_BYTES = 8 << 20
#: Ratio → the maximum allowed.
TARGETS = {
    "stall, ours / torch.save": 0.05,
    "stall, ours / DCP": 0.5,
    "whole save, ours / raw": 1.3,
}


class VisionTransformer(nn.Module):
    """ViT-B/16's shapes: 12 blocks of width 768, 196 patches, 1,000 classes."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 768, 16, 16)
        self.positions = nn.Parameter(torch.zeros(1, 196, 768))
        block = nn.TransformerEncoderLayer(
            768, 12, 3072, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(block, 12, enable_nested_tensor=False)
        self.head = nn.Linear(768, 1000)

    def forward(self, images: Tensor) -> Tensor:
        tokens = self.patches(images).flatten(2).transpose(1, 2) + self.positions
        return self.head(self.blocks(tokens).mean(1))


class Training:
    """One step after the other, of a batch that stays."""

    def __init__(self, device: torch.device) -> None:
        torch.manual_seed(0)
        self.device = device
        self.model = VisionTransformer().to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.images = torch.randn(64 if device.type == "cuda" else 1, 3, 224, 224, device=device)
        self.state = TrainingState(self.model, self.optimizer)
        self.forward_and_backward()
        self.step()

    def forward_and_backward(self) -> None:
        self.model(self.images).square().mean().backward()

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def tensors(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def nbytes(self) -> int:
        state = [value for values in self.optimizer.state.values() for value in values.values()]
        return sum(tensor.nbytes for tensor in [*self.model.state_dict().values(), *state])

    def strategy(self) -> DDPStrategy:
        precision = Precision("fp32", torch.float32, torch.float32)
        return DDPStrategy(RankContext(0, Degrees(), self.device, precision))

    def settle(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


class Arms:
    """What is measured; each returns seconds by name. Files go to ``folder`` and are removed again."""

    def __init__(self, training: Training, folder: Path) -> None:
        self.training = training
        self.folder = folder
        run = RunPaths(folder / "run")
        run.attempt(1).folder.mkdir(parents=True)
        run.attempt(1).record.write_text("{}")
        self.checkpointer = Checkpointer(run, 1, training.strategy(), keep=2)
        self.checkpointer.reserve(training.state)
        self.saves = 0
        self.bytes = memoryview(torch.ones(training.nbytes(), dtype=torch.uint8).numpy().data)

    def all(self) -> dict[str, Callable[[], dict[str, float]]]:
        return {
            "raw": self.raw,
            "torch.save": self.torch_save,
            "ours, between": self.ours_between,
            "ours, beside": self.ours_beside,
            "ours, nothing beside": self.ours_nothing_beside,
            "DCP": self.dcp,
        }

    def raw(self) -> dict[str, float]:
        path = self.folder / "raw"
        began = time.perf_counter()
        with path.open("wb", buffering=0) as file:
            for begin in range(0, len(self.bytes), _CHUNK_BYTES):
                file.write(self.bytes[begin : begin + _CHUNK_BYTES])
            os.fsync(file.fileno())
        took = time.perf_counter() - began
        path.unlink()
        return {"whole": took}

    def torch_save(self) -> dict[str, float]:
        path = self.folder / "torch.pt"
        began = time.perf_counter()
        with path.open("wb") as file:
            torch.save(self.training.tensors(), file)
            file.flush()
            os.fsync(file.fileno())
        took = time.perf_counter() - began
        path.unlink()
        return {"whole": took}

    def ours_between(self) -> dict[str, float]:
        self.saves += 1
        began = time.perf_counter()
        saved = self.checkpointer.save(self.training.state, self.saves, {})
        return {"whole": time.perf_counter() - began, "to its commit": saved.duration_s}

    def ours_beside(self) -> dict[str, float]:
        alone = self._step()
        self.saves += 1
        began = time.perf_counter()
        self.checkpointer.begin(self.training.state, self.saves, {})
        began_s = time.perf_counter() - began
        self.training.forward_and_backward()
        waited = time.perf_counter()
        self.checkpointer.wait_staged()
        waited_s = time.perf_counter() - waited
        self.training.step()
        self.training.settle()
        beside = time.perf_counter() - began
        saved = self._ended()
        return {
            "stall": saved.stall_s,
            "stall in begin": began_s,
            "stall in wait_staged": waited_s,
            "to its commit": saved.duration_s,
            "a step alone": alone,
            "the step beside it": beside,
        }

    def ours_nothing_beside(self) -> dict[str, float]:
        self.saves += 1
        self.checkpointer.begin(self.training.state, self.saves, {})
        self.checkpointer.wait_staged()
        self.training.settle()
        saved = self._ended()
        return {"stall": saved.stall_s, "to its commit": saved.duration_s}

    def _ended(self) -> Save:
        """Return the save under way once it ended, which no loop would wait for."""
        while self.checkpointer.is_busy:
            time.sleep(0.01)
        saved = self.checkpointer.collect() or self.checkpointer.finish()
        assert saved is not None
        return saved

    def _step(self) -> float:
        self.training.settle()
        began = time.perf_counter()
        self.training.forward_and_backward()
        self.training.step()
        self.training.settle()
        return time.perf_counter() - began

    def dcp(self) -> dict[str, float]:
        path = self.folder / "dcp"
        began = time.perf_counter()
        future: Any = dcp.async_save(self.training.tensors(), checkpoint_id=path)
        stall = time.perf_counter() - began
        future.result()
        took = time.perf_counter() - began
        shutil.rmtree(path)
        return {"stall": stall, "to its end": took}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="on the disk to measure; a temporary one by default")
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with tempfile.TemporaryDirectory(dir=arguments.folder or Path.cwd()) as name:
        store = f"file://{name}/store"
        dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo", init_method=store,
                                rank=0, world_size=1)  # fmt: skip
        load = os.getloadavg()[0]
        arms = Arms(Training(device), Path(name))
        rounds = [_round(arms, number) for number in range(arguments.rounds + 1)][1:]
        dist.destroy_process_group()
    summary = _summary(arms.training, rounds, load)
    text = json.dumps(summary, indent=1) + "\n"
    print(text)
    if arguments.rounds >= 3:
        RESULTS.write_text(text, encoding="utf-8")
    missed = set(TARGETS) - set(summary["targets that hold"])
    if missed:
        sys.exit(f"missed: {', '.join(sorted(missed))}")


def _round(arms: Arms, number: int) -> dict[str, dict[str, float]]:
    found = {}
    measures = list(arms.all().items())
    random.Random(number).shuffle(measures)  # whoever follows the largest removal finds a slower disk
    for name, measure in measures:
        os.sync()
        arms.training.settle()
        found[name] = {part: round(took, 4) for part, took in measure().items()}
        print(f"{name}: {found[name]}", file=sys.stderr)
    return found


def _ratios(each: dict[str, dict[str, float]]) -> dict[str, float]:
    stall, copied = each["ours, beside"]["stall"], each["ours, nothing beside"]["stall"]
    return {
        "stall, ours / torch.save": stall / each["torch.save"]["whole"],
        "stall, ours / DCP": stall / each["DCP"]["stall"],
        "whole save, ours / raw": each["ours, between"]["whole"] / each["raw"]["whole"],
        "stall with nothing beside, ours / torch.save": copied / each["torch.save"]["whole"],
        "stall with nothing beside, ours / DCP": copied / each["DCP"]["stall"],
        "whole save beside training, ours / raw": each["ours, beside"]["to its commit"]
        / each["raw"]["whole"],
        "whole save, torch.save / raw": each["torch.save"]["whole"] / each["raw"]["whole"],
        "step, beside a save / alone": each["ours, beside"]["the step beside it"]
        / each["ours, beside"]["a step alone"],
    }


def _summary(training: Training, rounds: list[dict[str, dict[str, float]]], load: float) -> dict[str, Any]:
    ratios = [_ratios(each) for each in rounds]
    medians = {name: round(statistics.median(each[name] for each in ratios), 3) for name in ratios[0]}
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": _device(training.device),
        "versions": {"python": platform.python_version(), "torch": torch.__version__}
        | {name: version(name) for name in ("xxhash", "hpc-train")},
        "load of the machine before": round(load, 2),
        "parameters": sum(parameter.numel() for parameter in training.model.parameters()),
        "state, bytes": training.nbytes(),
        "rounds": len(rounds),
        "ratios, medians": medians,
        "targets, at most": TARGETS,
        "targets that hold": [name for name, most in TARGETS.items() if medians[name] <= most],
        "seconds, medians": {
            arm: {part: statistics.median(each[arm][part] for each in rounds) for part in rounds[0][arm]}
            for arm in rounds[0]
        },
        "ratios": [{name: round(ratio, 3) for name, ratio in each.items()} for each in ratios],
        "seconds": rounds,
    }


def _device(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"cpu: {platform.processor() or platform.machine()}, {os.cpu_count()} cores"


if __name__ == "__main__":
    main()
