"""What benchmarks/gpu_throughput.py trains; without torch, since the performance page reads it."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from hpc_train.plan.gpu_models import peak_tflops

PRECISIONS = ("bf16", "fp16", "tf32", "fp32", "fp8")
IMAGE_SIZE, SEQUENCE_LENGTH, NUM_TOKENS = 224, 1024, 256
#: GPT-2's smallest.
GPT_ARGS = {"num_layers": 12, "num_heads": 12, "dim": 768}


@dataclass(frozen=True)
class Model:
    """A model with settings that suit it; ``batch_size`` in images or sequences."""

    batch_size: int
    optimizer: str
    channels_last: bool = False
    has_linear_blocks: bool = True


#: The first three are timm's, ``gpt`` is ours.
MODELS = {
    "resnet50": Model(256, "sgd", channels_last=True, has_linear_blocks=False),
    "vit_base_patch16_224": Model(128, "adamw"),
    "convnext_base": Model(64, "adamw", channels_last=True),
    "gpt": Model(16, "adamw"),
}


@dataclass(frozen=True)
class Case:
    """One comparison."""

    model: str
    precision: str
    is_compiled: bool

    @property
    def title(self) -> str:
        return f"{self.model}, {self.precision}, {'compiled' if self.is_compiled else 'eager'}, one GPU"


#: By importance: a run stops when its time is used up. fp8 needs linear layers in the model's blocks.
CASES = [
    Case(model, precision, is_compiled)
    for precision, is_compiled, model in itertools.product(PRECISIONS, (False, True), MODELS)
    if precision != "fp8" or MODELS[model].has_linear_blocks
]


def utilization(device: str, precision: str, flops_per_s: float) -> float | None:
    """Return the model's FLOP/s as a fraction of the device's peak (MFU); None for an unknown device."""
    peak = peak_tflops(device, precision)
    return None if peak is None else flops_per_s / (peak * 1e12)
