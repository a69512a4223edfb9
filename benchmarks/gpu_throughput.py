"""Training on one GPU: throughput, model FLOPs utilization and peak memory of hpc-train and of other loops.

    python -m benchmarks.gpu_throughput [--minutes 9] [--models …] [--precisions …] [--peers FOLDER] [--quick]

ResNet-50, ViT-B/16 and ConvNeXt-B of timm at 224 × 224, and a GPT of GPT-2's smallest shape; bf16, fp16,
tf32, fp32 and fp8; eager and compiled. Arms: a bare PyTorch loop; timm's train.py with --channels-last, --amp
and --torchcompile, which reads small image files with 8 loader processes (bf16 and fp16); and ``hpc-train
submit --local``. Each arm of a round is a process of its own. Memory is what ``nvidia-smi`` reports, less
what was used before; MFU needs the device's peak (``plan.gpu_models``).

Cases are measured one by one, with seven rounds each, until ``--minutes`` are used up; results of earlier
calls stay, so several calls cover all. Writes benchmarks/results/gpu_throughput.json.
"""

from __future__ import annotations

import argparse
import functools
import json
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from PIL import Image

from benchmarks.arms import TIMM_SCRIPT, environment, line_times, printed, row_times
from benchmarks.gpu_cases import (
    CASES,
    GPT_ARGS,
    IMAGE_SIZE,
    MODELS,
    PRECISIONS,
    SEQUENCE_LENGTH,
    Case,
    utilization,
)
from benchmarks.gpu_loop import flops_per_sample
from benchmarks.measuring import (
    cannot_run,
    comparison,
    conditions,
    interleaved,
    parser,
    report,
    rounds_of,
    table,
)

BARE, TIMM, OURS = "bare loop", "timm train.py", "hpc-train"
#: Steps per window; windows before the ones that count; windows that count.
WINDOW, WARM_UP, COUNTED = 10, 2, 4
QUICK_WINDOW = 1
#: What one arm reports, by name.
Parts = Mapping[str, float]

