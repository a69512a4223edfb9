"""How long a rank waits for torch.compile: in a run's first attempt, and in one that continues it.

    python -m benchmarks.compile_start [--rounds 7] [--quick] [--modes]

Each arm is a process of its own that builds a ViT-tiny, compiles it as ``compile: true`` (its 12 blocks,
which are alike) or ``compile: {scope: model}`` (of 4 blocks) does, and trains one step on the CPU with one
thread. The time is that from the call of ``compile_model`` to the end of this first step. *Cold*: the run's
``cache/`` is empty. *Warm*: it contains what a process before has compiled, as after a requeue. The target:
cold takes at least 8 times as long as warm. A round takes a minute. ``--quick`` compiles one block. Writes
benchmarks/results/compile_start.json.

``--modes`` measures only what modes and scopes cost and give: with 4 blocks, the seconds of the first step in
an empty cache beside the median of ten steps after it. ``--device cuda`` does so for a ViT-small of 12 blocks
in bf16, with CUDA's modes; there all compile at the same time, and the later steps take turns.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn

from benchmarks.arms import environment, printed
from benchmarks.gpu_throughput import IS_STAND_IN
from benchmarks.measuring import (
    ROOT,
    cannot_run,
    comparison,
    conditions,
    interleaved,
    parser,
    report,
    rounds_of,
    table,
)
from hpc_train.experiment.config.training_sections import CompileConfig
from hpc_train.training import compiling
from hpc_train.training.compiling import compile_model

#: ``compile.scope`` → the title of its comparison.
TITLES = {"blocks": "First compiled step, by block", "model": "First compiled step, whole model"}
COLD, WARM = "cold: the run's first attempt", "warm: the next attempt"
#: ``compile.scope`` → the number of blocks.
_BLOCKS, _BLOCKS_QUICK = {"blocks": 12, "model": 4}, {"blocks": 1}
#: By device. On a CPU reduce-overhead is default.
MODES = {"cpu": ("default", "max-autotune"), "cuda": ("default", "reduce-overhead", "max-autotune")}
#: Device → the title of its table of modes.
MODES_TITLE = {"cpu": "Modes of torch.compile", "cuda": "Modes of torch.compile on one GPU"}
#: Model, number of blocks and batch size by device.
_TRIALS = {"cpu": ("vit_tiny_patch16_224", 4, 2), "cuda": ("vit_small_patch16_224", 12, 128)}
#: Steps after the first one, of which the median counts.
_STEPS = 10
#: What the child process prints before its result, in case something else prints, too.
_MARK = "seconds:"


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--modes", action="store_true", help="compare modes and scopes")
    options.add_argument("--device", choices=[*MODES], default="cpu", help="of --modes")
    options.add_argument("--results", type=Path, help=argparse.SUPPRESS)
    options.add_argument("--child", nargs=3, metavar=("SCOPE", "BLOCKS", "MODE"), help="what each arm starts")
    options.add_argument("--turn", type=Path, help=argparse.SUPPRESS)
    arguments = options.parse_args()
    if arguments.child:
        scope, num_blocks, mode = arguments.child
        print(_MARK, *times(scope, int(num_blocks), mode, arguments.device, arguments.turn))
        return
    if arguments.modes and arguments.device == "cuda":
        _report_cuda_modes(arguments)
        return
    if arguments.modes:
        found = [_modes(1 if arguments.quick else 4)]
        report("compile_start", arguments, conditions(["timm"]) | {"threads": 1}, tables=found)
        return
    compared = []
    with tempfile.TemporaryDirectory() as folder:
        for scope, num_blocks in (_BLOCKS_QUICK if arguments.quick else _BLOCKS).items():
            values = interleaved(_arms(scope, num_blocks, Path(folder) / scope), rounds_of(arguments))
            compared.append(comparison(TITLES[scope], "seconds", values, COLD))
    report("compile_start", arguments, conditions(["timm"]) | {"threads": 1}, compared)


def _report_cuda_modes(arguments: argparse.Namespace) -> None:
    if not torch.cuda.is_available():
        cannot_run("there is no CUDA device")
    if IS_STAND_IN:
        cannot_run("only a GPU shows it: the stand-in has no Triton")
    here = conditions(["timm", "triton"], device=torch.cuda.get_device_name())
    rows = _cuda_modes(1 if arguments.quick else _TRIALS["cuda"][1])
    remark = "Once; all compiled at the same time, later steps one program at a time"
    found = table(MODES_TITLE["cuda"], "seconds", rows, remark=remark)
    report("compile_start", arguments, here, tables=[found], results=arguments.results)


def _arms(scope: str, num_blocks: int, cache: Path) -> dict[str, Callable[[], float]]:
    """Return what is measured. A cold arm leaves in ``cache`` what the warm arms after it use."""

    def cold() -> float:
        shutil.rmtree(cache, ignore_errors=True)
        return _times(scope, num_blocks, cache)[0]

    def warm() -> float:
        if not cache.exists():
            cold()
        return _times(scope, num_blocks, cache)[0]

    return {COLD: cold, WARM: warm}


def _modes(num_blocks: int) -> dict[str, Any]:
    """Return the table of modes, each in an empty cache."""
    rows = {}
    for scope, mode in settings("cpu"):
        with tempfile.TemporaryDirectory() as cache:
            first_s, step_s = _times(scope, num_blocks, Path(cache), mode)
        rows[row_title(scope, mode)] = {"first step": first_s, "step": step_s}
    return table(MODES_TITLE["cpu"], "seconds", rows)


def settings(device: str) -> list[tuple[str, str]]:
    """Return scopes and modes, eager first."""
    return [("eager", "default"), *((scope, mode) for scope in TITLES for mode in MODES[device])]


def row_title(scope: str, mode: str) -> str:
    return scope if scope == "eager" else f"{{scope: {scope}, mode: {mode}}}"


def _cuda_modes(num_blocks: int) -> dict[str, dict[str, float]]:
    """Return the seconds of the first and of a later step by mode; a mode that fails is omitted."""
    rows = {}
    with tempfile.TemporaryDirectory() as folder:
        turn = ["--device", "cuda", "--turn", str(Path(folder) / "turn")]
        started = {}
        for number, (scope, mode) in enumerate(settings("cuda")):
            variables = environment(None) | _caches(Path(folder) / str(number))
            command = [*_child(scope, num_blocks, mode), *turn]
            started[row_title(scope, mode)] = subprocess.Popen(
                command, cwd=ROOT, env=variables, stdout=subprocess.PIPE, text=True
            )
        for title, process in started.items():
            output = process.communicate()[0]
            if process.returncode == 0:
                first_s, step_s = _parsed(output)
                rows[title] = {"first step": first_s, "step": step_s}
    return rows


def _caches(cache: Path) -> dict[str, str]:
    """Return the variables that launchers set."""
    return {"TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"), "TRITON_CACHE_DIR": str(cache / "triton")}


def _child(scope: str, num_blocks: int, mode: str) -> list[str]:
    return [sys.executable, "-m", "benchmarks.compile_start", "--child", scope, str(num_blocks), mode]


def _times(scope: str, num_blocks: int, cache: Path, mode: str = "default") -> tuple[float, float]:
    return _parsed(printed(_child(scope, num_blocks, mode), environment(None) | _caches(cache)))


def _parsed(output: str) -> tuple[float, float]:
    (line,) = (line for line in output.splitlines() if line.startswith(_MARK))
    first_s, step_s = map(float, line.removeprefix(_MARK).split())
    return first_s, step_s


def times(
    scope: str, num_blocks: int, mode: str, device: str = "cpu", turn: Path | None = None
) -> tuple[float, float]:
    """Return the seconds from the start of compiling to the end of the first step, and of a later step.

    ``scope``: ``eager``, or that of ``compile:``. ``turn``: a file that is locked during the later steps.
    """
    import timm

    torch.manual_seed(0)
    torch.set_num_threads(1)
    name, _, batch_size = _TRIALS[device]
    place = torch.device(device)
    model: nn.Module = timm.create_model(name, depth=num_blocks).to(place)
    optimizer = torch.optim.AdamW(model.parameters(), fused=device == "cuda")
    images = torch.randn(batch_size, 3, 224, 224, device=place)
    classes = torch.arange(batch_size, device=place)
    if device == "cuda":
        torch.cuda.synchronize()
    began = time.perf_counter()
    settings: dict[str, Any] = {} if scope == "eager" else {"scope": scope, "mode": mode}
    config = CompileConfig(enabled=scope != "eager", **settings)
    compile_model(model, list(model.get_submodule("blocks").children()), config, place)

    def step() -> float:
        """Return when it ended."""
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            loss = nn.functional.cross_entropy(model(images), classes)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    with compiling.first_step(config):
        first_s = step() - began
    with open(turn or os.devnull, "w") as file:  # noqa: PTH123
        fcntl.flock(file, fcntl.LOCK_EX)
        if device == "cuda":  # CUDA graphs are recorded in the second and third step
            for _ in range(2):
                step()
        ends = [time.perf_counter(), *(step() for _ in range(_STEPS))]
    return first_s, median(end - start for start, end in pairwise(ends))


if __name__ == "__main__":
    main()
