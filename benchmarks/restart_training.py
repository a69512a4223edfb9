"""The training script that benchmarks/restart.py restarts: DDP over gloo, with a checkpoint of its own.

    torchrun --nproc-per-node=2 --max-restarts=3 restart_training.py FOLDER SECONDS_PER_STEP

Each rank appends a line per step to FOLDER/steps-<rank>.jsonl: its process, the step and the time. Rank 0
saves every ten steps to FOLDER/checkpoint.pt, from which all ranks resume.
"""

from __future__ import annotations

import json
import os
import sys
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

SAVE_EVERY = 10


def main() -> None:
    if len(sys.argv) != 3:
        sys.exit((__doc__ or "").split("\n\n")[1].strip())
    folder, step_s = Path(sys.argv[1]), float(sys.argv[2])
    # Ranks that can't connect end after a minute, and torchrun starts them again.
    dist.init_process_group("gloo", timeout=timedelta(minutes=1))
    rank = dist.get_rank()
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Conv2d(1, 8, 4, stride=4), nn.ReLU(), nn.Flatten(), nn.Linear(512, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    file, step = folder / "checkpoint.pt", 0
    if file.exists():
        saved = torch.load(file, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        step = saved["step"]
    parallel = DistributedDataParallel(model)
    with (folder / f"steps-{rank}.jsonl").open("a", encoding="utf-8", buffering=1) as log:
        while True:
            time.sleep(step_s)
            optimizer.zero_grad()
            cross_entropy(parallel(torch.randn(24, 1, 32, 32)), torch.randint(10, (24,))).backward()
            optimizer.step()
            step += 1
            now = datetime.now(UTC).isoformat(timespec="milliseconds")
            log.write(json.dumps({"pid": os.getpid(), "step": step, "time": now}) + "\n")
            if rank == 0 and step % SAVE_EVERY == 0:
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
                torch.save(state, file.with_suffix(".new"))
                file.with_suffix(".new").replace(file)


if __name__ == "__main__":
    main()
