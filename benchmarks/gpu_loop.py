"""The training loops that benchmarks/gpu_throughput.py compares hpc-train with, and the data that all share.

    python -m benchmarks.gpu_loop LOOP MODEL PRECISION MODE [--device cuda] [--tiny] [--trace FILE]

Trains until it is ended and prints a line of JSON per window of steps: the peak memory in GiB. Before the
windows that count, some steps are profiled into ``--trace``. Images are uint8 in memory, copied and
normalized on the device, as hpc-train does.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.gpu_cases import MODELS, MODES, NUM_TOKENS, PRECISIONS, TINY, Model
from hpc_train.training.datasets.base import DataSource, TensorSplit
from hpc_train.training.datasets.types import DataInfo
from hpc_train.training.models.blocks import find_blocks

LOOPS = ("bare loop", "Fabric", "Accelerate")
NUM_IMAGES, NUM_CLASSES = 1024, 1000
#: Steps per window; windows before those that count; profiled steps at the beginning of the second window.
WINDOW, TINY_WINDOW, WARM_UP, PROFILED = 10, 2, 3, 2


def images(size: int = 224) -> DataSource:
    """Return random images; hpc-train reads them by ``data.name: benchmarks.gpu_loop:images``."""
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(256, (NUM_IMAGES, 3, size, size), dtype=torch.uint8, generator=generator)
    info = DataInfo(num_classes=NUM_CLASSES, channels=3, mean=(0.5,) * 3, std=(0.5,) * 3, class_names=())
    return DataSource(TensorSplit(pixels, torch.arange(NUM_IMAGES) % NUM_CLASSES), None, info)


def build(settings: Model) -> nn.Module:
    """Return the model, on torch's default device."""
    if settings.args is None:
        from timm import create_model

        model: nn.Module = create_model(settings.name, num_classes=NUM_CLASSES)
        return model
    from hpc_train.training.models.gpt import GPT, GPTArgs

    return GPT(NUM_TOKENS, settings.size, GPTArgs(**settings.args))


def flops_per_sample(settings: Model) -> int:
    """Return the floating-point operations of forward and backward (twice the forward's) of one sample."""
    is_text = settings.args is not None
    shape = (1, settings.size) if is_text else (1, 3, settings.size, settings.size)
    with torch.device("meta"), FlopCounterMode(display=False) as counter:
        model = build(settings)
        model(torch.zeros(shape, dtype=torch.int64 if is_text else torch.float32))
    return 3 * int(counter.get_total_flops())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("loop", choices=LOOPS)
    parser.add_argument("model", choices=[*MODELS])
    parser.add_argument("precision", choices=PRECISIONS)
    parser.add_argument("mode", choices=[*MODES])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--trace", type=Path)
    arguments = parser.parse_args()
    settings = (TINY if arguments.tiny else MODELS)[arguments.model]
    loop = Loop(arguments.loop, settings, arguments.precision, arguments.mode, torch.device(arguments.device))
    loop.train(TINY_WINDOW if arguments.tiny else WINDOW, arguments.trace)


class Loop:
    """A model that trains on one device."""

    def __init__(self, kind: str, settings: Model, precision: str, mode: str, device: torch.device) -> None:
        torch.backends.cudnn.benchmark = True
        self.device, self.is_text, self.size = device, settings.args is not None, settings.size
        self.format = torch.channels_last if settings.channels_last else torch.preserve_format
        model = build(settings).to(device, memory_format=self.format)  # type: ignore[call-overload]
        if precision == "fp8":
            _use_float8(model)
        if mode == "compiled":
            model.compile()
        elif mode == "blocks compiled":
            for block in find_blocks(model):
                block.compile()
        made = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}[settings.optimizer]
        optimizer = made(model.parameters(), lr=1e-3, fused=True)
        self.model, self.optimizer, self.backward = _prepared(kind, model, optimizer, device)
        self.casts: Callable[[], AbstractContextManager[Any]] = nullcontext
        if kind == "bare loop":
            self.casts = lambda: torch.autocast(device.type, torch.bfloat16)
        batch_size = settings.batch_size
        self.batches = self._sequences(batch_size) if self.is_text else self._images(batch_size)

    def train(self, window: int, trace: Path | None) -> None:
        """Train; print a line at the end of each window, once the device has come so far."""
        step = 0
        while True:
            if trace is not None and step == window:
                self._profile(trace)
            for _ in range(window):
                self._step(*next(self.batches))
                step += 1
            peak_gib = 0.0
            if self.device.type == "cuda":
                torch.cuda.synchronize()
                peak_gib = torch.cuda.max_memory_allocated() / 2**30
            print(json.dumps({"step": step, "peak_gib": peak_gib}), flush=True)

    def _profile(self, trace: Path) -> None:
        kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self.device.type == "cuda" else [])]
        with profile(activities=kinds, acc_events=True) as profiler:
            for _ in range(PROFILED):
                self._step(*next(self.batches))
            if self.device.type == "cuda":
                torch.cuda.synchronize()
        profiler.export_chrome_trace(str(trace))

    def _step(self, inputs: Tensor, targets: Tensor) -> None:
        inputs, targets = (each.to(self.device, non_blocking=True) for each in (inputs, targets))
        if not self.is_text:
            inputs = (inputs.to(memory_format=self.format).float() / 255 - 0.5) / 0.5
        with self.casts():
            loss = cross_entropy(self.model(inputs).flatten(0, -2), targets.flatten())
        self.backward(loss)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def _images(self, batch_size: int) -> Iterator[tuple[Tensor, Tensor]]:
        split: Any = images(self.size).train
        while True:
            for chosen in torch.randperm(NUM_IMAGES).split(batch_size):
                if len(chosen) == batch_size:
                    yield self._pinned(split.images[chosen]), self._pinned(split.targets[chosen])

    def _sequences(self, batch_size: int) -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            tokens = torch.randint(NUM_TOKENS, (batch_size, self.size + 1))
            yield self._pinned(tokens[:, :-1].contiguous()), self._pinned(tokens[:, 1:].contiguous())

    def _pinned(self, tensor: Tensor) -> Tensor:
        return tensor.pin_memory() if self.device.type == "cuda" else tensor


def _prepared(kind: str, model: nn.Module, optimizer: Any, device: torch.device) -> tuple[Any, Any, Any]:
    """Return model, optimizer and what calls backward, as ``kind`` wraps them for autocast to bf16."""
    if kind == "Fabric":
        from lightning_fabric import Fabric

        fabric = Fabric(accelerator=device.type, devices=1, precision="bf16-mixed")
        fabric.launch()
        return *fabric.setup(model, optimizer), fabric.backward
    if kind == "Accelerate":
        from accelerate import Accelerator

        accelerator = Accelerator(cpu=device.type == "cpu", mixed_precision="bf16")
        return *accelerator.prepare(model, optimizer), accelerator.backward
    return model, optimizer, Tensor.backward


def _use_float8(model: nn.Module) -> None:
    """Let the linear layers of the blocks multiply in float8, as ``precision: fp8`` does."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    def is_converted(module: nn.Module, name: str) -> bool:
        in_block = name.startswith(("blocks.", "layers.", "stages."))
        return in_block and type(module) is nn.Linear and not any(size % 16 for size in module.weight.shape)

    config = Float8LinearConfig(pad_inner_dim=True)
    convert_to_float8_training(model, module_filter_fn=is_converted, config=config)


if __name__ == "__main__":
    main()
