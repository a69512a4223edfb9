"""The rank's device, its precision, its share of the cores, reproducibility, and copies to the host."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Mapping, MutableMapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from hpc_train.errors import BadFileError, BadNodeError
from hpc_train.experiment.plan.devices import CONTEXT_BYTES
from hpc_train.experiment.validate.compatibility import no_float8
from hpc_train.rank.env import visible_gpus
from hpc_train.run.resource_limits import usable_cpus

_MESSAGE_MAX = 300


def choose_device(
    wanted: Literal["auto", "cuda", "cpu"], local_rank: int, gpus_expected: bool
) -> torch.device:
    """Return the rank's device and make it torch's current device.

    ``gpus_expected``: Slurm allocated GPUs on this node, so that ``auto`` must not fall back to the CPU. A
    rank that sees a single GPU uses it: the launcher assigned one to each rank. Raises BadNodeError if the
    node lacks allocated GPUs, BadFileError if another node would not help.
    """
    if wanted == "cpu":
        return torch.device("cpu")
    _select_mig_device(os.environ, local_rank)
    num_gpus, cause = _count_gpus()
    if gpus_expected and num_gpus < (allocated := _num_given(os.environ, local_rank, num_gpus)):
        raise BadNodeError(f"torch finds {num_gpus} of the {allocated} GPUs that Slurm gave it{cause}")
    if num_gpus == 0:
        if wanted == "auto" and not gpus_expected:
            return torch.device("cpu")
        raise BadFileError(
            f"device: {wanted} needs a GPU, but {_cuda_problem()}{cause}; or write device: cpu"
        )
    index = 0 if num_gpus == 1 else local_rank
    if index >= num_gpus:
        raise BadFileError(
            f"device: local rank {local_rank} has no GPU of its own, this node shows {num_gpus}; "
            f"start at most {num_gpus} ranks per node, or write device: cpu"
        )
    device = torch.device("cuda", index)
    try:
        torch.cuda.set_device(device)
    except RuntimeError as error:  # busy, or broken
        fault = BadNodeError if gpus_expected else BadFileError
        raise fault(f"device: {device} can't be used: {_first_line(error)}") from error
    return device


def limit_memory(device: torch.device, runs_per_gpu: int) -> None:
    """Limit this process to its part of a GPU that several runs share, so that only its own steps run out.

    The part includes the CUDA context, which torch's limit does not count.
    """
    if device.type != "cuda" or runs_per_gpu == 1:
        return
    _, total = torch.cuda.mem_get_info(device)
    fraction = max(0.0, 1 / runs_per_gpu - CONTEXT_BYTES / total)
    torch.cuda.set_per_process_memory_fraction(fraction, device)


def _select_mig_device(environ: MutableMapping[str, str], local_rank: int) -> None:
    """Make only this rank's MIG device visible: CUDA shows a process only the first of those listed."""
    names = visible_gpus(environ) or []
    if len(names) > 1 and any(name.startswith("MIG-") for name in names):
        if local_rank >= len(names):
            raise BadFileError(
                f"device: local rank {local_rank} has no MIG device of its own, CUDA_VISIBLE_DEVICES names "
                f"{len(names)}; start at most {len(names)} ranks per node"
            )
        environ["CUDA_VISIBLE_DEVICES"] = names[local_rank]


def _count_gpus() -> tuple[int, str]:
    """Return the number of GPUs that torch finds, and CUDA's error as a clause if there was one."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return count, "".join(f"; {_first_line(warning.message)}" for warning in caught[:1])


def _num_given(environ: Mapping[str, str], local_rank: int, num_gpus: int) -> int:
    """Return the minimum number of GPUs that this rank should see; 0 if a lack is not the node's fault."""
    if not torch.backends.cuda.is_built():
        return 0
    if (names := visible_gpus(environ)) is not None:
        return len(names)
    return 1 if num_gpus == 1 else local_rank + 1  # a single GPU may be assigned to this rank


def _first_line(error: object) -> str:
    line = next(iter(str(error).splitlines()), "")
    return line.partition(" (Triggered internally")[0][:_MESSAGE_MAX]


def _cuda_problem() -> str:
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is a build without CUDA; install one with CUDA"
    if os.environ.get("CUDA_VISIBLE_DEVICES") in {"", "-1", "NoDevFiles"}:
        return f"CUDA_VISIBLE_DEVICES={os.environ['CUDA_VISIBLE_DEVICES']} hides all GPUs; unset it"
    return (
        f"torch {torch.__version__} (CUDA {torch.version.cuda}) finds no GPU; check whether nvidia-smi does"
    )


def set_threads(num_sharing: int) -> int:
    """Set torch's threads to OMP_NUM_THREADS, else to the rank's share of the cores; return the number.

    ``num_sharing``: number of ranks that share the cores of this process.
    """
    environment = os.environ.get("OMP_NUM_THREADS", "")
    if environment.isdecimal() and int(environment) > 0:
        threads = int(environment)
    else:
        threads = max(1, len(usable_cpus()) // num_sharing)
    torch.set_num_threads(threads)
    return threads


def set_determinism(deterministic: bool | None, device: torch.device, *, has_one_shape: bool) -> bool:
    """Make torch bitwise reproducible or fast; return True if reproducible. None: reproducible on the CPU.

    ``has_one_shape``: all batches have the same shapes, so that cuDNN's kernel benchmark pays off; cuDNN
    repeats it for every new input shape of a convolution (pytorch/vision#5985).
    Call it before any computation on the device: cuBLAS reads its workspace setting once.
    """
    exact = device.type == "cpu" if deterministic is None else deterministic
    if exact:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    _set_algorithms(exact)
    # Filling every torch.empty would only make reads of uninitialised memory reproducible; it costs a memset.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.deterministic = exact
    torch.backends.cudnn.benchmark = has_one_shape and not exact
    return exact


def _set_algorithms(exact: bool) -> None:
    if "torch._inductor.config" in sys.modules:
        torch.use_deterministic_algorithms(exact)
        return
    # Avoids the import of torch's compiler (measured: 2.0 s), which reads the variable when imported.
    torch.set_deterministic_debug_mode("error" if exact else "default")
    os.environ["TORCHINDUCTOR_DETERMINISTIC"] = str(int(exact))


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


class HostCopy:
    """Copies of tensors on the host, made without waiting for the device."""

    def __init__(self, *tensors: Tensor) -> None:
        self._tensors = tensors
        self._copied: torch.cuda.Event | None = None
        if tensors[0].device.type != "cpu":
            empty = (torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True) for tensor in tensors)
            pairs = zip(empty, tensors, strict=True)
            self._tensors = tuple(host.copy_(tensor, non_blocking=True) for host, tensor in pairs)
            self._copied = torch.cuda.Event()
            self._copied.record()

    @property
    def is_ready(self) -> bool:
        """True if the device has made the copies."""
        return self._copied is None or self._copied.query()

    def tensors(self) -> tuple[Tensor, ...]:
        """Return the copies; waits for the device if they are not ready."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._tensors
