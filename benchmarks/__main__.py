"""Runs all benchmarks that need no GPU, one after the other, and writes docs/performance.md.

    python -m benchmarks [--quick] [--peers FOLDER]

``make bench`` calls it with the peers that it has installed. A benchmark that can't run here (no Slurm, no
data) is listed as not measured and one that fails as failed; the others still run. ``--quick`` tries each in
seconds and writes nothing. Exits with 1 if one failed.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

from benchmarks import performance_page
from benchmarks.measuring import NOT_MEASURED, RESULTS, ROOT

_OUTCOMES = {0: "done", NOT_MEASURED: "not measured"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--peers", type=Path)
    arguments = parser.parse_args()
    options = ["--quick"] if arguments.quick else []
    options += ["--peers", str(arguments.peers.absolute())] if arguments.peers else []
    outcomes = {name: _run(name, options) for name in performance_page.cpu_benchmarks()}
    for name, outcome in outcomes.items():
        print(f"{name}: {outcome}", file=sys.stderr)
    if not arguments.quick:
        performance_page.write(performance_page.DOCS, RESULTS)
    sys.exit(any(outcome.startswith("failed") for outcome in outcomes.values()))


def _run(name: str, options: list[str]) -> str:
    print(f"benchmarks.{name}", file=sys.stderr, flush=True)
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-m", f"benchmarks.{name}", *options], cwd=ROOT, check=False)
    return f"{_OUTCOMES.get(done.returncode, 'failed')} after {time.monotonic() - began:.0f} s"


if __name__ == "__main__":
    main()
