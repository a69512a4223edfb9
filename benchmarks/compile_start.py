"""How long a rank waits for torch.compile: in a run's first attempt, and in one that continues it.

    python -m benchmarks.compile_start [--rounds 7] [--quick]

Each arm is a process of its own that builds a ViT-tiny, compiles it as ``compile: true`` (its 12 blocks,
which are alike) or ``compile: {scope: model}`` (of 4 blocks) does, and trains one step on the CPU with one
thread. The time is that from the call of ``compile_model`` to the end of this first step. *Cold*: the run's
``cache/`` is empty. *Warm*: it contains what a process before has compiled, as after a requeue. The target:
cold takes at least 8 times as long as warm. A round takes a minute. ``--quick`` compiles one block. Writes
benchmarks/results/compile_start.json.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from benchmarks.arms import environment, printed
from benchmarks.measuring import comparison, conditions, interleaved, parser, report, rounds_of
from hpc_train.config.training_sections import CompileConfig
from hpc_train.training import compiling
from hpc_train.training.compiling import compile_model

#: ``compile.scope`` → the title of its comparison.
TITLES = {"blocks": "First compiled step, by block", "model": "First compiled step, whole model"}
COLD, WARM = "cold: the run's first attempt", "warm: the next attempt"
#: ``compile.scope`` → the number of blocks.
_BLOCKS, _BLOCKS_QUICK = {"blocks": 12, "model": 4}, {"blocks": 1}
#: What the child process prints before its result, in case something else prints, too.
_MARK = "seconds:"


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--child", nargs=2, metavar=("SCOPE", "BLOCKS"), help="what each arm starts")
    arguments = options.parse_args()
    if arguments.child:
        print(_MARK, first_step(arguments.child[0], int(arguments.child[1])))
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
        return _seconds(scope, num_blocks, cache)

    def warm() -> float:
        if not cache.exists():
            cold()
        return _seconds(scope, num_blocks, cache)

    return {COLD: cold, WARM: warm}


def _seconds(scope: str, num_blocks: int, cache: Path) -> float:
    # As the launchers set them.
    caches = {"TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"), "TRITON_CACHE_DIR": str(cache / "triton")}
    command = [sys.executable, "-m", "benchmarks.compile_start", "--child", scope, str(num_blocks)]
    lines = printed(command, environment(None) | caches).splitlines()
    (line,) = (line for line in lines if line.startswith(_MARK))
    return float(line.removeprefix(_MARK))


def first_step(scope: str, num_blocks: int) -> float:
    """Return the seconds from the start of compiling to the end of the first step."""
    import timm

    torch.manual_seed(0)
    torch.set_num_threads(1)
    model: nn.Module = timm.create_model("vit_tiny_patch16_224", depth=num_blocks)
    optimizer = torch.optim.AdamW(model.parameters())
    images, classes = torch.randn(2, 3, 224, 224), torch.tensor([1, 2])
    began = time.perf_counter()
    config = CompileConfig(enabled=True, scope=scope)  # type: ignore[arg-type]
    compile_model(model, list(model.get_submodule("blocks").children()), config, torch.device("cpu"))
    with compiling.first_step(config):
        nn.functional.cross_entropy(model(images), classes).backward()
        optimizer.step()
        optimizer.zero_grad()
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
