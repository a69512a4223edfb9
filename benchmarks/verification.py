"""The time of a training step that ``recovery.verify_every_steps`` verifies, and of one that it does not.

    python -m benchmarks.verification [--rounds 7] [--quick]

Both arms are whole runs of ``hpc-train submit --local`` on two ranks with one thread each, of workloads of
benchmarks/step.py; one of them verifies every step. With an interval of N steps a run takes
1 + (ratio - 1) / N times as long. The arms of a round take turns (``benchmarks.turns``). Writes
benchmarks/results/verification.json.
"""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

from benchmarks.arms import environment, row_times
from benchmarks.loops import WORKLOADS, Workload, differences
from benchmarks.measuring import comparison, conditions, parser, report, rounds_of
from benchmarks.step import experiment_of
from benchmarks.turns import by_turns, undisturbed

PLAIN, VERIFIED = "hpc-train", "verified"
NAMES = ("mlp_ddp", "gpt_ddp")


def main() -> None:
    arguments = parser(__doc__).parse_args()
    for name in NAMES:
        workload = WORKLOADS[name].quick() if arguments.quick else WORKLOADS[name]
        with tempfile.TemporaryDirectory() as folder:
            arms = {
                arm: functools.partial(_seconds, workload, Path(folder), *words)
                for arm, words in {PLAIN: (), VERIFIED: ("recovery.verify_every_steps=1",)}.items()
            }
            rounds = [by_turns(arms, workload.turn_s) for _ in range(rounds_of(arguments))]
        values = {arm: [round_[arm] for round_ in rounds] for arm in arms}
        title = f"Verified training step, {workload.model.__name__}, {workload.ranks} ranks, 1 thread each"
        compared = comparison(title, "seconds per step", values, PLAIN)
        compared["turn_s"] = workload.turn_s
        report("verification", arguments, conditions() | {"ranks": workload.ranks}, [compared])


def _seconds(workload: Workload, folder: Path, *overrides: str) -> float:
    text = experiment_of(workload, folder)
    times = row_times(text, workload.ranks, environment(None), "device=cpu", *overrides)
    found = differences(times[workload.warm_up :], workload.window)
    return undisturbed(found, workload.window, workload.turn_s)


if __name__ == "__main__":
    main()
