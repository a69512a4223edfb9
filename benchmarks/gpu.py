"""What passes on a GPU: runs the tests that need one and keeps what became of each.

    python -m benchmarks.gpu [pytest's arguments]

``make test-gpu`` calls it. Writes benchmarks/results/gpu.json: device, versions, and of each test its outcome
and seconds. A run of some tests (``-k fp8``) changes theirs alone, if device and versions are those of the
file; else the file begins anew. Where there is no CUDA device all tests skip and nothing is written. The exit
code is pytest's.
"""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pytest
import torch

RESULTS = Path(__file__).parent / "results" / "gpu.json"
_PACKAGES = ("torchao", "timm", "triton")


class Outcomes:
    """A plug-in of pytest that notes how each test ended."""

    def __init__(self) -> None:
        self.tests: dict[str, dict[str, Any]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        seconds = self.tests.get(report.nodeid, {}).get("seconds", 0.0) + report.duration
        is_first = report.nodeid not in self.tests
        if is_first or report.outcome != "passed":  # of set-up, call and tear-down the worst counts
            outcome: str = report.outcome
        else:
            outcome = self.tests[report.nodeid]["outcome"]
        self.tests[report.nodeid] = {"outcome": outcome, "seconds": round(seconds, 2)}


def place() -> dict[str, Any]:
    """Return the device and the versions that results hold for."""
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    versions |= {"cuda": str(torch.version.cuda), "nccl": ".".join(map(str, torch.cuda.nccl.version()))}
    for package in _PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return {"device": torch.cuda.get_device_name(), "driver": _driver(), "versions": versions}


def _driver() -> str | None:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def merged(known: dict[str, Any], here: dict[str, Any], tests: dict[str, Any], date: str) -> dict[str, Any]:
    """Return what the file is to say: with what it says already of other tests in the same place."""
    is_same = all(known.get(key) == value for key, value in here.items())
    found = (known["tests"] if is_same else {}) | tests
    return {"date": date, **here, "tests": dict(sorted(found.items()))}


def main(arguments: list[str]) -> int:
    outcomes = Outcomes()
    code = int(pytest.main(["-q", "-m", "gpu", *arguments], plugins=[outcomes]))
    if torch.cuda.is_available() and outcomes.tests:
        known = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
        date = datetime.now(UTC).isoformat(timespec="seconds")
        told = merged(known, place(), outcomes.tests, date)
        RESULTS.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
