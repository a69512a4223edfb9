"""What benchmarks/gpu_throughput.py trains; without torch, since the performance page reads it."""

from __future__ import annotations

from dataclasses import dataclass

from hpc_train.experiment.plan.devices import peak_tflops

PRECISIONS = ("bf16", "fp8")
#: How a model is run, and as what ``compile:`` of a file.
MODES = {
    "eager": "false",
    "compiled": "{scope: model}",
    "blocks compiled": "{scope: blocks}",
}
NUM_TOKENS = 256


@dataclass(frozen=True)
class Model:
    """A model with settings that suit it.

    ``batch_size`` in images or sequences, ``size`` in pixels or tokens. ``args``: of the package's GPT; if
    None, timm has the model. ``memory_gib``: of one process that trains it eagerly, with its CUDA context
    (assumed).
    """

    name: str
    batch_size: int
    size: int
    optimizer: str = "adamw"
    channels_last: bool = False
    args: dict[str, int] | None = None
    memory_gib: float = 1.0

    @property
    def has_linear_blocks(self) -> bool:
        return "resnet" not in self.name


#: ``gpt`` has GPT-2's smallest shape.
MODELS = {
    "gpt": Model("gpt", 16, 1024, args={"num_layers": 12, "num_heads": 12, "dim": 768}, memory_gib=14.0),
    "resnet50": Model("resnet50", 256, 224, "sgd", channels_last=True, memory_gib=25.0),
    "vit_base_patch16_224": Model("vit_base_patch16_224", 128, 224, memory_gib=20.0),
}
#: The same for a trial of seconds on a CPU.
TINY = {
    "gpt": Model("gpt", 2, 32, args={"num_layers": 2, "num_heads": 2, "dim": 32}),
    "resnet50": Model("test_resnet", 2, 32, "sgd", channels_last=True),
    "vit_base_patch16_224": Model("test_vit", 2, 160),
}


@dataclass(frozen=True)
class Case:
    """A model at a precision: all arms in all modes train at the same time and take turns."""

    model: str
    precision: str

    def modes(self) -> list[str]:
        """Return the modes; blocks are compiled only where a model has repeated ones."""
        return [mode for mode in MODES if mode != "blocks compiled" or MODELS[self.model].has_linear_blocks]

    def title(self, mode: str) -> str:
        return f"{self.model}, {self.precision}, {mode}, one GPU"


#: By importance: a run stops when its time is used up. fp8 needs linear layers in the model's blocks.
CASES = [
    Case(model, precision)
    for precision in PRECISIONS
    for model in MODELS
    if precision != "fp8" or MODELS[model].has_linear_blocks
]


def utilization(device: str, precision: str, flops_per_s: float) -> float | None:
    """Return the model's FLOP/s as a fraction of the device's peak (MFU); None for an unknown device."""
    peak = peak_tflops(device, precision)
    return None if peak is None else flops_per_s / (peak * 1e12)
