"""The rank's device, its share of the cores, and reproducibility."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Mapping, MutableMapping
from typing import Literal

import torch

from hpc_train.distributed.env import visible_gpus
from hpc_train.errors import BadFileError, BadNodeError
from hpc_train.run.resource_limits import usable_cpus

_WORDS_MAX = 300


def choose_device(
    wanted: Literal["auto", "cuda", "cpu"], local_rank: int, gpus_expected: bool
) -> torch.device:
    """Return the rank's device and make it torch's current one.

    ``gpus_expected``: Slurm gave this node GPUs, so that ``auto`` must not fall back to the CPU. A rank that
    sees a single GPU uses it: the launcher gave each rank its own. Raises BadNodeError if the node lacks GPUs
    that Slurm gave, BadFileError if another node would not help.
    """
    if wanted == "cpu":
        return torch.device("cpu")
    _take_own_mig_device(os.environ, local_rank)
    num_gpus, words = _count_gpus()
    if gpus_expected and num_gpus < (given := _num_given(os.environ, local_rank, num_gpus)):
        raise BadNodeError(f"torch finds {num_gpus} of the {given} GPUs that Slurm gave it{words}")
    if num_gpus == 0:
        if wanted == "auto" and not gpus_expected:
            return torch.device("cpu")
        raise BadFileError(f"device: {wanted} needs a GPU, but {_why_no_cuda()}{words}; or write device: cpu")
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


def _take_own_mig_device(environ: MutableMapping[str, str], local_rank: int) -> None:
    """Leave this rank its own of the listed MIG devices: CUDA shows a process the first one alone."""
    names = visible_gpus(environ) or []
    if len(names) > 1 and any(name.startswith("MIG-") for name in names):
        if local_rank >= len(names):
            raise BadFileError(
                f"device: local rank {local_rank} has no MIG device of its own, CUDA_VISIBLE_DEVICES names "
                f"{len(names)}; start at most {len(names)} ranks per node"
            )
        environ["CUDA_VISIBLE_DEVICES"] = names[local_rank]


def _count_gpus() -> tuple[int, str]:
    """Return how many GPUs torch finds, and CUDA's error as a clause if there was one."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return count, "".join(f"; {_first_line(warning.message)}" for warning in caught[:1])


def _num_given(environ: Mapping[str, str], local_rank: int, num_gpus: int) -> int:
    """Return how many GPUs this rank should see at least; 0 if it is not a node's fault to have none."""
    if not torch.backends.cuda.is_built():
        return 0
    if (names := visible_gpus(environ)) is not None:
        return len(names)
    return 1 if num_gpus == 1 else local_rank + 1  # a single one may be the rank's own


def _first_line(error: object) -> str:
    line = next(iter(str(error).splitlines()), "")
    return line.partition(" (Triggered internally")[0][:_WORDS_MAX]


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
