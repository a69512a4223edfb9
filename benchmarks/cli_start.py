"""How long commands take that a person waits for, as multiples of a bare Python's start.

    python -m benchmarks.cli_start [--rounds 11]

Rounds are interleaved and each ratio is taken within its round, so that a busy machine disturbs all alike.
The baseline is ``python -S -c pass``: without -S it would also run whatever hooks (.pth files) lie in the
environment; an editable install's alone doubles it, which would halve every ratio. Ours do run them.
Writes the medians to benchmarks/results/cli_start.json. The mark: ``--help`` at most 12.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "cli_start.json"
EXAMPLE = str(ROOT / "examples" / "digits.yaml")
BASELINE = "python -S -c pass"
PROGRAM = [sys.executable, "-m", "hpc_train"]
ARMS = {
    BASELINE: [sys.executable, "-S", "-c", "pass"],
    "python -c pass": [sys.executable, "-c", "pass"],
    "import typer": [sys.executable, "-c", "import typer"],
    "--help": [*PROGRAM, "--help"],
    "submit --help": [*PROGRAM, "submit", "--help"],
    "status": [*PROGRAM, "status"],
    "validate": [*PROGRAM, "validate", EXAMPLE],
    "plan": [*PROGRAM, "plan", EXAMPLE],
}
MIN_ROUNDS = 7


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=11)
    rounds = max(parser.parse_args().rounds, MIN_ROUNDS)
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"PYTHONPATH": str(ROOT), "HPC_TRAIN_RUNS": folder}
        for command in ARMS.values():  # byte code and the cache of names
            _seconds(command, environment)
        ratios = [_round(environment) for _ in range(rounds)]
    medians = {arm: round(statistics.median(each[arm] for each in ratios), 2) for arm in ARMS}
    result = {"rounds": rounds, "python": sys.version.split()[0], f"median ratio to {BASELINE}": medians}
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    RESULTS.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result, indent=1))


def _round(environment: dict[str, str]) -> dict[str, float]:
    """Time every arm once, in random order; return each as a multiple of the baseline."""
    arms = random.sample(list(ARMS), len(ARMS))
    seconds = {arm: _seconds(ARMS[arm], environment) for arm in arms}
    return {arm: seconds[arm] / seconds[BASELINE] for arm in ARMS}


def _seconds(command: list[str], environment: dict[str, str]) -> float:
    start = time.perf_counter()
    subprocess.run(command, env=environment, check=True, capture_output=True)
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
