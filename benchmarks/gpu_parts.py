"""Measures on one GPU: a whole run, two probes of CUDA, CIFAR-10 to 94 %, and peak memory.

    python -m benchmarks.gpu_parts PART [--data data/cifar10-images] [--quick]

PART: ``path`` trains examples/digits.yaml by the real command with a profile. ``probes`` shows whether Python
sees a device error before NCCL ends the process, and whether a full queue of launches stops other threads.
``cifar`` trains examples/cifar10-94.yaml and splits its time. ``memory`` compares the memory that ``plan``
predicts with the allocator's peak, for four recipes. A part that the results file has with this device and
these versions is not repeated. Writes benchmarks/results/gpu_parts.json. ``--quick``: a trial of seconds.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from PIL import Image

from benchmarks.gpu_throughput import IS_STAND_IN, measured
from benchmarks.measuring import RESULTS, ROOT, cannot_run, conditions, parser, report, table
from benchmarks.memory_prediction import GPT, MODELS, experiment_of
from hpc_train.experiment.config.schema import Experiment
from hpc_train.experiment.topology.batch_arithmetic import BatchArithmetic
from hpc_train.experiment.topology.degrees import Degrees
from hpc_train.training.distributed.device import choose_precision
from hpc_train.training.forward import TrainingForward
from hpc_train.training.memory_prediction import PredictedStep
from hpc_train.training.non_finite import Guard
from hpc_train.training.step import train_step
from hpc_train.training.strategies.base import RankContext
from hpc_train.training.tasks.base import make_task
from hpc_train.training.train_state import build

RECIPES = (
    (GPT, "ddp", "bf16"),
    (GPT, "fsdp", "bf16"),
    ("ViT-B, 4 blocks", "ddp", "bf16"),
    ("ResNet-50", "ddp", "fp32"),
)
_NUM_SAMPLES = 10**6
Rows = dict[str, dict[str, Any]]

#: A device-side assert, then pending work: NCCL's watchdog or Python may be the first to see it.
_ABORT = """
import time, torch, torch.distributed as dist
torch.cuda.set_device(0)
dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
t = torch.ones(4, device="cuda"); dist.all_reduce(t)
t[torch.full((4,), 9, device="cuda")]; dist.all_reduce(t, async_op=True)
try:
    time.sleep(3); torch.cuda.synchronize()
except Exception as error:
    print("python saw", type(error).__name__)
"""
#: The longest time for which another thread did not run while 5,000 launches wait for a busy device.
_GAPS = """
import json, threading, time, torch
x, seen, go = torch.randn(1 << 20, device="cuda"), [], True
def tick():
    while go: seen.append(time.monotonic()); time.sleep(0.05)
gaps = {}
for name, f in (("eager", lambda: x.mul_(1.0)), ("compiled", torch.compile(lambda: x.sin().cos()))):
    f(); torch.cuda.synchronize(); seen.clear(); go = True; t = threading.Thread(target=tick); t.start()
    torch.cuda._sleep(10_000_000_000)
    for _ in range(5000): f()
    torch.cuda.synchronize(); go = False; t.join()
    gaps[name] = max(b - a for a, b in zip(seen, seen[1:]))
