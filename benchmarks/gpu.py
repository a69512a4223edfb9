"""All that one GPU can show, most informative first, in 12 minutes.

    python -m benchmarks.gpu [--only PART …] [--minutes 12] [--wheels FOLDER] [--peers FOLDER] [--quick]
    python -m benchmarks.gpu --only all-tests --minutes 60 [-- ARGUMENTS OF PYTEST]

``make gpu-day`` calls the first, ``make test-gpu`` the second. Parts: ``path``, ``probes``, ``cifar`` and
``memory`` (benchmarks.gpu_parts), ``tests`` (the most informative GPU tests), ``speed``
(benchmarks.gpu_throughput), ``modes`` (those of torch.compile, benchmarks.compile_start), ``epochs``
(benchmarks.epoch_times) and ``all-tests``, the last two in the time that is left. Each has a limit of its
own, keeps its results as soon as it has them, and is not repeated if the results files have it already with
this device and these versions. As many tests run at a time as the device's memory allows, those marked
``alone`` one by one. Where packages come as wheels and nothing can be downloaded, ``--wheels`` unpacks them
into .bench/wheels.

Writes benchmarks/results/gpu.json (the outcome of each test), gpu_parts.json, gpu_throughput.json, and
docs/performance.md. Without a CUDA device it uses the stand-in of the tests with ``--quick``, writes into
.bench/gpu instead, and says what only a GPU shows. Exits with 1 if a part failed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import time
import zipfile
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks import performance_page
from benchmarks.measuring import NOT_MEASURED, RESULTS, ROOT, conditions, table, write
from benchmarks.turns import send
from tests import fake_cuda

#: The most seconds of each part, in order of importance; all before ``epochs`` take 12 minutes together.
LIMITS = {
    "path": 60,
    "probes": 45,
    "tests": 130,
    "speed": 260,
    "cifar": 90,
    "memory": 45,
    "modes": 85,
    "epochs": 300,
    "all-tests": 3600,
}
_INFORMATIVE = (
    "asynchronous_save or waits_for_the_device_nowhere or taken_without or pinned or proves"
    " or float8_products or (killed and ddp) or two_ranks or device_error or memory_runs_out"
)
#: Assumed: of a test's processes, contexts included.
_TEST_GIB = 6
_PACKAGES = ("torchao", "timm", "triton")
_TITLE = "Parts of make gpu-day"
_STAND_IN = ROOT / ".bench" / "gpu"


class Outcomes:
    """A plug-in of pytest that writes how each test ended, at once."""

    def __init__(self, file: Path) -> None:
        self.tests: dict[str, dict[str, Any]] = {}
        self._file = file

    def pytest_runtest_logreport(self, report: Any) -> None:
        seconds = self.tests.get(report.nodeid, {}).get("seconds", 0.0) + report.duration
        is_first = report.nodeid not in self.tests
        if is_first or report.outcome != "passed":  # of set-up, call and tear-down the worst counts
            outcome: str = report.outcome
        else:
            outcome = self.tests[report.nodeid]["outcome"]
        self.tests[report.nodeid] = {"outcome": outcome, "seconds": round(seconds, 2)}
        if report.when == "teardown":
            keep(self._file, {report.nodeid: self.tests[report.nodeid]})


def place() -> dict[str, Any]:
    """Return the device and the versions that results hold for."""
    import torch

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
    """Return the file's new content: tests in the same place that did not run keep their outcome."""
    is_same = all(known.get(key) == value for key, value in here.items())
    found = (known["tests"] if is_same else {}) | tests
    return {"date": date, **here, "tests": dict(sorted(found.items()))}


def keep(file: Path, tests: dict[str, Any]) -> dict[str, Any]:
    """Write the outcomes of ``tests`` into the file; return what it has of this place."""
    known = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    found = merged(known, place(), tests, datetime.now(UTC).isoformat(timespec="seconds"))
    if tests:
        file.parent.mkdir(parents=True, exist_ok=True)
        new = file.with_suffix(".new")
        new.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        new.replace(file)
    return found


def run_tests(results: Path, only: str, extra: list[str]) -> int:
    """Run the GPU tests that have not passed here yet; return pytest's exit code, 0 if none are left."""
    import pytest
    import torch

    file = results / "gpu.json"
    passed = [name for name, test in keep(file, {})["tests"].items() if test["outcome"] == "passed"]
    words = ["-q", "tests/gpu", *(f"--deselect={name}" for name in passed), *(["-k", only] if only else [])]
    codes = []
    at_once = num_workers(torch.cuda.mem_get_info()[0])
    for marks, workers in (("gpu and not alone", at_once), ("gpu and alone", 0)):
        parallel = ["-n", str(workers), "--dist", "worksteal"] if workers > 1 and find_spec("xdist") else []
        codes.append(int(pytest.main([*words, "-m", marks, *parallel, *extra], plugins=[Outcomes(file)])))
    no_tests = int(pytest.ExitCode.NO_TESTS_COLLECTED)
    return next((code for code in codes if code not in (0, no_tests)), 0)


