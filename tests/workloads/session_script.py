"""A DDP script with hpc_train.session: its weights are a function of the steps done."""

import argparse
import os
import time

import torch
import torch.distributed as dist

from hpc_train import session

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=30)
parser.add_argument("--sleep", type=float, default=0.0)
parser.add_argument("--output", default="weights.pt")
options = parser.parse_args()

torch.manual_seed(0)
torch.set_num_threads(1)
if "RANK" in os.environ:
    dist.init_process_group("gloo")
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
data = torch.randn(64, 8)
start = 0
if folder := session.latest():
    state = torch.load(folder / "state.pt")
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    start = state["step"]
print(f"starts at {start}", flush=True)
wrapped = torch.nn.parallel.DistributedDataParallel(model) if dist.is_initialized() else model
sampler = session.sampler(data, global_batch_size=8, step=start)
step = start
while step < options.steps:
    sampler.set_epoch(step // sampler.steps_per_epoch)
    share = 8 // (dist.get_world_size() if dist.is_initialized() else 1)
    for batch in torch.tensor(list(sampler)).split(share):
        loss = wrapped(data[batch]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        time.sleep(options.sleep)
        session.log(step, loss=loss.item())
        session.progress(step, options.steps)
        stops = session.should_stop(step)
        if stops or step == options.steps or step % 10 == 0:
            with session.checkpoint(step) as folder:
                if not dist.is_initialized() or dist.get_rank() == 0:
                    torch.save(
                        {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step},
                        folder / "state.pt",
                    )
        if stops or step == options.steps:
            break
    if stops:
        break
if not stops and (not dist.is_initialized() or dist.get_rank() == 0):
    torch.save(model.state_dict(), options.output)
if dist.is_initialized():
    dist.destroy_process_group()
