"""Training on one GPU: throughput, model FLOPs utilization and peak memory of hpc-train and of other loops.

    python -m benchmarks.gpu_throughput [--minutes 9] [--models …] [--precisions …] [--peers FOLDER] [--quick]

A GPT of GPT-2's smallest shape, timm's ResNet-50 and ViT-B/16 at 224 × 224; bf16 and fp8; eager, compiled as
a whole and by blocks. Arms: a bare PyTorch loop, Lightning Fabric and Accelerate around it (eager), timm's
train.py, which reads small image files with 8 loader processes, and ``hpc-train submit --local``. All arms of
a model in a precision start at once, in processes of their own, so that they compile at the same time. Then
they take turns, in random order: one trains for some windows of steps while the others are stopped, once per
round. MFU needs the device's peak (``plan.devices``). Where hpc-train takes longer than the bare loop
by more than 2 %, the kernels of both are compared by name, from a profile of two steps each.

Cases are measured by importance until ``--minutes`` are used up, those already measured with this device and
these versions are skipped. Writes benchmarks/results/gpu_throughput.json. ``--quick``: tiny models.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from benchmarks.arms import TIMM_SCRIPT, environment
from benchmarks.gpu_cases import CASES, MODELS, MODES, PRECISIONS, TINY, Case, Model, utilization
from benchmarks.gpu_loop import LOOPS, PROFILED, TINY_WINDOW, WARM_UP, WINDOW, flops_per_sample
from benchmarks.measuring import (
    RESULTS,
    ROOT,
    cannot_run,
    comparison,
    conditions,
    parser,
    report,
    table,
)
from benchmarks.turns import send

#: Set where tests' stand-in is the device, which has neither NCCL nor Triton.
IS_STAND_IN = "HPC_TRAIN_TEST_CUDA_BACKEND" in os.environ
BARE, TIMM, OURS = "bare loop", "timm train.py", "hpc-train"
_PACKAGE = {"Fabric": "lightning_fabric", "Accelerate": "accelerate"}
ROUNDS, WINDOWS = 3, 2
#: Until all arms have trained their first windows, compilation included.
_START_LIMIT_S = 150.0
_TURN_LIMIT_S = 60.0
#: By which a slower hpc-train has its kernels listed.
_SLOWER = 1.02
_NUM_KERNELS = 12

EXPERIMENT = """\
name: gpu
task: {task}
model: {model}
data: {data}
precision: {precision}
compile: {compile}
profile: {{after_steps: {window}, steps: {profiled}}}
optimization:
  steps: 1000000
  global_batch_size: {batch}
  micro_batch_size: {batch}
  optimizer: {{name: {optimizer}, lr: 0.001}}
  schedule: {{name: constant}}