print(json.dumps(gaps))
"""


def main() -> None:
    options = parser(__doc__)
    options.add_argument("part", choices=[*PARTS])
    options.add_argument("--data", type=Path, default=ROOT / "data" / "cifar10-images")
    options.add_argument("--results", type=Path, help=argparse.SUPPRESS)
    arguments = options.parse_args()
    if not torch.cuda.is_available():
        cannot_run("there is no CUDA device")
    here = conditions(("timm", "torchao", "triton"), device=torch.cuda.get_device_name())
    here |= {"cuda": str(torch.version.cuda)}
    title, measure = PARTS[arguments.part]
    if title in measured((arguments.results or RESULTS) / "gpu_parts.json", here):
        print(f"{title}: measured before", file=sys.stderr)
        return
    found = table(title, "", measure(arguments))
    report("gpu_parts", arguments, here, tables=[found], results=arguments.results)


def _path(arguments: argparse.Namespace) -> Rows:
    steps = ["optimization.epochs=null", "optimization.steps=12", "optimization.schedule={name: constant}"]
    words = [str(ROOT / "examples" / "digits.yaml"), "device=cuda"]
    if arguments.quick:
        words += [*steps, "evaluation={every_steps: 12}", "profile={after_steps: 4, steps: 2}"]
    else:
        words.append("profile={after_steps: 20, steps: 5}")
    with tempfile.TemporaryDirectory() as folder:
        wall_s, rows = _trained(words, Path(folder))
        (table_file,) = Path(folder).glob("*/*/**/profile.txt")
        limited_by = re.findall(r"limited by: (\w+)", table_file.read_text(encoding="utf-8"))
    last, evaluated = ([row for row in rows if row["split"] == split][-1] for split in ("train", "val"))
    names = ("step_s", "data_wait_s", "tflops_per_s", "mfu", "peak_memory_gib")
    found = {name: last.get(name) for name in names}
    return {
        "whole command, s": {"value": wall_s},
        "accuracy": {"value": evaluated["accuracy"]},
        "limited by": {"value": ", ".join(limited_by)},
        **{name: {"value": value} for name, value in found.items()},
    }


def _trained(words: list[str], folder: Path) -> tuple[float, list[dict[str, Any]]]:
    """Run ``submit --local`` on one device; return its seconds and rows."""
    began = time.monotonic()
    command = [sys.executable, "-m", "hpc_train", "submit", *words, "--local", "--devices", "1", "--new"]
    environment = os.environ | {"HPC_TRAIN_RUNS": str(folder)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: exit code {done.returncode}\n{done.stderr[-4000:]}")
    (metrics,) = folder.glob("*/*/metrics.jsonl")
    rows = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    return time.monotonic() - began, rows


def _probes(arguments: argparse.Namespace) -> Rows:
    if IS_STAND_IN:
        cannot_run("only a GPU shows it: the stand-in has neither NCCL nor Triton")
    started = {
        name: subprocess.Popen(
            [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        for name, program in (("abort", _ABORT), ("gaps", _GAPS))
    }
    out = {name: process.communicate()[0] for name, process in started.items()}
    gaps = json.loads(out["gaps"].splitlines()[-1])
    return {
        "device error: exit code": {"value": started["abort"].returncode},
        "device error: seen by Python": {"value": "yes" if "python saw" in out["abort"] else "no"},
        **{f"full queue, {name}: longest gap of others, s": {"value": gap} for name, gap in gaps.items()},
    }


def _cifar(arguments: argparse.Namespace) -> Rows:
    words = [str(ROOT / "examples" / "cifar10-94.yaml")]
    with tempfile.TemporaryDirectory() as folder:
        data = arguments.data.absolute()
        if arguments.quick:
            data = _few_images(Path(folder) / "images")
            words += ["compile=false", "evaluation.every_epochs=1", "data.workers=0"]
            words += ["optimization.epochs=1", "optimization.schedule={name: constant}"]
            words += ["optimization.global_batch_size=20", "optimization.micro_batch_size=20"]
        elif not data.is_dir():
            cannot_run(f"{data} does not exist; --data names CIFAR-10's images in train/ and test/")
        began = time.time()
        wall_s, rows = _trained([*words, f"data.root={data}", "logging.every_steps=5"], Path(folder) / "runs")
    trained, evaluated = ([row for row in rows if row["split"] == split] for split in ("train", "val"))
    steps = [row["step"] for row in trained]
    counts = [after - before for before, after in itertools.pairwise([0, *steps])]
    waits = [count * row.get("data_wait_s", 0.0) for count, row in zip(counts, trained, strict=True)]
    first_s, training_s = trained[0]["time"] - began, trained[-1]["time"] - trained[0]["time"]
    return {
        "accuracy": {"value": evaluated[-1]["accuracy"]},
        "whole command, s": {"value": wall_s},
        "start, compilation and first 5 steps, s": {"value": first_s},
        "steps and evaluations after those, s": {"value": training_s},
        "of these waiting for data, s": {"value": sum(waits[1:])},
        "last checkpoint and end, s": {"value": wall_s - first_s - training_s},
    }


def _few_images(root: Path) -> Path:
    for part, count in (("train", 200), ("test", 20)):
        for number in range(count):
            file = root / part / str(number % 10) / f"{number}.jpg"
            file.parent.mkdir(parents=True, exist_ok=True)
            Image.effect_noise((32, 32), 64).convert("RGB").save(file)
    return root


def _memory(arguments: argparse.Namespace) -> Rows:
    recipes = {
        f"{name}, {strategy}, {precision}": (
            name,
            experiment_of(MODELS[name], strategy, "off").model_copy(update={"precision": precision}),
        )
        for name, strategy, precision in RECIPES[: 1 if arguments.quick else None]
    }
    predicted = {title: predicted_peak(*recipe) for title, recipe in recipes.items()}  # in a group of its own
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("gloo" if IS_STAND_IN else "nccl", store=store, rank=0, world_size=1)
    rows: Rows = {}
    for title, recipe in recipes.items():
        peak = measured_peak(*recipe, device)
        rows[title] = {
            "predicted, MB": predicted[title] / 1e6,
            "measured, MB": peak / 1e6,
            "error, %": 100 * (predicted[title] / peak - 1),
        }
        gc.collect()
        torch.cuda.empty_cache()
    dist.destroy_process_group()
    return rows


def predicted_peak(name: str, config: Experiment) -> int:
    """Return the predicted peak of a step of a model of ``memory_prediction.MODELS`` on one GPU, in bytes."""
    model = MODELS[name]
    step = PredictedStep(config, model.info, model.sample, _NUM_SAMPLES, Degrees(), 0, is_on_gpu=True)
    return step.predict().total


def measured_peak(name: str, config: Experiment, device: torch.device) -> int:
    """Return the allocator's peak in a step of one rank, in bytes, in an existing process group."""
    model = MODELS[name]
    precision = choose_precision(config.precision, device)
    context = RankContext(0, Degrees(), device, precision, parallel=config.parallel)
    arithmetic = BatchArithmetic.of(config.optimization, _NUM_SAMPLES, 1)
    state = build(config, model.info, arithmetic, context)
    forward = TrainingForward.of(config, model.info, state, make_task(config, model.info), precision, device)
    guard = Guard(config.optimization, state.model, norm_counts=False)
    whole = replace(model.sample.repeated(model.micro_batch_size), weight=1 / arithmetic.micro_batches)
    batches = [replace(whole, number=slot) for slot in range(2)]
    state.wrapped.train()
    train_step(state, 0, batches, forward, guard, None)
    gc.collect()
    torch.cuda.reset_peak_memory_stats(device)
    train_step(state, 1, batches, forward, guard, None)
    return torch.cuda.max_memory_allocated(device)


#: Title and measurement by name.
PARTS: dict[str, tuple[str, Callable[[argparse.Namespace], Rows]]] = {
    "path": ("examples/digits.yaml on one GPU, with a profile", _path),
    "probes": ("CUDA: who sees a device error, and whether a full queue stops other threads", _probes),
    "cifar": ("CIFAR-10 to 94 % on one GPU: where the time goes", _cifar),
    "memory": ("Peak memory of a step on one GPU, predicted and measured", _memory),
}


if __name__ == "__main__":
    main()
