"""The bare PyTorch loop of benchmarks/gpu_throughput.py, and the models and data that all its arms share.

    python -m benchmarks.gpu_loop MODEL PRECISION [--compile] [--device cuda] --windows N --window STEPS

Prints the time at which each window began as JSON. Images are uint8 in memory, copied and normalized on the
device, as hpc-train does.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.gpu_cases import GPT_ARGS, IMAGE_SIZE, MODELS, NUM_TOKENS, PRECISIONS, SEQUENCE_LENGTH
from hpc_train.datasets.base import DataSource, TensorSplit
from hpc_train.datasets.types import DataInfo

NUM_IMAGES, NUM_CLASSES = 1024, 1000
_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}


def images(size: int = IMAGE_SIZE) -> DataSource:
    """Return random images; hpc-train reads them by ``data.name: benchmarks.gpu_loop:images``."""
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(256, (NUM_IMAGES, 3, size, size), dtype=torch.uint8, generator=generator)
    info = DataInfo(num_classes=NUM_CLASSES, channels=3, mean=(0.5,) * 3, std=(0.5,) * 3, class_names=())
    return DataSource(TensorSplit(pixels, torch.arange(NUM_IMAGES) % NUM_CLASSES), None, info)


def build(name: str) -> nn.Module:
    """Return a model of ``gpu_cases.MODELS``, on torch's default device."""
    if name != "gpt":
        from timm import create_model

        model: nn.Module = create_model(name, num_classes=NUM_CLASSES)
        return model
    from hpc_train.models.gpt import GPT, GPTArgs

    return GPT(NUM_TOKENS, SEQUENCE_LENGTH, GPTArgs(**GPT_ARGS))


def flops_per_sample(name: str) -> int:
    """Return the floating-point operations of forward and backward (twice the forward's) of one sample."""
    shape = (1, SEQUENCE_LENGTH) if name == "gpt" else (1, 3, IMAGE_SIZE, IMAGE_SIZE)
    with torch.device("meta"), FlopCounterMode(display=False) as counter:
        model = build(name)
        model(torch.zeros(shape, dtype=torch.int64 if name == "gpt" else torch.float32))
    return 3 * int(counter.get_total_flops())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model", choices=[*MODELS])
    parser.add_argument("precision", choices=PRECISIONS)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--batch-size", type=int, required=True)
    parser.add_argument("--windows", type=int, required=True)
    parser.add_argument("--window", type=int, required=True)
    arguments = parser.parse_args()
    loop = Loop(arguments.model, arguments.precision, arguments.batch_size, torch.device(arguments.device))
    if arguments.compile:
        loop.model.compile()
    print(json.dumps(loop.train(arguments.windows, arguments.window)), flush=True)


class Loop:
    """A model that trains on one device."""

    def __init__(self, name: str, precision: str, batch_size: int, device: torch.device) -> None:
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = precision == "tf32"
        torch.backends.cudnn.benchmark = True
        self.precision, self.device = precision, device
        self.is_text = name == "gpt"
        settings = MODELS[name]
        self.format = torch.channels_last if settings.channels_last else torch.preserve_format
        self.model = build(name).to(device, memory_format=self.format)  # type: ignore[call-overload]
        if precision == "fp8":
            _use_float8(self.model)
        kind = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}[settings.optimizer]
        self.optimizer = kind(self.model.parameters(), lr=1e-3)
        self.scaler = torch.amp.GradScaler(device.type, enabled=precision == "fp16")
        self.batches = self._sequences(batch_size) if self.is_text else self._images(batch_size)

    def train(self, windows: int, window: int) -> list[float]:
        """Return when each window began, and when the last one ended."""
        times = []
        for step in range(windows * window + 1):
            if step % window == 0:
                if self.device.type == "cuda":
                    torch.cuda.synchronize()
                times.append(time.time())
            self._step(*next(self.batches))
        return times

    def _step(self, inputs: Tensor, targets: Tensor) -> None:
        inputs, targets = (each.to(self.device, non_blocking=True) for each in (inputs, targets))
        if not self.is_text:
            inputs = (inputs.to(memory_format=self.format).float() / 255 - 0.5) / 0.5
        with self._autocast():
            loss = cross_entropy(self.model(inputs).flatten(0, -2), targets.flatten())
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()

    def _autocast(self) -> AbstractContextManager[Any]:
        dtype = _AUTOCAST.get(self.precision)
        return nullcontext() if dtype is None else torch.autocast(self.device.type, dtype)

    def _images(self, batch_size: int) -> Iterator[tuple[Tensor, Tensor]]:
        split: Any = images().train
        while True:
            for chosen in torch.randperm(NUM_IMAGES).split(batch_size):
                if len(chosen) == batch_size:
                    yield self._pinned(split.images[chosen]), self._pinned(split.targets[chosen])

    def _sequences(self, batch_size: int) -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            tokens = torch.randint(NUM_TOKENS, (batch_size, SEQUENCE_LENGTH + 1))
            yield self._pinned(tokens[:, :-1].contiguous()), self._pinned(tokens[:, 1:].contiguous())

    def _pinned(self, tensor: Tensor) -> Tensor:
        return tensor.pin_memory() if self.device.type == "cuda" else tensor


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
