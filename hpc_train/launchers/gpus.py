"""Which GPUs this machine lends, without importing torch."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping
from pathlib import Path

from hpc_train.rank.env import visible_gpus

_DEVICES = Path("/dev")
_DEVICE_FILE = re.compile(r"nvidia\d+")
_UUID = re.compile(r"\(UUID: ([^)]+)\)")
#: Assumed: the driver may take seconds to initialize if no process uses it.
_SMI_LIMIT_S = 30.0


def count_gpus(environ: Mapping[str, str]) -> int:
    """Return how many GPUs, or MIG devices, processes of this machine can use."""
    return len(gpu_names(environ))


def gpu_names(environ: Mapping[str, str]) -> list[str]:
    """Return the GPU names that CUDA_VISIBLE_DEVICES lists, else the driver's."""
    if (names := visible_gpus(environ)) is not None:
        return names
    if (from_driver := _names_by_driver()) is not None:
        return from_driver
    files = [path for path in _DEVICES.iterdir() if _DEVICE_FILE.fullmatch(path.name)]
    return [str(number) for number in range(len(files))]


def mig_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variable from which each rank reads its MIG device; empty if there are none."""
    names = gpu_names(environ)
    has_mig = any(name.startswith("MIG-") for name in names)
    return {"CUDA_VISIBLE_DEVICES": ",".join(names)} if has_mig else {}


def _names_by_driver() -> list[str] | None:
    """Return numbers, or the UUIDs of MIG devices and of GPUs without such: None if nvidia-smi fails."""
    try:
        done = subprocess.run(
            ["nvidia-smi", "-L"], capture_output=True, text=True, timeout=_SMI_LIMIT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    if done.returncode != 0:
        return None
    gpus = [_UUID.findall(part) for part in re.split(r"^GPU ", done.stdout, flags=re.MULTILINE)[1:]]
    if all(len(uuids) < 2 for uuids in gpus):
        return [str(number) for number in range(len(gpus))]
    return [uuid for uuids in gpus for uuid in (uuids[1:] or uuids)]
