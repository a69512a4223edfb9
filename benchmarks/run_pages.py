"""The time of `report`, `compare` and `status` of many finished runs, beside reading the same files.

    python -m benchmarks.run_pages [--rounds 7] [--quick]

The runs are made here: each has 200 steps in ``metrics.jsonl``, attempts and evaluations. The baseline is a
bare Python that reads every ``run.json``, ``status.json`` and ``metrics.jsonl`` and parses each line. Then
`status`, `compare` and `report` of 10,000 runs, and `status` of one run with 2,000,000 rows: five times each.
Writes benchmarks/results/run_pages.json. ``--quick``: 20 runs and 2,000 rows.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.measuring import ROOT, comparison, conditions, interleaved, parser, report, rounds_of, table
from hpc_train.run.run_status import RunStatus
from tests.report.made_runs import made_sweep

COUNT, COUNT_QUICK, STEPS = 1000, 20, 200
MANY = 10_000
ROWS, ROWS_QUICK = 2_000_000, 2_000
TRIES = 5
REMARK = f"The run with the median time of {TRIES}"
BARE, REPORT, COMPARE = "bare reading", "hpc-train report", "hpc-train compare"
READS = """
import json, pathlib, sys
for folder in pathlib.Path(sys.argv[1]).iterdir():
    if not folder.name.startswith("."):
        for name in ("run.json", "status.json"):
            json.loads((folder / name).read_text())
        for line in (folder / "metrics.jsonl").read_text().splitlines():
            json.loads(line)
"""


def main() -> None:
    arguments = parser(__doc__).parse_args()
    count = COUNT_QUICK if arguments.quick else COUNT
    with tempfile.TemporaryDirectory() as folder:
        runs, page = Path(folder, "runs"), Path(folder, "report.html")
        made = made_sweep(runs, count, steps=STEPS)
        name = made[0].siblings.folder
        arms: dict[str, Callable[[], float]] = {
            BARE: lambda: _seconds(runs, ["-c", READS, str(name)]),
            REPORT: lambda: _seconds(runs, ["-m", "hpc_train", "report", name.name, "-o", str(page)]),
            COMPARE: lambda: _seconds(runs, ["-m", "hpc_train", "compare", name.name]),
        }
        values = interleaved(arms, rounds_of(arguments))
    title = f"report and compare of {count:,} runs"
    many = _of_many(COUNT_QUICK if arguments.quick else MANY)
    long = _of_long_run(ROWS_QUICK if arguments.quick else ROWS)
    report("run_pages", arguments, conditions(), [comparison(title, "seconds", values, BARE)], [many, long])


def _of_many(count: int) -> dict[str, Any]:
    """Return the table of time and memory of commands on this many runs."""
    rows: dict[str, dict[str, float | None]] = {}
    with tempfile.TemporaryDirectory() as folder:
        runs, page = Path(folder, "runs"), Path(folder, "report.html")
        name = made_sweep(runs, count, steps=STEPS)[0].siblings.folder.name
        for command in (["status"], ["compare", name], ["report", name, "-o", str(page)]):
            rows[f"hpc-train {command[0]}"] = _used(runs, ["-m", "hpc_train", *command])
    return table(f"status, compare and report of {count:,} runs", "", rows, remark=REMARK)


def _of_long_run(num_rows: int) -> dict[str, Any]:
    """Return the table of time and memory of `status` of one run; every 1,000th row is an evaluation."""
    with tempfile.TemporaryDirectory() as folder:
        (run,) = made_sweep(Path(folder), 1, steps=STEPS)
        lines = run.metrics.read_text().splitlines()
        train, val = (next(line for line in lines if f'"{split}"' in line) for split in ("train", "val"))
        rows = {
            split: json.dumps(json.loads(line) | {"step": "STEP"})
            for split, line in (("train", train), ("val", val))
        }
        with run.metrics.open("w") as file:
            for step in range(1, num_rows + 1):
                row = rows["train" if step % 1000 else "val"]
                file.write(row.replace('"STEP"', str(step)) + "\n")
        run.status.write_text(json.dumps(RunStatus("completed", num_rows, num_rows, 3.0, 1).to_json()))
        used = _used(Path(folder), ["-m", "hpc_train", "status", str(run.folder)])
    return table(f"status of a run with {num_rows:,} rows", "", {"hpc-train status RUN": used}, remark=REMARK)


def _used(runs: Path, command: list[str]) -> dict[str, float | None]:
    """Return the time and the peak memory of a command, of the run with the median time."""
    tries = [_used_once(runs, command) for _ in range(TRIES)]
    return sorted(tries, key=lambda used: used["wall (s)"])[TRIES // 2]


def _used_once(runs: Path, command: list[str]) -> dict[str, Any]:
    began = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, *command],
        cwd=ROOT,
        env=os.environ | {"HPC_TRAIN_RUNS": str(runs)},
        stdout=subprocess.DEVNULL,
    )
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0, command
    wall_s = time.perf_counter() - began
    return {
        "wall (s)": wall_s,
        "CPU (s)": used.ru_utime + used.ru_stime,
        "memory (MB)": used.ru_maxrss * 1024 / 1e6,
    }


def _seconds(runs: Path, command: list[str]) -> float:
    began = time.perf_counter()
    environment = os.environ | {"HPC_TRAIN_RUNS": str(runs)}
    subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, check=True
    )
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
