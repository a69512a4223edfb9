"""The time of `plan` for a ViT-L on 8 to 1,024 ranks, with its prediction of memory and communication.

    python -m benchmarks.plan_scale [--rounds 7] [--quick]

The command is run as many times as there are rounds per strategy and number of ranks; the median of the wall
time is kept. No scheduler is asked and nothing is trained. Writes benchmarks/results/plan_scale.json. The
target: 20 s on 1,024 ranks. ``--quick``: one round of ddp on 8 ranks.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.measuring import ROOT, conditions, parser, report, rounds_of, table

RANKS, RANKS_QUICK = (8, 1024), (8,)
STRATEGIES, STRATEGIES_QUICK = ("ddp", "fsdp", "zero1"), ("ddp",)
_GPUS_PER_NODE, _MICRO_BATCH = 8, 16
_EXPERIMENT = """\
name: scale
task: classification
model: {{name: timm/vit_large_patch16_224}}
data: {{name: synthetic, image_size: 224, args: {{num_samples: 100000}}}}
precision: bf16
optimization:
  steps: 1000
  global_batch_size: {batch}
  micro_batch_size: {micro}
  optimizer: {{name: adamw, lr: 0.001}}
parallel: {{strategy: {strategy}}}
slurm: {{nodes: {nodes}, gpus_per_node: {gpus}, gpu_type: a100_80gb, time_limit: 1h}}
"""


def main() -> None:
    arguments = parser(__doc__).parse_args()
    ranks = RANKS_QUICK if arguments.quick else RANKS
    strategies = STRATEGIES_QUICK if arguments.quick else STRATEGIES
    rounds = rounds_of(arguments)
    rows = {
        f"{strategy}, {count:,} ranks": {"wall, s": _median_s(strategy, count, rounds)}
        for strategy in strategies
        for count in ranks
    }
    found = table("plan of a ViT-L", "", rows, remark=f"Medians of {rounds} rounds")
    report("plan_scale", arguments, conditions(), tables=[found])


def _median_s(strategy: str, ranks: int, rounds: int) -> float | None:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "exp.yaml")
        values = {"batch": ranks * _MICRO_BATCH, "micro": _MICRO_BATCH, "strategy": strategy}
        file.write_text(_EXPERIMENT.format(**values, nodes=ranks // _GPUS_PER_NODE, gpus=_GPUS_PER_NODE))
        return statistics.median(_seconds(file) for _ in range(rounds))


def _seconds(file: Path) -> float:
    began = time.perf_counter()
    environment = os.environ | {"HPC_TRAIN_RUNS": str(file.parent / "runs")}
    subprocess.run(
        [sys.executable, "-m", "hpc_train", "plan", str(file)],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.DEVNULL,
        check=True,
    )
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
