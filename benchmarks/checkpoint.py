"""What a checkpoint costs: hpc-train, a raw write, ``torch.save`` and DCP on the same disk.

    python -m benchmarks.checkpoint [--rounds 7] [--folder PATH] [--quick]

86 million parameters with Adam (a ViT-B of plain torch): 1.03 GB of state. Each round runs all arms:

- a raw write of as many bytes from memory to a new file, with fsync;
- ``torch.save`` of the same state, with fsync, which is how long it blocks a plain loop;
- hpc-train, synchronous: ``Checkpointer.save``, with hashes, manifest, rename and removal of the oldest;
- hpc-train, asynchronous: ``begin``, a real forward and backward, ``wait_staged``, ``optimizer.step``. What
  counts is how long ``begin`` and ``wait_staged`` block the loop (``checkpoint_stall_s``), and how much
  longer that step takes than one alone. On the CPU one core is left to the thread that saves: if all cores
  compute, the step takes longer by the CPU time of the save;
- the same with no computation to overlap, as if a step took no time;
- DCP's ``async_save`` by its defaults: how long the call takes, after which training may continue;
- ``torch.load`` of what ``torch.save`` wrote, into new tensors;
- hpc-train, resume: ``Checkpointer.load_newest`` into a new model and optimizer, all files verified.

Before each arm the disk has written everything, and a first round is not counted; what is loaded is in the
page cache then. Writes
benchmarks/results/checkpoint.json; exits with an error if a target was missed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

from benchmarks.measuring import comparison, conditions, interleaved, parser, report, rounds_of
from hpc_train.experiment.topology.degrees import Degrees
from hpc_train.paths import RunPaths
from hpc_train.run.resource_limits import usable_cpus
from hpc_train.training.checkpoint.checkpointer import Checkpointer, Save
from hpc_train.training.checkpoint.state import TrainingState
from hpc_train.training.distributed.device import Precision
from hpc_train.training.strategies.base import RankContext
from hpc_train.training.strategies.ddp import DDPStrategy

RAW, TORCH_SAVE, DCP = "raw write with fsync", "torch.save with fsync", "DCP async_save"
SYNC, ASYNC = "hpc-train, synchronous", "hpc-train, asynchronous"
NO_OVERLAP = "hpc-train, nothing to overlap"
TORCH_LOAD, RESUME = "torch.load", "hpc-train, verified"
COMPLETE = "Complete save"
BLOCKED, BLOCKED_DCP = (
    "Time that a save blocks training",
    "Time that a save blocks training, compared with DCP",
)
STEP, ALONE, DURING = "Training step during a save", "step alone", "step during the save"
LOAD = "Resume from a checkpoint"
#: Comparison and arm → the maximum ratio allowed.
TARGETS = {
    (BLOCKED, ASYNC): 0.05,
    (BLOCKED_DCP, ASYNC): 0.5,
    (COMPLETE, SYNC): 1.3,
    (STEP, DURING): 1.1,
    (LOAD, RESUME): 1.3,
}
_CHUNK_BYTES = 8 << 20
#: What an arm reports, in seconds by name.
Parts = Mapping[str, float]


class VisionTransformer(nn.Module):
    """ViT-B/16's shapes: 12 blocks of width 768, 196 patches, 1,000 classes."""

    def __init__(self, num_blocks: int = 12) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 768, 16, 16)
        self.positions = nn.Parameter(torch.zeros(1, 196, 768))
        block = nn.TransformerEncoderLayer(
            768, 12, 3072, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(block, num_blocks, enable_nested_tensor=False)
        self.head = nn.Linear(768, 1000)

    def forward(self, images: Tensor) -> Tensor:
        tokens = self.patches(images).flatten(2).transpose(1, 2) + self.positions
        return self.head(self.blocks(tokens).mean(1))


class Training:
    """One step after the other, of a batch that stays."""

    def __init__(self, device: torch.device, num_blocks: int) -> None:
        self.device, self.num_blocks = device, num_blocks
        self.model, self.optimizer = self.new_parts()
        self.images = torch.randn(64 if device.type == "cuda" else 1, 3, 224, 224, device=device)
        self.state = TrainingState(self.model, self.optimizer)
        self.forward_and_backward()
        self.step()

    def new_parts(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Return a model and its optimizer as they are before training."""
        torch.manual_seed(0)
        model = VisionTransformer(self.num_blocks).to(self.device)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-4)

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
        self.checkpointer = _checkpointer(folder / "run", training)
        self.checkpointer.reserve(training.state)
        self.saves = 0
        # Read in every round, so that both are in the page cache: of what was just saved nothing is.
        self.to_load, self.to_resume = folder / "to_load.pt", _checkpointer(folder / "to_resume", training)
        torch.save(training.tensors(), self.to_load)
        self.to_resume.save(training.state, 1, {})
        self.bytes = memoryview(torch.ones(training.nbytes(), dtype=torch.uint8).numpy().data)

    def all(self) -> dict[str, Callable[[], Parts]]:
        return {
            RAW: self.raw,
            TORCH_SAVE: self.torch_save,
            DCP: self.dcp,
            SYNC: self.synchronous,
            ASYNC: self.asynchronous,
            NO_OVERLAP: self.no_overlap,
            TORCH_LOAD: self.torch_load,
            RESUME: self.resume,
        }

    def raw(self) -> Parts:
        path = self.folder / "raw"
        began = time.perf_counter()
        with path.open("wb", buffering=0) as file:
            for begin in range(0, len(self.bytes), _CHUNK_BYTES):
                file.write(self.bytes[begin : begin + _CHUNK_BYTES])
            os.fsync(file.fileno())
        took = time.perf_counter() - began
        path.unlink()
        return {"complete": took}

    def torch_save(self) -> Parts:
        path = self.folder / "torch.pt"
        began = time.perf_counter()
        with path.open("wb") as file:
            torch.save(self.training.tensors(), file)
            file.flush()
            os.fsync(file.fileno())
        took = time.perf_counter() - began
        path.unlink()
        return {"complete": took}

    def synchronous(self) -> Parts:
        self.saves += 1
        began = time.perf_counter()
        self.checkpointer.save(self.training.state, self.saves, {})
        return {"complete": time.perf_counter() - began}

    def asynchronous(self) -> Parts:
        alone = self._step()
        self.saves += 1
        began = time.perf_counter()
        self.checkpointer.begin(self.training.state, self.saves, {})
        self.training.forward_and_backward()
        self.checkpointer.wait_staged()
        self.training.step()
        self.training.settle()
        during = time.perf_counter() - began
        saved = self._ended()
        return {
            "blocked": saved.stall_s,
            "complete": saved.duration_s,
            ALONE: alone,
            DURING: during,
        }

    def no_overlap(self) -> Parts:
        self.saves += 1
        self.checkpointer.begin(self.training.state, self.saves, {})
        self.checkpointer.wait_staged()
        self.training.settle()
        saved = self._ended()
        return {"blocked": saved.stall_s, "complete": saved.duration_s}

    def torch_load(self) -> Parts:
        began = time.perf_counter()
        torch.load(self.to_load, map_location=self.training.device, weights_only=True)
        self.training.settle()
        return {"load": time.perf_counter() - began}

    def resume(self) -> Parts:
        model, optimizer = self.training.new_parts()
        self.training.settle()
        began = time.perf_counter()
        loaded = self.to_resume.load_newest(TrainingState(model, optimizer))
        self.training.settle()
        took = time.perf_counter() - began
        assert loaded is not None
        return {"load": took}

    def _ended(self) -> Save:
        """Return the save in progress once it ended, which no loop would wait for."""
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

    def dcp(self) -> Parts:
        path = self.folder / "dcp"
        began = time.perf_counter()
        future: Any = dcp.async_save(self.training.tensors(), checkpoint_id=path)
        blocked = time.perf_counter() - began
        future.result()
        took = time.perf_counter() - began
        shutil.rmtree(path)
        return {"blocked": blocked, "complete": took}


def _checkpointer(folder: Path, training: Training) -> Checkpointer:
    run = RunPaths(folder)
    run.attempt(1).folder.mkdir(parents=True)
    run.attempt(1).record.write_text("{}")
    return Checkpointer(run, 1, training.strategy(), keep=2)


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--folder", type=Path, help="on the disk to measure; default: the working directory")
    arguments = options.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    measured_with = conditions(["xxhash"], device=name)
    if device.type == "cpu":
        torch.set_num_threads(max(1, len(usable_cpus()) - 1))
        measured_with["compute threads"] = torch.get_num_threads()
    training = Training(device, num_blocks=1 if arguments.quick else 12)
    measured_with |= {
        "parameters": sum(parameter.numel() for parameter in training.model.parameters()),
        "state, bytes": training.nbytes(),
    }
    compared = comparisons(_rounds(training, arguments))
    report("checkpoint", arguments, measured_with, compared)
    missed = [target for target, limit in TARGETS.items() if ratio(compared, *target) > limit]
    if missed and not arguments.quick:
        sys.exit("missed: " + "; ".join(": ".join(target) for target in missed))


def _rounds(training: Training, arguments: argparse.Namespace) -> list[dict[str, Parts]]:
    """Return what every arm reported, by round."""
    with tempfile.TemporaryDirectory(dir=arguments.folder or Path.cwd()) as name:
        backend = "cpu:gloo,cuda:nccl" if training.device.type == "cuda" else "gloo"
        dist.init_process_group(backend, init_method=f"file://{name}/store", rank=0, world_size=1)
        arms = Arms(training, Path(name)).all()
        settled = {arm: _after_settling(training, measure) for arm, measure in arms.items()}
        values = interleaved(settled, rounds_of(arguments) + 1)
        dist.destroy_process_group()
    return [dict(zip(values, parts, strict=True)) for parts in zip(*values.values(), strict=True)][1:]


def _after_settling(training: Training, measure: Callable[[], Parts]) -> Callable[[], Parts]:
    def measured() -> Parts:
        os.sync()
        training.settle()
        return measure()

    return measured


def comparisons(rounds: Sequence[Mapping[str, Parts]]) -> list[dict[str, Any]]:
    """Return the comparisons of a results file. ``rounds``: seconds by arm and name, by round."""

    def of(part: str, *arms: str) -> dict[str, list[float]]:
        return {
            arm: [each[arm]["complete" if arm == TORCH_SAVE else part] for each in rounds] for arm in arms
        }

    steps = {part: [each[ASYNC][part] for each in rounds] for part in (ALONE, DURING)}
    return [
        comparison(BLOCKED, "seconds", of("blocked", TORCH_SAVE, DCP, ASYNC, NO_OVERLAP), TORCH_SAVE),
        comparison(BLOCKED_DCP, "seconds", of("blocked", DCP, ASYNC, NO_OVERLAP), DCP),
        comparison(COMPLETE, "seconds", of("complete", RAW, TORCH_SAVE, DCP, SYNC, ASYNC), RAW),
        comparison(STEP, "seconds", steps, ALONE),
        comparison(LOAD, "seconds", of("load", TORCH_LOAD, RESUME), TORCH_LOAD),
    ]


def ratio(compared: Sequence[Mapping[str, Any]], title: str, arm: str) -> float:
    """Return the median ratio of an arm."""
    (found,) = (each for each in compared if each["title"] == title)
    return float(found["arms"][arm]["ratio"]["median"])


if __name__ == "__main__":
    main()
