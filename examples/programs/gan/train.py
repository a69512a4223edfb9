"""A GAN with two optimizers in plain PyTorch, in one process or in several with DDP:

    python train.py
    torchrun --nproc-per-node=2 train.py

It learns points on a ring, eight clusters in two dimensions. It saves to out/ckpt.pt, continues from there
with --resume, and writes the weights of both networks to out/weights.pt.
"""

import argparse
import math
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=120)
parser.add_argument("--batch-size", type=int, default=64, help="points per step, over all ranks")
parser.add_argument("--lr", type=float, default=1e-3)
parser.add_argument("--save-every", type=int, default=10, help="steps from one checkpoint to the next")
parser.add_argument("--resume", action="store_true", help="continue from out/ckpt.pt")
options = parser.parse_args()

OUT = Path("out")
NOISE = 8

rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
use_cuda = torch.cuda.is_available()
device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if use_cuda else torch.device("cpu")
if use_cuda:
    torch.cuda.set_device(device)
if ranks > 1:
    dist.init_process_group("nccl" if use_cuda else "gloo")
OUT.mkdir(exist_ok=True)


def mlp(inputs, outputs):
    """Return a network of three layers."""
    hidden = [nn.Linear(inputs, 64), nn.LeakyReLU(0.2), nn.Linear(64, 64), nn.LeakyReLU(0.2)]
    return nn.Sequential(*hidden, nn.Linear(64, outputs)).to(device)


def ring():
    """Return the training points, shape (2048, 2)."""
    generator = torch.Generator().manual_seed(0)
    angles = torch.randint(8, (2048,), generator=generator) * (2 * math.pi / 8)
    centers = torch.stack([angles.cos(), angles.sin()], dim=1)
    return centers + 0.05 * torch.randn(2048, 2, generator=generator)


def real_batch(step):
    """Return this rank's points of a step, which counts from 1: each epoch has an order of its own."""
    epoch, index = divmod(step - 1, len(points) // options.batch_size)
    order = torch.randperm(len(points), generator=torch.Generator().manual_seed(epoch))
    batch = order[index * options.batch_size : (index + 1) * options.batch_size]
    return points[batch[rank::ranks]].to(device)


def noise(size):
    """Return the generator's inputs, from this rank's random numbers."""
    return torch.randn(size, NOISE).to(device)


def save(folder, step):
    """Replace the checkpoint in one operation, so that a kill leaves the old or the new one."""
    rng = [torch.get_rng_state()] * ranks
    if ranks > 1:
        dist.all_gather_object(rng, torch.get_rng_state())
    if rank == 0:
        state = {name: part.state_dict() for name, part in parts.items()}
        torch.save(state | {"rng": rng, "step": step}, folder / "ckpt.new")
        (folder / "ckpt.new").replace(folder / "ckpt.pt")


def load(folder):
    """Continue from a checkpoint; return its step."""
    state = torch.load(folder / "ckpt.pt", map_location="cpu")
    for name, part in parts.items():
        part.load_state_dict(state[name])
    torch.set_rng_state(state["rng"][rank])
    return state["step"]


points = ring()
torch.manual_seed(1337)
generator, discriminator = mlp(NOISE, 2), mlp(2, 1)
g_optimizer = torch.optim.Adam(generator.parameters(), lr=options.lr, betas=(0.5, 0.999))
d_optimizer = torch.optim.Adam(discriminator.parameters(), lr=options.lr, betas=(0.5, 0.999))
parts = {
    "generator": generator,
    "discriminator": discriminator,
    "g_optimizer": g_optimizer,
    "d_optimizer": d_optimizer,
}
torch.manual_seed(1337 + rank)  # other noise on each rank
start = load(OUT) if options.resume else 0

wrap = DistributedDataParallel if ranks > 1 else lambda network: network
wrapped_generator, wrapped_discriminator = wrap(generator), wrap(discriminator)

for step in range(start + 1, options.steps + 1):
    real = real_batch(step)
    fake = generator(noise(len(real))).detach()
    logits = wrapped_discriminator(torch.cat([real, fake]))
    labels = torch.cat([torch.ones(len(real), 1), torch.zeros(len(fake), 1)]).to(device)
    d_loss = F.binary_cross_entropy_with_logits(logits, labels)
    d_optimizer.zero_grad()
    d_loss.backward()
    d_optimizer.step()

    logits = discriminator(wrapped_generator(noise(len(real))))
    g_loss = F.binary_cross_entropy_with_logits(logits, torch.ones_like(logits))
    g_optimizer.zero_grad()
    g_loss.backward()
    g_optimizer.step()

    if rank == 0:
        print(f"step {step}: d_loss {d_loss.item():.6f} g_loss {g_loss.item():.6f}", flush=True)
    if step % options.save_every == 0:
        save(OUT, step)

if rank == 0:
    weights = {"generator": generator.state_dict(), "discriminator": discriminator.state_dict()}
    torch.save(weights, OUT / "weights.pt")
if ranks > 1:
    dist.destroy_process_group()
