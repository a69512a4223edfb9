"""Draws docs/watch.svg, the screen of ``watch`` beside a real sweep: ``python -m docs.make_watch_picture``.

Trains a small sweep on this machine, which takes minutes. Times and rates differ between drawings.
"""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from hpc_train.report.live.live_runs import LiveRun, RunsReader
from hpc_train.report.live.watch_app import WatchApp

PICTURE = Path(__file__).with_name("watch.svg")
_SIZE = (120, 36)
_LIMIT_S = 600.0
#: What would be loaded from other hosts, and a comment.
_EXTERNAL = re.compile(r"@font-face\s*{[^}]*}\s*|<!--.*?-->\s*")
EXPERIMENT = """\
name: digits
task: classification
model: {name: timm/test_resnet}
data: {name: digits}
optimization:
  steps: 400
  global_batch_size: 64
  micro_batch_size: 64
  optimizer: {name: sgd, lr: 0.05, momentum: 0.9}
evaluation: {every_steps: 40}
logging: {every_steps: 4}
device: cpu
sweep: {grid: {optimization.optimizer.lr: [1.0e+6, 0.05, 0.02, 0.1, 0.2]}}
"""


def main() -> None:
    """Write the picture."""
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        os.environ["HPC_TRAIN_RUNS"] = "runs"
        Path("exp.yaml").write_text(EXPERIMENT)
        command = [sys.executable, "-m", "hpc_train", "submit", "exp.yaml", "--local", "--jobs", "2"]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as training:
            try:
                _wait_until_the_sweep_is_halfway()
                PICTURE.write_text(asyncio.run(_drawn()), encoding="utf-8")
            finally:
                training.terminate()


def _wait_until_the_sweep_is_halfway() -> None:
    reader, deadline = RunsReader([]), time.monotonic() + _LIMIT_S
    while not _is_halfway(reader.read()):
        assert time.monotonic() < deadline, "the sweep does not get there"
        time.sleep(0.2)


def _is_halfway(runs: list[LiveRun]) -> bool:
    states = [run.state for run in runs]
    trains = [run for run in runs if run.state == "running" and 0.5 <= run.share < 0.8]
    return bool(trains) and {"completed", "failed"} <= set(states)


async def _drawn() -> str:
    """Return the screen as SVG, without the fonts that it would load from another host."""
    app = WatchApp(RunsReader([]), 60.0)
    async with app.run_test(size=_SIZE) as pilot:
        for key in ("", "s"):
            await pilot.press(*filter(None, [key]))
            await pilot.pause(0.5)
        await pilot.press("home", "down")
        await pilot.pause(0.5)
        return _EXTERNAL.sub("", app.export_screenshot(title="hpc-train watch"))


if __name__ == "__main__":
    main()
