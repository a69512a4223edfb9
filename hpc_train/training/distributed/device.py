"""The rank's device, its share of the cores, and reproducibility."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Mapping, MutableMapping
from typing import Literal

import torch

from hpc_train.errors import BadFileError, BadNodeError
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
