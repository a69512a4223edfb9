"""The time of a training step, compared with a bare PyTorch loop and other tools.

    python -m benchmarks.step [--rounds 7] [--workloads mlp gpt_ddp …] [--arms …] [--peers FOLDER] [--quick]

Each arm trains the same model on the same data with the same optimizer in processes of its own, on the CPU
with one thread per rank, and takes the median time of a step after a warm-up. Workloads with ``ddp`` train on
two ranks (gloo, DistributedDataParallel), which timm's train.py can't do without GPUs. The arms of a round
take turns (``benchmarks.turns``), of 20 s for ResNet-50, so that all run under the same load of the machine;
steps in which an arm was stopped do not count. Ours is a whole run of ``hpc-train submit --local``: metrics,
exchange between ranks, checkpoints and validation of the data are on; its steps are timed by the rows of
``metrics.jsonl``. timm's script reads the same images by torchvision's MNIST class, through PIL. Arms that
``--arms`` leaves out, or whose package is not below ``--peers``, are "not measured".
Writes benchmarks/results/step.json.
"""

from __future__ import annotations

import argparse
import functools
import json
import random
import string
import struct
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from benchmarks.arms import TIMM_SCRIPT, environment, line_times, printed, row_times, under_torchrun
from benchmarks.loops import (
    DEEP_GPT_ARGS,
    GPT_ARGS,
    LOOPS,
    NUM_TOKENS,
    SEQUENCE_LENGTH,
    WORKLOADS,
    Workload,
    deep_gpt,
    differences,
    digits,
    gpt,
    vit_tiny,
)
from benchmarks.measuring import comparison, conditions, parser, report, rounds_of
from benchmarks.turns import by_turns, undisturbed

BARE, OURS, TIMM = "bare loop", "hpc-train", "timm train.py"
#: Arms that need a package below ``--peers``.
PACKAGES = {"Fabric": "lightning-fabric", "Accelerate": "accelerate", "HF Trainer": "transformers"}

EXPERIMENT = """\
name: step
task: {task}
model: {model}
data: {data}
compile: {compile}
optimization:
  steps: {steps}
  global_batch_size: {batch}
  micro_batch_size: {micro}
  optimizer: {{name: {optimizer}, lr: {lr}}}
  schedule: {{name: constant}}
evaluation: {{every_steps: 1000000}}
checkpoint: {{every_steps: {every}}}
logging: {{every_steps: {window}}}
"""


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--workloads", nargs="+", choices=[*WORKLOADS], default=[*WORKLOADS])
    options.add_argument("--arms", nargs="*", choices=[*LOOPS, TIMM], help="besides bare loop and hpc-train")
    arguments = options.parse_args()
    measured_with = conditions(("torchvision", "timm", *PACKAGES.values()), arguments.peers)
    missing = [arm for arm, package in PACKAGES.items() if package not in measured_with["versions"]]
    if not _timm_script(arguments.peers).exists():
        missing.append(TIMM)
    with tempfile.TemporaryDirectory() as folder:
        for name in arguments.workloads:
            workload = WORKLOADS[name].quick() if arguments.quick else WORKLOADS[name]
            arms = _arms(name, workload, arguments, Path(folder))
            timed = {arm: run for arm, run in _chosen(arms, arguments.arms).items() if arm not in missing}
            rounds = [by_turns(timed, workload.turn_s) for _ in range(rounds_of(arguments))]
            values = {arm: [round_[arm] for round_ in rounds] for arm in timed}
            absent = [arm for arm in arms if arm not in timed]
            compared = comparison(_title(workload), "seconds per step", values, BARE, absent)
            compared["turn_s"] = workload.turn_s
            batch = {"ranks": workload.ranks, "global batch size": workload.global_batch_size}
            report("step", arguments, measured_with | batch | {"threads of each rank": 1}, [compared])


def _chosen(arms: dict[str, Callable[[], float]], names: list[str] | None) -> dict[str, Callable[[], float]]:
    """Return the arms of ``--arms`` and those that no comparison is without; None: all."""
    return arms if names is None else {arm: arms[arm] for arm in arms if arm in (BARE, OURS, *names)}


def _title(workload: Workload) -> str:
    size = "1 rank, 1 thread" if workload.ranks == 1 else f"{workload.ranks} ranks, 1 thread each"
    how = f", compiled ({workload.compiled})" if workload.compiled else ""
    return f"Training step, {workload.model.__name__}{how}, {size}"


def _timm_script(peers: Path | None) -> Path:
    return (peers or Path()).absolute() / TIMM_SCRIPT


