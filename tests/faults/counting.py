"""A program whose state is a function of its steps, by ``hpc_train.session``, without torch.

It waits as ``tests.end_to_end.holding.Hold`` orders, if ``HELD_AT`` is that file.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from hpc_train import session

STEPS, SAVE_EVERY = 40, 4
held, attempt = os.environ.get("HELD_AT"), int(os.environ["HPC_TRAIN_ATTEMPT"])


def order(step: int, num_rows: int) -> str:
    """Return the order to wait after this row; empty if there is none."""
    try:
        text = Path(held or "/nonexistent").read_text()
    except FileNotFoundError:
        return ""
    at, since_attempt, since_row = map(int, text.split())
    return text if step >= at and attempt >= since_attempt and num_rows >= since_row else ""


folder = session.latest()
step, value = map(int, (folder / "state.txt").read_text().split()) if folder else (0, 1)
began, stops = step, False
while step < STEPS and not stops:
    step, value = step + 1, (31 * value + step) % 1_000_003
    session.log(step, loss=1 / value)
    session.progress(step, STEPS)
    reported = ""
    while (text := order(step, step - began)) and not session.should_stop(step):
        if text != reported:
            new = Path(f"{held}.new-program")
            new.write_text(text)
            new.rename(Path(str(held)).with_suffix(".reached"))
            reported = text
        time.sleep(0.02)
    stops = session.should_stop(step)
    if stops or step % SAVE_EVERY == 0:
        with session.checkpoint(step) as folder:
            (folder / "state.txt").write_text(f"{step} {value}")
    time.sleep(0.02)
