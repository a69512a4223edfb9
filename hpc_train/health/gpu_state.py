"""A GPU's health according to the driver's counters, for the node check.

Read by nvidia-smi; missing values count as healthy.
"""

from __future__ import annotations

import re
import subprocess
from contextlib import suppress
from dataclasses import dataclass

_LIMIT_S = 10.0
#: The forms in which drivers print a flag that is set.
_YES = {"1", "Yes"}
#: Maximum number of lines of the kernel's log in a message.
_MOST_XID_LINES = 3


@dataclass(frozen=True)
class GpuState:
    """One GPU's counters."""

    #: Uncorrectable memory errors since the driver was loaded.
    ecc_errors: int = 0
    #: A row of memory will be replaced at the next reset of the GPU; no spare row was left.
    remap_pending: bool = False
    remap_failed: bool = False
    is_slowed: bool = False
    links_up: int = 0
    links_down: int = 0

    @property
    def fault(self) -> str | None:
        """The fault that excludes the node, if any; only a reset or a repair removes it."""
        if self.remap_failed:
            return "a broken row of its memory could not be replaced; the GPU must be repaired"
        return "a broken row of its memory waits for a reset of the GPU" if self.remap_pending else None

    @property
    def warnings(self) -> list[str]:
        """Problems that may be temporary or have no effect on this run."""
        faults = []
        if self.ecc_errors:
            faults.append(f"{self.ecc_errors} uncorrectable ECC errors since its driver was loaded")
        if self.is_slowed:
            faults.append("its hardware slows its clocks down: temperature or power")
        if self.links_up and self.links_down:
            faults.append(f"{self.links_down} of its {self.links_up + self.links_down} NVLinks are inactive")
        return faults


def read_state(uuid: str) -> GpuState:
    """Return the state of the GPU with this UUID (``GPU-8f…``)."""
    ecc = "ecc.errors.uncorrected.volatile.total"
    errors, slowed = _row(uuid, "gpu", ecc, "clocks_throttle_reasons.hw_slowdown")
    pending, failed = _row(uuid, "remapped-rows", "remapped_rows.pending", "remapped_rows.failure")
    links = smi("nvlink", "--status", "-i", uuid)
    return GpuState(
        ecc_errors=int(errors) if errors.isdecimal() else 0,
        remap_pending=pending in _YES,
        remap_failed=failed in _YES,
        is_slowed=slowed == "Active",
        links_up=len(re.findall(r"Link \d+: [\d.]+ GB/s", links)),
        links_down=len(re.findall(r"Link \d+: <inactive>", links)),
    )


def smi(*arguments: str) -> str:
    """Return the output of nvidia-smi; empty if it fails."""
    with suppress(OSError, subprocess.SubprocessError):
        command = ["nvidia-smi", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S, check=True)
        return done.stdout
    return ""


def xid_lines(address: str) -> list[str]:
    """Return the last errors of the GPU at this PCI address (``0000:41:00``) in the kernel's log.

    Empty if users may not read it.
    """
    with suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(["dmesg"], capture_output=True, text=True, timeout=_LIMIT_S, check=True)
        lines = [line for line in done.stdout.splitlines() if f"NVRM: Xid (PCI:{address}" in line]
        return lines[-_MOST_XID_LINES:]
    return []


def _row(uuid: str, query: str, *columns: str) -> list[str]:
    output = smi(f"--id={uuid}", f"--query-{query}={','.join(columns)}", "--format=csv,noheader")
    values = [value.strip() for value in output.strip().split(",")]
    return values if len(values) == len(columns) else [""] * len(columns)