EXPERIMENT = """\
name: gpu
task: {task}
model: {model}
data: {data}
precision: {precision}
compile: {compile}
optimization:
  steps: {steps}
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
    arguments = options.parse_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        cannot_run("there is no CUDA device; run make bench-gpu where torch.cuda.is_available() is true")
    device = torch.cuda.get_device_name() if arguments.device == "cuda" else None
    packages = ("timm", "torchao", "triton")
    measured_with = conditions(packages, device=device) | {"cuda": str(torch.version.cuda)}
    cases = [
        each for each in CASES if each.model in arguments.models and each.precision in arguments.precisions
    ]
    with tempfile.TemporaryDirectory() as folder:
        for case in within(arguments.minutes, cases[:1] if arguments.quick else cases):
            arms = _Arms(case, arguments, Path(folder))
            values = interleaved(arms.all(), rounds_of(arguments))
            times = {arm: [parts["seconds"] for parts in rounds] for arm, rounds in values.items()}
            compared = comparison(case.title, "seconds per step", times, BARE, arms.missing())
            here = measured_with | {"batch size": arms.batch_size}
            measured = table(
                f"{case.title}: throughput and memory",
                "",
                {arm: arms.row(rounds, device or "") for arm, rounds in values.items()},
                remark="Medians of the rounds above",
            )
            report("gpu_throughput", arguments, here, [compared], [measured])


def within(minutes: float, cases: list[Case]) -> Iterator[Case]:
    """Yield cases until another one, as long as the longest so far, would exceed the time."""
    deadline, longest = time.monotonic() + 60 * minutes, 0.0
    for number, case in enumerate(cases):
        began = time.monotonic()
        if began + longest > deadline:
            print(f"no time for {len(cases) - number} cases, from {case.title} on", file=sys.stderr)
            return
        yield case
        longest = max(longest, time.monotonic() - began)


class _Arms:
    """What measures one case; each arm returns its seconds per step and peak memory."""

    def __init__(self, case: Case, arguments: argparse.Namespace, folder: Path) -> None:
        self.case, self.folder, self.device = case, folder, arguments.device
        self.settings = MODELS[case.model]
        self.batch_size = 2 if arguments.quick else self.settings.batch_size
        self.window = QUICK_WINDOW if arguments.quick else WINDOW
        self.script = (arguments.peers or Path()).absolute() / TIMM_SCRIPT
        self.variables = {
            name: value for name, value in environment(arguments.peers).items() if name != "OMP_NUM_THREADS"
        }

    def all(self) -> dict[str, Callable[[], Parts]]:
        times = {BARE: self._bare, TIMM: self._timm, OURS: self._ours}
        return {
            arm: functools.partial(self._measured, run)
            for arm, run in times.items()
            if arm not in self.missing()
        }

    def missing(self) -> list[str]:
        """timm's script has no models of text, and no flags for tf32 and fp8."""
        can_run = self.case.model != "gpt" and self.case.precision in ("bf16", "fp16")
        return [] if can_run and self.script.exists() else [TIMM]

    def row(self, rounds: list[Parts], device: str) -> dict[str, float | None]:
        """Return an arm's row of the table."""
        per_s = self.batch_size / statistics.median(parts["seconds"] for parts in rounds)
        used = utilization(device, self.case.precision, per_s * flops_per_sample(self.case.model))
        return {
            "samples/s": per_s,
            "MFU, %": None if used is None else 100 * used,
            "peak memory, GB": statistics.median(parts["peak GB"] for parts in rounds),
        }

    def _measured(self, times: Callable[[], list[float]]) -> Parts:
        with _peak_memory(self.device) as peak_gb:
            found = times()
        seconds = (found[-1] - found[WARM_UP]) / (self.window * (len(found) - 1 - WARM_UP))
        return {"seconds": seconds, "peak GB": max(peak_gb) - peak_gb[0]}

    def _bare(self) -> list[float]:
        words = ["-m", "benchmarks.gpu_loop", self.case.model, self.case.precision]
        words += ["--device", self.device, "--batch-size", str(self.batch_size), "--window", str(self.window)]
        words += ["--windows", str(WARM_UP + COUNTED), *(["--compile"] if self.case.is_compiled else [])]
        found: list[float] = json.loads(printed([sys.executable, *words], self.variables).splitlines()[-1])
        return found

    def _ours(self) -> list[float]:
        return row_times(self._experiment(), 1, self.variables, f"device={self.device}")

    def _experiment(self) -> str:
        is_text = self.case.model == "gpt"
        timm = {"name": f"timm/{self.case.model}", "channels_last": self.settings.channels_last}
        text = {"name": "text", "root": str(self._text())}
        arguments = {"sequence_length": SEQUENCE_LENGTH, "val_fraction": 0, "tokens": "bytes"}
        return EXPERIMENT.format(
            task="causal_lm" if is_text else "classification",
            model=json.dumps({"name": "gpt", "args": GPT_ARGS} if is_text else timm),
            data=json.dumps(
                text | {"args": arguments} if is_text else {"name": "benchmarks.gpu_loop:images"}
            ),
            precision=self.case.precision,
            compile=json.dumps(self.case.is_compiled),
            steps=self.window * (WARM_UP + COUNTED + 1),
            batch=self.batch_size,
            optimizer=self.settings.optimizer,
            window=self.window,
        )

    def _text(self) -> Path:
        file = self.folder / "bytes"
        if not file.exists():
            file.write_bytes(random.Random(0).randbytes(4_000_000))
        return file

    def _timm(self) -> list[float]:
        dtype = {"bf16": "bfloat16", "fp16": "float16"}[self.case.precision]
        words = [
            *(str(self.script), "--data-dir", str(_image_folder(self.folder)), "--num-classes", "1000"),
            *("--model", self.case.model, "--img-size", str(IMAGE_SIZE), "--no-aug"),
            *("--smoothing", "0", "--amp", "--amp-dtype", dtype),
            *("--opt", self.settings.optimizer, "--lr", "0.001", "--sched", "step", "--decay-epochs", "99"),
            *("--warmup-epochs", "0", "--epochs", "1", "--epoch-repeats", "20", "--workers", "8"),
            *("--batch-size", str(self.batch_size), "--log-interval", str(self.window), "--pin-mem"),
            *(["--channels-last"] if self.settings.channels_last else []),
            *(["--torchcompile"] if self.case.is_compiled else []),
            *("--device", self.device, "--output", str(self.folder / "timm")),
        ]
        count = WARM_UP + COUNTED + 1
        return line_times([sys.executable, *words], r"^Train: ", count, self.variables)


def _image_folder(folder: Path) -> Path:
    """Write small images, of which timm makes 224 × 224; return the folder for ``--data-dir``."""
    root = folder / "images"
    if root.exists():
        return root
    for part, count in (("train", 1024), ("val", 8)):
        for number in range(count):
            file = root / part / str(number % 8) / f"{number}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            Image.effect_noise((32, 32), 64).convert("RGB").save(file)
    return root


@contextmanager
def _peak_memory(device: str) -> Iterator[list[float]]:
    """Sample the GPU's used memory; the list has GB, the first from before."""
    samples = [_used_gb(device)]
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(0.2):
            samples.append(_used_gb(device))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield samples
    finally:
        ended.set()
        thread.join()


def _used_gb(device: str) -> float:
    if device != "cuda":
        return 0.0
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "--id=0"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return float(done.stdout) * 2**20 / 1e9


if __name__ == "__main__":
    main()
