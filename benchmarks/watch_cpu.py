"""The CPU time of `watch` on a terminal, with many runs of which four are written to.

    python -m benchmarks.watch_cpu [--quick]

The runs are made here: finished ones with 200 steps of metrics, and four that this process plays: each gets a
row of metrics and a status twice a second. `watch` is a process on a pseudo-terminal of 160 x 50 with its
default interval of 5 s; its CPU time is read from /proc when its screen is complete and again 60 s later. No
scheduler is asked. Writes benchmarks/results/watch_cpu.json. The target: at most 5 % of a core for 200 runs.
``--quick``: 20 runs for 10 s.
"""

from __future__ import annotations

import fcntl
import json
import os
import pty
import select
import struct
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.measuring import ROOT, conditions, parser, report, table
from hpc_train.paths import RunPaths
from hpc_train.run.attempts import claim_attempt
from hpc_train.run.run_status import RunStatus, write_status
from tests.report.made_runs import made_sweep

COUNTS, COUNTS_QUICK, SPAN_S, SPAN_QUICK_S = (200, 1000), (20,), 60.0, 10.0
WRITTEN, STEPS, WRITE_EVERY_S = 4, 200, 0.5
_TICKS = os.sysconf("SC_CLK_TCK")


def main() -> None:
    arguments = parser(__doc__).parse_args()
    counts = COUNTS_QUICK if arguments.quick else COUNTS
    span_s = SPAN_QUICK_S if arguments.quick else SPAN_S
    rows = {f"{count:,} runs, {WRITTEN} written to": _measured(count, span_s) for count in counts}
    title = "CPU time of watch"
    report("watch_cpu", arguments, conditions(["textual"]), tables=[table(title, "", rows)])


def _measured(count: int, span_s: float) -> dict[str, float | None]:
    with tempfile.TemporaryDirectory() as folder:
        running = made_sweep(Path(folder), count, steps=STEPS)[:WRITTEN]
        for paths in running:
            claim_attempt(paths, "local", hosts=["n1"])
        watching = _Watching(folder)
        try:
            _play(running, watching, 0.0, lambda: f"{count} runs" in watching.screen)
            start_s, began = watching.cpu_s(), time.monotonic()
            _play(running, watching, span_s, lambda: time.monotonic() - began >= span_s)
            used_s, took_s = watching.cpu_s() - start_s, time.monotonic() - began
            return {
                "share of a core, %": 100 * used_s / took_s,
                "CPU s until the screen is complete": start_s,
                "memory, MiB": watching.memory_mib(),
            }
        finally:
            watching.end()


class _Watching:
    """``hpc-train watch`` on a pseudo-terminal that is read, as a terminal would."""

    def __init__(self, folder: str) -> None:
        self._ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 160, 0, 0))
        environment = os.environ | {"HPC_TRAIN_RUNS": folder, "TERM": "xterm-256color"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "hpc_train", "watch"],
            cwd=ROOT, env=environment, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True,
        )  # fmt: skip
        os.close(theirs)
        self.screen = ""

    def read(self, limit_s: float) -> None:
        """Read what it writes for so long."""
        deadline = time.monotonic() + limit_s
        while (left_s := deadline - time.monotonic()) > 0:
            if select.select([self._ours], [], [], left_s)[0]:
                self.screen = (self.screen + os.read(self._ours, 1 << 16).decode("utf-8", "replace"))[
                    -(1 << 16) :
                ]

    def cpu_s(self) -> float:
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / _TICKS

    def memory_mib(self) -> float:
        pages = int(Path(f"/proc/{self._process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 2**20

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._ours)


def _play(running: list[RunPaths], watching: _Watching, span_s: float, is_over: Callable[[], bool]) -> None:
    """Write to the runs as training would, until ``is_over`` or a minute after ``span_s``."""
    deadline = time.monotonic() + span_s + 60.0
    while not is_over():
        assert time.monotonic() < deadline, "the screen is not complete"
        for paths in running:
            _write(paths)
        watching.read(WRITE_EVERY_S)


def _write(paths: RunPaths) -> None:
    attempt = paths.attempt_folders()[-1].number
    lines = paths.metrics.read_text(encoding="utf-8").splitlines()[-1:]
    step = json.loads(lines[0])["step"] + 1 if lines else 1
    head = {"time": time.time(), "attempt": attempt, "step": step}
    times = {"step_s": 0.5, "data_wait_s": 0.01, "samples_per_s": 128.0}
    with paths.metrics.open("a", encoding="utf-8") as file:
        file.write(json.dumps({"split": "train", **head, "loss": 1 / step, **times}) + "\n")
    write_status(paths, RunStatus("running", step, 100_000, 1.0, attempt))


if __name__ == "__main__":
    main()
