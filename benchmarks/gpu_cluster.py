"""Every strategy on several nodes with GPUs, by jobs of Slurm: throughput, MFU and memory over NCCL.

    python -m benchmarks.gpu_cluster SLURM_FILE [--quick]

SLURM_FILE is YAML with the ``slurm:`` section of your cluster, for two nodes with eight GPUs each
(docs/cluster.md). Trains the package's GPT in bf16, compiled, for 60 steps under each strategy, one job after
the other. ``make gpu-cluster`` calls it; send benchmarks/results/gpu_cluster.json back in an issue of this
repository: it has times, versions and how each job ended, and no names of machines, users or folders.
``--quick``: a tiny model on CPUs, 6 steps, and nothing is written.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml

from benchmarks.gpu_cases import MODELS, TINY
from benchmarks.measuring import ROOT, conditions, parser, report, table

#: Twelve blocks and heads can be shared by four ranks.
STRATEGIES: dict[str, dict[str, Any]] = {
    **{name: {"strategy": name} for name in ("ddp", "zero1", "zero2", "fsdp", "hsdp")},
    "tensor": {"strategy": "tensor", "tensor": 4},
    "pipeline": {"strategy": "pipeline", "pipeline": 4},
}
TITLE = "GPT on several nodes, bf16, compiled"
_ENDS = ("completed", "failed", "cancelled")
_POLL_S = 10.0
_COLUMNS = ("step_s", "data_wait_s", "samples_per_s", "tokens_per_s", "mfu", "peak_memory_gib", "loss")


def main() -> None:
    options = parser(__doc__)
    options.add_argument("file", type=Path, metavar="SLURM_FILE")
    arguments = options.parse_args()
    own = yaml.safe_load(arguments.file.read_text(encoding="utf-8"))
    rows: dict[str, dict[str, Any]] = {}
    # Where ranks see it: a file system that all nodes share.
    with tempfile.TemporaryDirectory(dir=ROOT) as folder:
        text = Path(folder) / "text"
        text.write_bytes(os.urandom(200_000 if arguments.quick else 4_000_000))
        for strategy in STRATEGIES:
            file = Path(folder) / f"{strategy}.yaml"
            experiment = experiment_of(strategy, text, is_quick=arguments.quick) | own
            file.write_text(yaml.safe_dump(experiment), encoding="utf-8")
            rows[strategy] = _trained(file, Path(folder) / "runs")
            print(f"{strategy}: {rows[strategy]}", file=sys.stderr, flush=True)
    report("gpu_cluster", arguments, conditions(), tables=[table(TITLE, "", rows)])


def experiment_of(strategy: str, text: Path, *, is_quick: bool) -> dict[str, Any]:
    """Return the experiment without its ``slurm:`` section."""
    model, steps = (TINY if is_quick else MODELS)["gpt"], 6 if is_quick else 60
    return {
        "name": f"gpu-cluster-{strategy}",
        "task": "causal_lm",
        # A pipeline's first and last stage can't share weights.
        "model": {"name": "gpt", "args": {**(model.args or {}), "tie_embeddings": False}},
        "data": {
            "name": "text",
            "root": str(text),
            "args": {"sequence_length": model.size, "val_fraction": 0, "tokens": "bytes"},
        },
        "device": "auto" if is_quick else "cuda",
        "precision": "fp32" if is_quick else "bf16",
        "compile": not is_quick,
        "parallel": STRATEGIES[strategy],
        "optimization": {
            "steps": steps,
            "global_batch_size": 16 * model.batch_size,
            "micro_batch_size": model.batch_size,
            "optimizer": {"name": "adamw", "lr": 0.001},
            "schedule": {"name": "constant"},
        },
        "evaluation": {"every_steps": 1000000},
        "checkpoint": {"every_steps": steps // 2},
        "logging": {"every_steps": max(steps // 6, 1)},
    }


def _trained(file: Path, runs: Path) -> dict[str, Any]:
    """Submit a file and wait for its job; return how it ended and the run's last row."""
    environment = os.environ | {"HPC_TRAIN_RUNS": str(runs)}

    def answer(*words: str) -> Any:
        command = [sys.executable, "-m", "hpc_train", *words, "--json"]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.stderr.write(done.stderr)
            return None
        return json.loads(done.stdout)

    submitted = answer("submit", str(file), "--new")
    if submitted is None:
        return {"outcome": "not submitted"}
    path = Path(submitted["runs"][0]["path"])
    while (state := answer("status", str(path))["runs"][0]["state"]) not in _ENDS:
        time.sleep(_POLL_S)
    metrics = path / "metrics.jsonl"
    lines = metrics.read_text(encoding="utf-8").splitlines() if metrics.exists() else []
    last = [row for row in map(json.loads, lines) if row["split"] == "train"][-1:] or [{}]
    return {"outcome": state} | {name: last[0].get(name) for name in _COLUMNS}


if __name__ == "__main__":
    main()
