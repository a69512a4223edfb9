"""The values of ``precision:`` and their device requirements."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from hpc_train.errors import BadFileError
from hpc_train.experiment.validate.compatibility import no_float8


@dataclass(frozen=True)
class Precision:
    """One value of ``precision:``.

    ``param_dtype`` is the dtype of parameters and optimizer state, ``compute_dtype`` that of the forward and
    backward pass. ``needs_scaler``: gradients would underflow without a GradScaler. ``has_float8_linears``:
    the linear layers of blocks multiply in float8 (``training.train_state``).
    """

    name: str
    param_dtype: torch.dtype
    compute_dtype: torch.dtype
    needs_scaler: bool = False
    has_float8_linears: bool = False

    @property
    def is_mixed(self) -> bool:
        """Whether the compute dtype differs from that of the parameters."""
        return self.param_dtype != self.compute_dtype

    def autocast(self, device: torch.device) -> AbstractContextManager[object]:
        """Return the context of a forward pass, for strategies that do not cast themselves."""
        if not self.is_mixed:
            return nullcontext()
        return torch.autocast(device.type, dtype=self.compute_dtype)


_ALL = {
    "fp32": Precision("fp32", torch.float32, torch.float32),
    "tf32": Precision("tf32", torch.float32, torch.float32),
    "bf16": Precision("bf16", torch.float32, torch.bfloat16),
    "fp16": Precision("fp16", torch.float32, torch.float16, needs_scaler=True),
    "fp8": Precision("fp8", torch.float32, torch.bfloat16, has_float8_linears=True),
    "fp64": Precision("fp64", torch.float64, torch.float64),
}
#: Hopper, the first generation with float8 matrix products in torchao.
_FLOAT8_CAPABILITY = (9, 0)


def choose_precision(name: str, device: torch.device) -> Precision:
    """Return the precision named ``name`` and set torch's matmul mode for it.

    Raises BadFileError if the device does not support it. On a device without TF32, tf32 equals fp32.
    """
    if (
        name == "bf16"
        and device.type == "cuda"
        and not torch.cuda.is_bf16_supported(including_emulation=False)
    ):
        raise BadFileError(
            f"precision: bf16 is not supported by {torch.cuda.get_device_name(device)}; write fp16, which is"
        )
    if name == "fp8":
        _refuse_without_float8(device)
    torch.backends.cuda.matmul.allow_tf32 = name == "tf32"
    torch.backends.cudnn.allow_tf32 = name == "tf32"
    return _ALL[name]


def _refuse_without_float8(device: torch.device) -> None:
    if device.type != "cuda":
        raise no_float8(f"device is {device.type}").as_error()
    capability = torch.cuda.get_device_capability(device)
    if torch.version.hip is not None or capability < _FLOAT8_CAPABILITY:
        name, capability_text = torch.cuda.get_device_name(device), ".".join(map(str, capability))
        raise no_float8(f"{name} has {capability_text}").as_error()