def num_workers(free_bytes: int) -> int:
    """Return how many tests may run at the same time."""
    return max(1, min(free_bytes // (_TEST_GIB << 30), len(os.sched_getaffinity(0)) - 2, 12))


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=[*LIMITS], default=[*LIMITS], help="these parts")
    parser.add_argument("--minutes", type=float, default=12.0, help="for all parts together")
    parser.add_argument("--quick", action="store_true", help="a trial: tiny models, few tests")
    parser.add_argument("--wheels", type=Path, help="a folder of wheels to be used")
    parser.add_argument("--peers", type=Path, help="where requirements-peers.txt was installed")
    parser.add_argument("--data", type=Path, default=ROOT / "data" / "cifar10-images")
    parser.add_argument("--run-tests", help=argparse.SUPPRESS)  # be the part with these tests
    parser.add_argument("pytest", nargs="*", help="arguments of pytest, after --")
    arguments = parser.parse_args(words)
    os.chdir(ROOT)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    if arguments.wheels is not None:
        unpacked = str(unpack(arguments.wheels, ROOT / ".bench" / "wheels"))
        os.environ["PYTHONPATH"] += os.pathsep + unpacked
        sys.path.append(unpacked)
    if not _has_gpu():
        if problem := fake_cuda.why_not():
            print(f"not measured: there is no CUDA device, and no stand-in: {problem}", file=sys.stderr)
            return NOT_MEASURED
        print(
            "no CUDA device: a trial with the stand-in of the tests; its times mean nothing", file=sys.stderr
        )
        os.environ |= fake_cuda.environment()
    is_trial = fake_cuda.is_here() or arguments.quick
    results = _STAND_IN if is_trial else RESULTS
    if arguments.run_tests is not None:
        return run_tests(results, arguments.run_tests, arguments.pytest)
    outcomes = _run_parts(arguments, results, is_trial)
    performance_page.write(results if is_trial else performance_page.DOCS, results)
    return int(any(row["outcome"] == "failed" for row in outcomes.values()))


def _has_gpu() -> bool:
    code = "import sys, torch; sys.exit(not torch.cuda.is_available())"
    return subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def unpack(wheels: Path, folder: Path) -> Path:
    """Unpack wheels that are not there yet; what is missing in them is found as usual."""
    for wheel in sorted(wheels.glob("*.whl")):
        done = folder / f".{wheel.name}"
        if not done.exists():
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(folder)
            done.touch()
    return folder


def _run_parts(arguments: argparse.Namespace, results: Path, is_trial: bool) -> dict[str, dict[str, Any]]:
    slower = 20 if is_trial else 1
    deadline = time.monotonic() + 60 * arguments.minutes * slower
    here = conditions(device=_device_name())
    file = results / "gpu_parts.json"
    known = json.loads(file.read_text(encoding="utf-8"))["tables"] if file.exists() else []
    outcomes: dict[str, dict[str, Any]] = {}
    for each in known:
        if each["title"] == _TITLE and each["conditions"]["device"] == here["device"]:
            outcomes = each["rows"]
    for part in LIMITS:
        if part not in arguments.only:
            continue
        limit_s = min(LIMITS[part] * slower, deadline - time.monotonic())
        outcomes[part] = _run_part(part, arguments, results, is_trial, limit_s)
        print(f"gpu-day: {part}: {outcomes[part]}", file=sys.stderr, flush=True)
        parts = table(_TITLE, "", outcomes, remark="Once")
        write("gpu_parts", here, tables=[parts], results=results)
    return outcomes


def _device_name() -> str:
    command = [sys.executable, "-c", "import torch; print(torch.cuda.get_device_name())"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def _run_part(
    part: str, arguments: argparse.Namespace, results: Path, is_trial: bool, limit_s: float
) -> dict[str, Any]:
    """Run a part in processes of its own, which end after ``limit_s``."""
    if limit_s < 5:
        return {"outcome": "no time left", "seconds": 0.0}
    quick = ["--quick"] if is_trial else []
    peers = ["--peers", str(arguments.peers)] if arguments.peers else []
    if part in ("tests", "all-tests"):
        chosen = _INFORMATIVE if part == "tests" else ""
        if is_trial:
            chosen = "pinned" if part == "tests" else "looked_at or batch_reaches"
        extra = ["--", *arguments.pytest] if arguments.pytest else []
        words = ["benchmarks.gpu", f"--run-tests={chosen}", *quick, *extra]
    elif part == "speed":
        minutes = ["--minutes", str(limit_s / 60)]
        models = ["--models", "gpt", "--precisions", "bf16"] if is_trial else []
        words = ["benchmarks.gpu_throughput", *minutes, *models, "--results", str(results), *peers, *quick]
    elif part == "modes":
        words = ["benchmarks.compile_start", "--modes", "--device", "cuda", "--results", str(results), *quick]
    elif part == "epochs":
        words = ["benchmarks.epoch_times", "--device", "cuda", "--results", str(results), *quick]
        words += ["--data", str(arguments.data.parent)]
    else:
        words = ["benchmarks.gpu_parts", part, "--results", str(results), *quick]
        words += ["--data", str(arguments.data)]
    began = time.monotonic()
    process = subprocess.Popen([sys.executable, "-m", *words], stderr=subprocess.PIPE, text=True)
    try:
        err = process.communicate(timeout=limit_s)[1]
        outcome = {0: "done", NOT_MEASURED: "not measured"}.get(process.returncode, "failed")
    except subprocess.TimeoutExpired:
        send(process.pid, signal.SIGKILL)
        err, outcome = process.communicate()[1], "cut off by its limit"
    sys.stderr.write(err)
    row: dict[str, Any] = {"outcome": outcome, "seconds": round(time.monotonic() - began, 1)}
    lines = [line for line in err.splitlines() if line.strip()]
    if outcome in ("failed", "not measured") and lines:
        row["why"] = lines[-1][:200].replace("|", "/")
    return row


if __name__ == "__main__":
    sys.exit(main())
