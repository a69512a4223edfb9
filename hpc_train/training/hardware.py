"""The processor and the threads that a rank computes with, and the effect on a run if they change.

Each CPU thread adds up a part of a sum, so a different number of threads rounds differently, and a different
processor may as well. ``training.train_state`` records both in a checkpoint and compares them at a load. The
number of threads is taken from the checkpoint; other differences are reported, never refused.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from hpc_train.checkpoint.control_group import ControlGroup
from hpc_train.distributed.env import THREADS_BY_SHARE

_CPU_INFO = Path("/proc/cpuinfo")
_ROUNDING = "the weights may differ in the last bit from here on"


@dataclass(frozen=True)
class Hardware:
    """Processor and threads of an attempt's ranks; the same on all of them unless nodes are mixed."""

    #: This rank's processor.
    processor: str
    #: Threads of one operation on the CPU, by rank.
    threads: list[int]

    def to_json(self) -> dict[str, Any]:
        """Return ``hardware`` in the ``extra`` of a checkpoint."""
        return asdict(self)


def take_over(
    then: object, step: int, device: torch.device, ranks: ControlGroup, say: Callable[[str], None]
) -> Hardware:
    """Set the number of threads of checkpoint ``step``'s ranks; return the hardware used from now on.

    Collective. ``then``: the result of ``to_json`` at the save; None without a checkpoint. ``say`` receives a
    message about each difference that may change results. A number of threads that the user set
    (OMP_NUM_THREADS) is not changed.
    """
    known = then if isinstance(then, Mapping) else {}
    wanted = _threads(known.get("threads"), ranks.world_size)
    on_cpu, share = device.type == "cpu", torch.get_num_threads()
    if on_cpu and wanted is not None and not _is_set_by_user(os.environ):
        torch.set_num_threads(wanted[ranks.rank])
    own = torch.get_num_threads()
    threads = ranks.total([own if rank == ranks.rank else 0 for rank in range(ranks.world_size)])
    now = Hardware(processor(device), threads)
    if on_cpu and wanted is not None and wanted != threads:
        counts = f"{_in_words(wanted)} then, {_in_words(threads)} now (OMP_NUM_THREADS)"
        say(f"checkpoint {step} was computed with other threads per rank: {counts}; {_ROUNDING}")
    elif on_cpu and own > share:
        say(
            f"a rank computes with {own} threads as before, where its share of the cores is {share}: slower, "
            "but bitwise identical; OMP_NUM_THREADS sets another number"
        )
    before = known.get("processor")
    if isinstance(before, str) and before != now.processor:
        say(f"checkpoint {step} was computed on another processor: {before} → {now.processor}; {_ROUNDING}")
    return now


def processor(device: torch.device) -> str:
    """Return the model of the GPU, or of the CPU with the instructions that torch uses."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{_cpu_model()} ({torch.backends.cpu.get_cpu_capability()})"


def _cpu_model() -> str:
    with suppress(OSError, UnicodeDecodeError):
        for line in _CPU_INFO.read_text(encoding="utf-8").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.machine()


def _threads(noted: object, world_size: int) -> list[int] | None:
    """Return the recorded threads by rank; None if unknown or recorded for another number of ranks."""
    if not isinstance(noted, list) or len(noted) != world_size:
        return None
    return noted if all(type(count) is int and 1 <= count <= 4096 for count in noted) else None


def _is_set_by_user(environ: Mapping[str, str]) -> bool:
    """Return True if the user set OMP_NUM_THREADS, rather than our launcher to the rank's share."""
    count = environ.get("OMP_NUM_THREADS", "")
    return count.isdecimal() and int(count) > 0 and THREADS_BY_SHARE not in environ


def _in_words(threads: list[int]) -> str:
    """Return ``4``, or ``4, 4, 3`` if ranks differ."""
    return ", ".join(map(str, threads if len(set(threads)) > 1 else threads[:1]))
