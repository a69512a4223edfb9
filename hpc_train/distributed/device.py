"""The rank's device, its share of the cores, and reproducibility."""

from __future__ import annotations

import os
import sys
from typing import Literal

import torch

from hpc_train.errors import BadFileError
from hpc_train.run.resource_limits import usable_cpus


def choose_device(
    wanted: Literal["auto", "cuda", "cpu"], local_rank: int, gpus_expected: bool
) -> torch.device:
    """Return the rank's device and make it torch's current one.

    ``gpus_expected``: GPUs were requested, so that ``auto`` must not fall back to the CPU. A rank that sees a
    single GPU uses it: the launcher gave each rank its own. Raises BadFileError if it has none.
    """
    if wanted == "cpu":
        return torch.device("cpu")
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if num_gpus == 0:
        if wanted == "auto" and not gpus_expected:
            return torch.device("cpu")
        raise BadFileError(f"device: {wanted} needs a GPU, but {_why_no_cuda()}; or write device: cpu")
    index = 0 if num_gpus == 1 else local_rank
    if index >= num_gpus:
        raise BadFileError(
            f"device: local rank {local_rank} has no GPU of its own, this node shows {num_gpus}; "
            f"start at most {num_gpus} ranks per node, or write device: cpu"
        )
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    return device


def _why_no_cuda() -> str:
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is a build without CUDA; install one with CUDA"
    if os.environ.get("CUDA_VISIBLE_DEVICES") in {"", "-1", "NoDevFiles"}:
        return f"CUDA_VISIBLE_DEVICES={os.environ['CUDA_VISIBLE_DEVICES']} hides all GPUs; unset it"
    return (
        f"torch {torch.__version__} (CUDA {torch.version.cuda}) finds no GPU; check whether nvidia-smi does"
    )


def set_threads(num_sharing: int) -> int:
    """Set torch's threads to OMP_NUM_THREADS, else a rank's share of the cores; return the number.

    ``num_sharing``: how many ranks share the cores that this process may use.
    """
    environment = os.environ.get("OMP_NUM_THREADS", "")
    if environment.isdecimal() and int(environment) > 0:
        threads = int(environment)
    else:
        threads = max(1, len(usable_cpus()) // num_sharing)
    torch.set_num_threads(threads)
    return threads


def set_determinism(deterministic: bool | None, device: torch.device, *, has_one_shape: bool) -> bool:
    """Make torch bitwise reproducible, or let it be fast; return which. None: reproducible on the CPU.

    ``has_one_shape``: all batches have the same shapes, so that it pays to let cuDNN time its kernels; it
    does so again for every shape that a convolution meets (pytorch/vision#5985).
    Call it before anything runs on the device: cuBLAS reads its workspace setting once.
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
    # The same without importing torch's compiler (measured: 2.0 s), which reads the variable when imported.
    torch.set_deterministic_debug_mode("error" if exact else "default")
    os.environ["TORCHINDUCTOR_DETERMINISTIC"] = str(int(exact))
