"""How long a rank waits for torch.compile: in a run's first attempt, and in one that continues it.

    python -m benchmarks.compile_start [--rounds 7] [--quick] [--modes]

Each arm is a process of its own that builds a ViT-tiny, compiles it as ``compile: true`` (its 12 blocks,
which are alike) or ``compile: {scope: model}`` (of 4 blocks) does, and trains one step on the CPU with one
thread. The time is that from the call of ``compile_model`` to the end of this first step. *Cold*: the run's
``cache/`` is empty. *Warm*: it contains what a process before has compiled, as after a requeue. The target:
cold takes at least 8 times as long as warm. A round takes a minute. ``--quick`` compiles one block. Writes
benchmarks/results/compile_start.json.

``--modes`` measures only what modes and scopes cost and give: with 4 blocks, the seconds of the first step in
an empty cache beside the median of ten steps after it.
"""

from __future__ import annotations

import shutil
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
from benchmarks.measuring import comparison, conditions, interleaved, parser, report, rounds_of, table
from hpc_train.config.training_sections import CompileConfig
from hpc_train.training import compiling
from hpc_train.training.compiling import compile_model

#: ``compile.scope`` → the title of its comparison.
TITLES = {"blocks": "First compiled step, by block", "model": "First compiled step, whole model"}
COLD, WARM = "cold: the run's first attempt", "warm: the next attempt"
#: ``compile.scope`` → the number of blocks.
_BLOCKS, _BLOCKS_QUICK = {"blocks": 12, "model": 4}, {"blocks": 1}
#: On a CPU reduce-overhead is default.
MODES = ("default", "max-autotune")
#: Steps after the first one, of which the median counts.
_STEPS = 10
#: What the child process prints before its result, in case something else prints, too.
_MARK = "seconds:"


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--modes", action="store_true", help="compare modes and scopes")
    options.add_argument("--child", nargs=3, metavar=("SCOPE", "BLOCKS", "MODE"), help="what each arm starts")
    arguments = options.parse_args()
    if arguments.child:
        scope, num_blocks, mode = arguments.child
        print(_MARK, *times(scope, int(num_blocks), mode))
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
    arms = [("eager", "default"), *((scope, mode) for scope in TITLES for mode in MODES)]
    rows = {}
    for scope, mode in arms:
        with tempfile.TemporaryDirectory() as cache:
            first_s, step_s = _times(scope, num_blocks, Path(cache), mode)
        name = scope if scope == "eager" else f"{{scope: {scope}, mode: {mode}}}"
        rows[name] = {"first step": first_s, "step": step_s}
    return table("Modes of torch.compile", "seconds", rows)


def _times(scope: str, num_blocks: int, cache: Path, mode: str = "default") -> tuple[float, float]:
    # As the launchers set them.
    caches = {"TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"), "TRITON_CACHE_DIR": str(cache / "triton")}
    command = [sys.executable, "-m", "benchmarks.compile_start", "--child", scope, str(num_blocks), mode]
    lines = printed(command, environment(None) | caches).splitlines()
    (line,) = (line for line in lines if line.startswith(_MARK))
    first_s, step_s = map(float, line.removeprefix(_MARK).split())
    return first_s, step_s


def times(scope: str, num_blocks: int, mode: str) -> tuple[float, float]:
    """Return the seconds from the start of compiling to the end of the first step, and of a later step.

    ``scope``: ``eager``, or that of ``compile:``.
    """
    import timm

    torch.manual_seed(0)
    torch.set_num_threads(1)
    model: nn.Module = timm.create_model("vit_tiny_patch16_224", depth=num_blocks)
    optimizer = torch.optim.AdamW(model.parameters())
    images, classes = torch.randn(2, 3, 224, 224), torch.tensor([1, 2])
    began = time.perf_counter()
    settings: dict[str, Any] = {} if scope == "eager" else {"scope": scope, "mode": mode}
    config = CompileConfig(enabled=scope != "eager", **settings)
    compile_model(model, list(model.get_submodule("blocks").children()), config, torch.device("cpu"))

    def step() -> None:
        nn.functional.cross_entropy(model(images), classes).backward()
        optimizer.step()
        optimizer.zero_grad()

    with compiling.first_step(config):
        step()
    ends = [time.perf_counter()]
    for _ in range(_STEPS):
        step()
        ends.append(time.perf_counter())
    return ends[0] - began, median(end - start for start, end in pairwise(ends))


if __name__ == "__main__":
    main()
