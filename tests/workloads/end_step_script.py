"""A DDP script with dropout and shuffled data, of which hpc_train.session saves everything."""

import argparse
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from hpc_train import session

parser = argparse.ArgumentParser()
parser.add_argument("--sleep", type=float, default=0.0)
options = parser.parse_args()

torch.manual_seed(0)
torch.set_num_threads(1)
dist.init_process_group("gloo")
data = torch.randn(64, 8)
model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.2), nn.Linear(8, 1)))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
sampler = session.sampler(data, global_batch_size=8)
loader = DataLoader(TensorDataset(data), batch_size=8 // dist.get_world_size(), sampler=sampler)


def train() -> None:
    """Train until the session ends it, at step 30 by its metric; then write the weights."""
    step = session.load_state(model=model, optimizer=optimizer, sampler=sampler)
    print(f"starts at {step}", flush=True)
    while True:
        for (batch,) in loader:
            loss = model(batch).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            time.sleep(options.sleep)
            session.log(step, loss=loss.item(), stopping=1.0)
            if step % 5 == 0:
                session.metric(step, distance=abs(step - 20))
            if session.end_step(step, 100):
                if dist.get_rank() == 0:
                    torch.save(model.state_dict(), "weights.pt")
                return


train()
dist.destroy_process_group()
