"""How long commands take that a person waits for, compared with a bare Python's start.

    python -m benchmarks.cli_start [--rounds 11] [--quick]

The baseline is ``python -S -c pass``: without -S it would also run whatever hooks (.pth files) are in the
environment; an editable install's alone doubles it, which would halve every ratio. Ours do run them.
Writes benchmarks/results/cli_start.json. The target: ``--help`` at most 12.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import tempfile
import time

from benchmarks.measuring import ROOT, comparison, conditions, interleaved, parser, report, rounds_of

TITLE = "Commands that a person waits for"
EXAMPLE = str(ROOT / "examples" / "digits.yaml")
BASELINE = "python -S -c pass"
PROGRAM = [sys.executable, "-m", "hpc_train"]
#: Arguments of ours that are arms.
NAMES = {words: f"hpc-train {words}" for words in ("--help", "submit --help", "status", "validate", "plan")}
ARMS = {
    BASELINE: [sys.executable, "-S", "-c", "pass"],
    "python -c pass": [sys.executable, "-c", "pass"],
    "import typer": [sys.executable, "-c", "import typer"],
    NAMES["--help"]: [*PROGRAM, "--help"],
    NAMES["submit --help"]: [*PROGRAM, "submit", "--help"],
    NAMES["status"]: [*PROGRAM, "status"],
    NAMES["validate"]: [*PROGRAM, "validate", EXAMPLE],
    NAMES["plan"]: [*PROGRAM, "plan", EXAMPLE],
}


def main() -> None:
    arguments = parser(__doc__, rounds=11).parse_args()
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"PYTHONPATH": str(ROOT), "HPC_TRAIN_RUNS": folder}
        timed = {arm: functools.partial(_seconds, command, environment) for arm, command in ARMS.items()}
        for arm in timed.values():  # byte code and the cache of names
            arm()
        values = interleaved(timed, rounds_of(arguments))
    compared = comparison(TITLE, "seconds", values, BASELINE)
    report("cli_start", arguments, conditions(["typer"]), [compared])


def _seconds(command: list[str], environment: dict[str, str]) -> float:
    start = time.perf_counter()
    subprocess.run(command, env=environment, check=True, capture_output=True)
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
