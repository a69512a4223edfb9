"""How many GPUs this machine lends, without importing torch."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping
from pathlib import Path

_DEVICE_FILE = re.compile(r"nvidia\d+")
#: Assumed: the driver may take seconds to wake where nothing holds it.
_SMI_LIMIT_S = 30.0


def count_gpus(environ: Mapping[str, str]) -> int:
    """Return how many GPUs a process would see: by CUDA_VISIBLE_DEVICES, else by the driver."""
    if "CUDA_VISIBLE_DEVICES" in environ:
        return _count_listed(environ["CUDA_VISIBLE_DEVICES"])
    from_driver = _count_by_driver()
    return _count_device_files(Path("/dev")) if from_driver is None else from_driver


def _count_listed(text: str) -> int:
    """Count as CUDA does: names up to the first that is not one."""
    count = 0
    for name in text.split(","):
        if not re.fullmatch(r"\d+|GPU-.+|MIG-.+", name.strip()):
            break
        count += 1
    return count


def _count_by_driver() -> int | None:
    try:
        done = subprocess.run(
            ["nvidia-smi", "-L"], capture_output=True, text=True, timeout=_SMI_LIMIT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    if done.returncode != 0:
        return None
    return sum(line.startswith("GPU ") for line in done.stdout.splitlines())


def _count_device_files(folder: Path) -> int:
    return sum(bool(_DEVICE_FILE.fullmatch(path.name)) for path in folder.iterdir())
