"""A program of a sweep: rows of both splits, a checkpoint; its third value fails."""

import argparse

from hpc_train import session

parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=0.1)
lr = parser.parse_args().lr
for step in range(1, 5):
    session.log(step, loss=lr / step)
    session.progress(step, 4)
session.log(4, split="val", loss=lr, accuracy=float("nan"))
if lr == 3:
    raise ValueError("a bad learning rate")
with session.checkpoint(4) as folder:
    (folder / "state.txt").write_text(str(lr))
