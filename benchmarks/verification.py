"""The time of a training step that ``recovery.verify_every_steps`` verifies, and of one that it does not.

    python -m benchmarks.verification [--workloads mlp_ddp gpt_ddp] [--rounds 7] [--quick]

Runs ``hpc-train submit --local`` on two ranks with one thread each, with workloads of benchmarks/step.py, and
verifies every second step, so that both kinds of steps take place under the same load of the machine. A round
is a window of consecutive steps; its two times are the medians of ``step_s`` of its verified and of its other
steps. With an interval of N steps a run takes 1 + (ratio - 1) / N times as long. Writes
benchmarks/results/verification.json.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from pathlib import Path

from benchmarks.arms import environment, printed
from benchmarks.loops import WORKLOADS
from benchmarks.measuring import comparison, conditions, parser, report, rounds_of
from benchmarks.step import experiment_of

PLAIN, VERIFIED = "not verified", "verified"
#: Workload → steps of a window.
WINDOWS = {"mlp_ddp": 60, "gpt_ddp": 16}


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--workloads", nargs="+", choices=[*WINDOWS], default=[*WINDOWS])
    arguments = options.parse_args()
    for name in arguments.workloads:
        workload, window = WORKLOADS[name], 4 if arguments.quick else WINDOWS[name]
        step_s = _step_seconds(name, (rounds_of(arguments) + 1) * window)
        windows = [step_s[begin : begin + window] for begin in range(window, len(step_s), window)]
        # Steps count from 1 here and from 0 where the interval is applied.
        values = {
            arm: [statistics.median(times[offset::2]) for times in windows]
            for arm, offset in ((PLAIN, 1), (VERIFIED, 0))
        }
        title = f"Verified training step, {workload.model.__name__}, {workload.ranks} ranks, 1 thread each"
        compared = comparison(title, "seconds per step", values, PLAIN)
        report("verification", arguments, conditions() | {"ranks": workload.ranks}, [compared])


def _step_seconds(name: str, steps: int) -> list[float]:
    """Return the time of each step of a run that verifies every second one, beginning with the first."""
    every = {"recovery.verify_every_steps": 2, "logging.every_steps": 1, "checkpoint.every_steps": steps}
    words = [f"{key}={value}" for key, value in {**every, "optimization.steps": steps}.items()]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "exp.yaml"
        file.write_text(experiment_of(WORKLOADS[name], Path(folder)), encoding="utf-8")
        submit = ["-m", "hpc_train", "submit", str(file), *words, "device=cpu", "--local", "--devices", "2"]
        printed([sys.executable, *submit], environment(None) | {"HPC_TRAIN_RUNS": folder})
        (metrics,) = Path(folder).glob("*/*/metrics.jsonl")
        rows = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    return [row["step_s"] or 0.0 for row in rows if row["split"] == "train"]


if __name__ == "__main__":
    main()
