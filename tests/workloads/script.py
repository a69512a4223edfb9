"""A training script that knows nothing of hpc-train: it saves every fifth step and continues with --resume.

Its weight is a function of the steps done, so a run that lost or repeated a step ends with another one.
"""

import argparse
import json
import os
import pathlib
import signal
import sys
import time

parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=0.01)
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--sleep", type=float, default=0.0)
parser.add_argument("--resume", action="store_true")
parser.add_argument("--behave", default="")
options = parser.parse_args()

rank = int(os.environ.get("RANK", "0"))
out = pathlib.Path("out")
checkpoint = out / "state.json"
state = json.loads(checkpoint.read_text()) if options.resume else {"step": 0, "weight": 1.0, "starts": 0}
state["starts"] += 1
if options.behave == "ignores":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if options.behave == "exits":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
print(f"starts at {state['step']}, rank {rank} of {os.environ.get('WORLD_SIZE')}", flush=True)
while state["step"] < options.steps:
    state["step"] += 1
    state["weight"] = state["weight"] * (1 - options.lr) + 1e-3 * state["step"]
    time.sleep(options.sleep)
    print(f"step {state['step']}: loss {state['weight']:.9f}", flush=True)
    if options.behave == "raises" and state["step"] == 7:
        raise ValueError("a bad batch")
    if options.behave == "hangs" and state["step"] == 7:
        signal.pause()
    if rank == 0 and state["step"] % 5 == 0:
        new = checkpoint.with_suffix(".new")
        new.write_text(json.dumps(state))
        new.replace(checkpoint)
if options.behave == "leaves a child" and os.fork() == 0:
    signal.pause()
if rank == 0:
    pathlib.Path("result.json").write_text(json.dumps(state))