evaluation: {{every_steps: 1000000}}
checkpoint: {{every_steps: 1000000}}
logging: {{every_steps: {window}}}
"""


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--minutes", type=float, default=9.0, help="no case starts that would take longer")
    options.add_argument("--models", nargs="+", choices=[*MODELS], default=[*MODELS])
    options.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=[*PRECISIONS])
    options.add_argument("--device", default="cuda", help=argparse.SUPPRESS)  # cpu: tries the program itself
    options.add_argument("--results", type=Path, help=argparse.SUPPRESS)
    arguments = options.parse_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        cannot_run("there is no CUDA device; run make bench-gpu where torch.cuda.is_available() is true")
    device = torch.cuda.get_device_name() if arguments.device == "cuda" else None
    packages = ("timm", "torchao", "triton", "lightning-fabric", "accelerate")
    here = conditions(packages, arguments.peers, device) | {"cuda": str(torch.version.cuda)}
    wanted = [
        each for each in CASES if each.model in arguments.models and each.precision in arguments.precisions
    ]
    file = (arguments.results or RESULTS) / "gpu_throughput.json"
    known = set() if arguments.quick and arguments.results is None else measured(file, here)
    for case in within(arguments.minutes, [each for each in wanted if each.title("eager") not in known]):
        compared, tables, batch_size = _measure(case, arguments, device or "")
        found = here | {"batch size": batch_size}
        report("gpu_throughput", arguments, found, compared, tables, arguments.results)
        if not compared:
            sys.exit(f"{case.model}, {case.precision}: nothing was measured")


def measured(file: Path, here: Mapping[str, Any]) -> set[str]:
    """Return the titles that the results file has of this device and these versions."""
    found = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    return {
        each["title"]
        for each in [*found.get("comparisons", []), *found.get("tables", [])]
        if all(each["conditions"].get(key) == here[key] for key in ("device", "versions"))
    }


def within(minutes: float, cases: list[Case]) -> Iterator[Case]:
    """Yield cases until another one, as long as the longest so far, would exceed the time."""
    deadline, longest = time.monotonic() + 60 * minutes, 0.0
    for number, case in enumerate(cases):
        began = time.monotonic()
        if began + longest > deadline:
            print(f"no time for {len(cases) - number} cases, from {case.title('eager')} on", file=sys.stderr)
            return
        yield case
        longest = max(longest, time.monotonic() - began)


class Arm:
    """A program that trains until it is killed; the end of each window is a line of its output."""

    def __init__(self, command: Sequence[str], variables: Mapping[str, str], folder: Path, line: str) -> None:
        self.folder, self.peak_gib, self.output = folder, 0.0, [""]
        self._times: list[float] = []
        self._line = re.compile(line)
        self.process = subprocess.Popen(
            command,
            env=dict(variables),
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout:
            for line in self.process.stdout:
                self.output.append(line)
                if self._line.search(line):
                    self._times.append(time.time())
                    if line.startswith("{"):
                        self.peak_gib = json.loads(line)["peak_gib"]

    def times(self) -> list[float]:
        """Return when each window ended."""
        return self._times

    @property
    def trace(self) -> Path | None:
        return next(iter(self.folder.glob("*.json.gz")), None)

    def wait_for(self, windows: int, limit_s: float) -> bool:
        """Wait until so many windows have ended; False if it fails or takes too long."""
        deadline = time.monotonic() + limit_s
        while len(self.times()) < windows:
            if self.process.poll() is not None or time.monotonic() > deadline:
                return False
            time.sleep(0.01)
        return True

    def pause(self) -> None:
        send(self.process.pid, signal.SIGSTOP)

    def resume(self) -> None:
        send(self.process.pid, signal.SIGCONT)

    def end(self) -> None:
        send(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self._reader.join()


class OurArm(Arm):
    """hpc-train, whose rows of metrics have the times."""

    def times(self) -> list[float]:
        return [row["time"] for row in self._rows()]

    def _rows(self) -> list[dict[str, Any]]:
        found = next(iter(self.folder.glob("*/*/metrics.jsonl")), None)
        lines = [] if found is None else found.read_text(encoding="utf-8").splitlines(keepends=True)
        rows = [json.loads(line) for line in lines if line.endswith("\n")]
        self.peak_gib = max((row.get("peak_memory_gib", 0.0) for row in rows), default=0.0)
        return [row for row in rows if row["split"] == "train"]

    @property
    def trace(self) -> Path | None:
        return next(iter(self.folder.glob("*/*/**/profile.json.gz")), None)


def take_turns(arms: Mapping[str, Arm], rounds: int, window: int) -> dict[str, list[float]]:
    """Return the seconds per step of each arm by round; an arm that does not train is omitted."""
    running = {name: arm for name, arm in arms.items() if arm.wait_for(WARM_UP, _START_LIMIT_S)}
    for arm in arms.values():
        arm.pause()
    values: dict[str, list[float]] = {name: [] for name in running}
    for _ in range(rounds):
        for name in random.sample(list(running), len(running)):
            arm = running[name]
            # The window in which it was stopped does not count.
            begun = len(arm.times())
            arm.resume()
            trained = arm.wait_for(begun + 1 + WINDOWS, _TURN_LIMIT_S)
            arm.pause()
            if not trained:
                del running[name], values[name]
                continue
            times = arm.times()
            values[name].append((times[begun + WINDOWS] - times[begun]) / (WINDOWS * window))
    return values


def _measure(
    case: Case, arguments: argparse.Namespace, device: str
) -> tuple[list[dict[str, Any]], list[dict[str, Any]], int]:
    """Return the comparisons and tables of a case, and its batch size."""
    settings = (TINY if arguments.quick else MODELS)[case.model]
    compared, tables = [], []
    with tempfile.TemporaryDirectory() as folder:
        starting = _Starting(case, settings, arguments, Path(folder))
        modes = {mode: starting.arms(mode) for mode in case.modes()}
        if IS_STAND_IN:
            print(f"{case.title('compiled')}: only a GPU shows it (no Triton here)", file=sys.stderr)
            modes = {"eager": modes["eager"]}
        free_gib = torch.cuda.mem_get_info()[0] / 2**30 if device else math.inf
        for group in groups(modes, settings.memory_gib, free_gib):
            for mode, (of_mode, arms) in _times(starting, group).items():
                found = _compared(case, mode, settings, device, of_mode, arms, starting.expected(mode))
                compared += found[:1]
                tables += found[1:]
    return compared, tables, settings.batch_size


def groups(
    modes: Mapping[str, Sequence[str]], arm_gib: float, free_gib: float
) -> list[dict[str, Sequence[str]]]:
    """Return modes and their arms in groups that train at the same time, as large as the memory allows.

    An arm that does not fit with the others of its mode is omitted, the last first.
    """
    at_once = max(2, int(free_gib / arm_gib)) if free_gib < math.inf else sys.maxsize
    found: list[dict[str, Sequence[str]]] = []
    for mode, names in modes.items():
        first = [BARE, OURS]  # most important
        kept = [*first, *(name for name in names if name not in first)][:at_once]
        if found and sum(map(len, found[-1].values())) + len(kept) <= at_once:
            found[-1][mode] = kept
        else:
            found.append({mode: kept})
    return found


def _times(
    starting: _Starting, group: Mapping[str, Sequence[str]]
) -> dict[str, tuple[dict[str, list[float]], dict[str, Arm]]]:
    """Return by mode the seconds per step, and the arms, which have ended."""
    arms: dict[str, Arm] = {}
    try:
        for mode, names in group.items():
            for name in names:
                arms[f"{name}|{mode}"] = starting.start(name, mode)
        values = take_turns(arms, ROUNDS, starting.window)
    finally:
        for arm in arms.values():
            arm.end()
    for name in arms.keys() - values.keys():
        print(f"{name}: did not train\n{''.join(arms[name].output[-30:])}", file=sys.stderr)
    return {
        mode: (
            {name: values[f"{name}|{mode}"] for name in names if f"{name}|{mode}" in values},
            {name: arms[f"{name}|{mode}"] for name in names},
        )
        for mode, names in group.items()
    }


def _compared(
    case: Case,
    mode: str,
    settings: Model,
    device: str,
    values: dict[str, list[float]],
    arms: Mapping[str, Arm],
    expected: Sequence[str],
) -> list[dict[str, Any]]:
    """Return the comparison of a mode and its tables; nothing without the bare loop."""
    if BARE not in values:
        return []
    values = {name: values[name] for name in _NAMES if name in values}
    title = case.title(mode)
    missing = [name for name in expected if name not in values]
    compared = comparison(title, "seconds per step", values, BARE, missing)
    rows = {
        name: _row(settings, case.precision, device, of_arm, arms[name].peak_gib)
        for name, of_arm in values.items()
    }
    remark = "Medians of the rounds above"
    found = [compared, table(f"{title}: throughput and memory", "", rows, remark=remark)]
    if OURS in compared["arms"] and compared["arms"][OURS]["ratio"]["median"] > _SLOWER:
        kernels = kernel_difference(arms[BARE].trace, arms[OURS].trace)
        remark = f"Profiled once, {PROFILED} steps"
        found.append(table(f"{title}: time by kernel", "ms per step", kernels, remark=remark))
    return found


_NAMES = (*LOOPS, TIMM, OURS)


def _row(
    settings: Model, precision: str, device: str, rounds: Sequence[float], peak_gib: float
) -> dict[str, float | None]:
    per_s = settings.batch_size / statistics.median(rounds)
    used = utilization(device, precision, per_s * flops_per_sample(settings))
    return {
        "samples/s": per_s,
        "MFU, %": None if used is None else 100 * used,
        "peak memory allocated, GiB": peak_gib or None,
    }


def kernel_difference(bare: Path | None, ours: Path | None) -> dict[str, dict[str, float | None]]:
    """Return ms per step by kernel, those that differ most first, from two traces of torch's profiler."""
    if bare is None or ours is None:
        return {}
    (there, idle_there), (here, idle_here) = _kernel_ms(bare), _kernel_ms(ours)
    names = sorted(there.keys() | here.keys(), key=lambda name: -abs(here[name] - there[name]))
    rows: dict[str, dict[str, float | None]] = {
        "all kernels": {BARE: there.total(), OURS: here.total()},
        "idle between kernels": {BARE: idle_there, OURS: idle_here},
    }
    for name in names[:_NUM_KERNELS]:
        rows[name[:80].replace("|", "/")] = {BARE: there[name], OURS: here[name]}
    return rows