def _arms(
    name: str, workload: Workload, arguments: argparse.Namespace, folder: Path
) -> dict[str, Callable[[], float]]:
    """Return what measures the seconds per step of each arm."""
    variables = environment(arguments.peers)
    arms: dict[str, Callable[[], float]] = {
        loop: functools.partial(_of_loop, loop, name, workload, variables, quick=arguments.quick)
        for loop in LOOPS
    }
    if workload.model is vit_tiny and workload.ranks == 1:
        script = _timm_script(arguments.peers)
        arms[TIMM] = functools.partial(_of_timm, script, workload, variables, folder)
    return arms | {OURS: functools.partial(_of_ours, workload, variables, folder)}


def _of_loop(loop: str, name: str, workload: Workload, variables: Mapping[str, str], *, quick: bool) -> float:
    words = ["-m", "benchmarks.loops", loop, name, *(["--quick"] if quick else [])]
    out = printed(under_torchrun(workload.ranks, words), variables)
    return undisturbed(json.loads(out.splitlines()[-1]), workload.window, workload.turn_s)


def _of_ours(workload: Workload, variables: Mapping[str, str], folder: Path) -> float:
    times = row_times(experiment_of(workload, folder), workload.ranks, variables, "device=cpu")
    found = differences(times[workload.warm_up :], workload.window)
    return undisturbed(found, workload.window, workload.turn_s)


def experiment_of(workload: Workload, folder: Path) -> str:
    """Return the experiment file of a workload; text is written below ``folder``."""
    args = {gpt: GPT_ARGS, deep_gpt: DEEP_GPT_ARGS}.get(workload.model)
    is_text = args is not None
    # Flow style, which JSON is a part of.
    model = (
        {"name": "gpt", "args": args} if is_text else {"name": f"benchmarks.loops:{workload.model.__name__}"}
    )
    text = {"root": str(_text(folder)), "args": {"sequence_length": SEQUENCE_LENGTH, "val_fraction": 0}}
    images = {"name": "digits", "normalize": {"mean": [0.5], "std": [0.5]}}
    return EXPERIMENT.format(
        task="causal_lm" if is_text else "classification",
        model=json.dumps(model),
        data=json.dumps({"name": "text", **text} if is_text else images),
        compile=json.dumps({"scope": workload.compiled} if workload.compiled else False),
        steps=workload.steps(),
        batch=workload.global_batch_size,
        micro=workload.global_batch_size // workload.ranks,
        optimizer=workload.optimizer.removeprefix("fused_"),
        lr=workload.lr,
        every=max(workload.steps() // 3, 1),
        window=workload.window,
    )


def _text(folder: Path) -> Path:
    """Return a file of as many kinds of characters as Shakespeare's, in random order."""
    file = folder / "text.txt"
    if not file.exists():
        characters = (string.ascii_letters + string.digits + string.punctuation)[:NUM_TOKENS]
        file.write_text("".join(random.Random(0).choices(characters, k=300_000)), encoding="utf-8")
    return file


def _of_timm(script: Path, workload: Workload, variables: Mapping[str, str], folder: Path) -> float:
    words = [
        *(str(script), "--data-dir", str(_as_mnist(folder)), "--dataset", "torch/mnist"),
        *("--model", "vit_tiny_patch16_224", "--img-size", "32", "--in-chans", "1", "--num-classes", "10"),
        *("--model-kwargs", "patch_size=8", "img_size=32", "--mean", "0.5", "--std", "0.5", "--no-aug"),
        *("--opt", workload.optimizer, "--lr", str(workload.lr), "--sched", "step", "--decay-epochs", "99"),
        *("--warmup-epochs", "0", "--epochs", "1", "--batch-size", str(workload.global_batch_size)),
        *("--smoothing", "0", "--log-interval", "1", "--workers", "0"),
        *("--device", "cpu", "--output", str(folder / "timm")),
    ]
    # A line is written at the end of each step, so one more than times.
    count = workload.warm_up + workload.counted + 1
    times = line_times([sys.executable, *words], r"^Train: ", count, variables)
    return undisturbed(differences(times[workload.warm_up :], 1), 1, workload.turn_s)


def _as_mnist(folder: Path) -> Path:
    """Write the digits as the files that torchvision's MNIST reads; return the folder for it."""
    raw = folder / "MNIST" / "raw"
    if not raw.exists():
        raw.mkdir(parents=True)
        images, targets = digits()
        for part in ("train", "t10k"):
            _write_idx(raw / f"{part}-images-idx3-ubyte", (len(images), 32, 32), images.numpy().tobytes())
            classes = targets.to(images.dtype).numpy().tobytes()
            _write_idx(raw / f"{part}-labels-idx1-ubyte", (len(targets),), classes)
    return folder


def _write_idx(file: Path, shape: Iterable[int], data: bytes) -> None:
    """Write an array of bytes as LeCun's IDX format has it."""
    sizes = list(shape)
    file.write_bytes(bytes([0, 0, 8, len(sizes)]) + struct.pack(f">{len(sizes)}I", *sizes) + data)


if __name__ == "__main__":
    main()
