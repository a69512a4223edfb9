"""How benchmarks start the training programs that they time."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.measuring import ROOT

#: timm's train.py, which is in its repository only, below ``--peers``.
TIMM_SCRIPT = "timm_train.py"


def environment(peers: Path | None) -> dict[str, str]:
    """Return the environment of an arm: the peers are found, and a process has one thread."""
    search = [str(ROOT), *([] if peers is None else [str(peers.absolute())])]
    return os.environ | {"PYTHONPATH": os.pathsep.join(search), "OMP_NUM_THREADS": "1"}


def under_torchrun(ranks: int, words: Sequence[str]) -> list[str]:
    """Return the command that runs a Python program on so many ranks of this machine."""
    if ranks == 1:
        return [sys.executable, *words]
    return [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={ranks}",
        *words,
    ]


def printed(command: Sequence[str], variables: Mapping[str, str]) -> str:
    """Run a command; return what it printed. An error shows its stderr."""
    done = subprocess.run(command, env=dict(variables), cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: exit code {done.returncode}\n{done.stderr[-4000:]}")
    return done.stdout


def row_times(experiment: str, devices: int, variables: Mapping[str, str], *overrides: str) -> list[float]:
    """Train an experiment with the real command; return when each row of the training metrics was written."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "exp.yaml"
        file.write_text(experiment, encoding="utf-8")
        submit = ["-m", "hpc_train", "submit", str(file), "--local", "--devices", str(devices), *overrides]
        printed([sys.executable, *submit], {**variables, "HPC_TRAIN_RUNS": folder})
        (metrics,) = Path(folder).glob("*/*/metrics.jsonl")
        rows = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    return [row["time"] for row in rows if row["split"] == "train"]


def line_times(command: Sequence[str], pattern: str, count: int, variables: Mapping[str, str]) -> list[float]:
    """Run a command until it has printed ``count`` lines that match; return when each arrived."""
    times: list[float] = []
    lines: list[str] = []
    with subprocess.Popen(
        command, env=dict(variables), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            if re.search(pattern, line):
                times.append(time.time())
            if len(times) == count:
                process.terminate()
                break
        process.stdout.read()
    if len(times) < count:
        raise RuntimeError(f"{' '.join(command)}: {len(times)} of {count} lines\n{''.join(lines[-200:])}")
    return times