def _kernel_ms(trace: Path) -> tuple[Counter[str], float]:
    """Return ms per step by kernel, and between the first and the last in which none ran.

    Without a GPU: of operators.
    """
    opened = gzip.open if trace.suffix == ".gz" else open
    with opened(trace, "rt", encoding="utf-8") as file:
        events = json.load(file)["traceEvents"]
    total: Counter[str] = Counter()
    on_gpu = any(event.get("cat") == "kernel" for event in events)
    kinds = ("kernel", "gpu_memcpy", "gpu_memset") if on_gpu else ("cpu_op",)
    counted = sorted((event for event in events if event.get("cat") in kinds), key=lambda event: event["ts"])
    idle, end = 0.0, counted[0]["ts"] if counted else 0.0
    for event in counted:
        total[event["name"]] += event["dur"] / 1e3 / PROFILED
        idle += max(event["ts"] - end, 0.0)
        end = max(end, event["ts"] + event["dur"])
    return total, idle / 1e3 / PROFILED


class _Starting:
    """Starts the arms of a case."""

    def __init__(self, case: Case, settings: Model, arguments: argparse.Namespace, folder: Path) -> None:
        self.case, self.settings, self.folder = case, settings, folder
        self.device, self.is_tiny = arguments.device, arguments.quick
        self.window = TINY_WINDOW if arguments.quick else WINDOW
        self.script = (arguments.peers or Path()).absolute() / TIMM_SCRIPT
        self.peers = arguments.peers
        self.variables = {
            name: value for name, value in environment(arguments.peers).items() if name != "OMP_NUM_THREADS"
        } | ({"OMP_NUM_THREADS": "1"} if self.device == "cpu" else {})

    def expected(self, mode: str) -> list[str]:
        """Return the arms that a mode has where all peers are installed."""
        others = [*_PACKAGE] if mode == "eager" and self.case.precision == "bf16" else []
        has_timm = mode != "blocks compiled" and self.case.model != "gpt" and self.case.precision == "bf16"
        return [BARE, *others, *([TIMM] if has_timm else []), OURS]

    def arms(self, mode: str) -> list[str]:
        """Return those that can start here."""
        search = [*sys.path, *([] if self.peers is None else [str(self.peers)])]

        def is_here(name: str) -> bool:
            if name == TIMM:
                return self.script.exists()
            package = _PACKAGE.get(name)
            return package is None or any(Path(place, package).is_dir() for place in search)

        return [name for name in self.expected(mode) if is_here(name)]

    def start(self, name: str, mode: str) -> Arm:
        own = self.folder / f"{name} {mode}".replace(" ", "-")
        own.mkdir()
        if name == OURS:
            file = own / "exp.yaml"
            file.write_text(self._experiment(mode), encoding="utf-8")
            words = ["-m", "hpc_train", "submit", str(file), "--local", "--devices", "1"]
            words.append(f"device={self.device}")
            variables = {**self.variables, "HPC_TRAIN_RUNS": str(own)}
            return OurArm([sys.executable, *words], variables, own, "$^")
        if name == TIMM:
            return Arm([sys.executable, *self._timm(mode)], self.variables, own, r"^Train: ")
        words = ["-m", "benchmarks.gpu_loop", name, self.case.model, self.case.precision, mode]
        words += ["--device", self.device, "--trace", str(own / "trace.json.gz")]
        words += ["--tiny"] if self.is_tiny else []
        return Arm([sys.executable, *words], self.variables, own, r'^\{"step"')

    def _experiment(self, mode: str) -> str:
        settings = self.settings
        text = {"name": "text", "root": str(self._text())}
        arguments = {"sequence_length": settings.size, "val_fraction": 0, "tokens": "bytes"}
        pixels = {"name": "benchmarks.gpu_loop:images", "args": {"size": settings.size}}
        is_text = settings.args is not None
        model = {"name": "gpt", "args": settings.args}
        timm = {"name": f"timm/{settings.name}", "channels_last": settings.channels_last}
        return EXPERIMENT.format(
            task="causal_lm" if is_text else "classification",
            model=json.dumps(model if is_text else timm),
            data=json.dumps(text | {"args": arguments} if is_text else pixels),
            precision=self.case.precision,
            compile=MODES[mode],
            batch=settings.batch_size,
            optimizer=settings.optimizer,
            window=self.window,
            profiled=PROFILED,
        )

    def _text(self) -> Path:
        file = self.folder / "bytes"
        if not file.exists():
            file.write_bytes(random.Random(0).randbytes(4_000_000))
        return file

    def _timm(self, mode: str) -> list[str]:
        settings = self.settings
        return [
            *(str(self.script), "--data-dir", str(_image_folder(self.folder)), "--num-classes", "1000"),
            *("--model", settings.name, "--img-size", str(settings.size), "--no-aug"),
            *("--smoothing", "0", "--amp", "--amp-dtype", "bfloat16"),
            *("--opt", settings.optimizer, "--lr", "0.001", "--sched", "step", "--decay-epochs", "99"),
            *("--warmup-epochs", "0", "--epochs", "1", "--epoch-repeats", "1000", "--workers", "8"),
            *("--batch-size", str(settings.batch_size), "--log-interval", str(self.window), "--pin-mem"),
            *(["--channels-last"] if settings.channels_last else []),
            *(["--torchcompile"] if mode == "compiled" else []),
            *("--device", self.device, "--output", str(self.folder / "timm")),
        ]


def _image_folder(folder: Path) -> Path:
    """Write small images, of which timm makes larger ones; return the folder for ``--data-dir``."""
    root = folder / "images"
    if root.exists():
        return root
    for part, count in (("train", 1024), ("val", 8)):
        for number in range(count):
            file = root / part / str(number % 8) / f"{number}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            Image.effect_noise((32, 32), 64).convert("RGB").save(file)
    return root


if __name__ == "__main__":
    main()
