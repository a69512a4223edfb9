"""A small character GPT in plain PyTorch, in one process or in several with DDP:

    python train.py
    torchrun --nproc-per-node=2 train.py --text shakespeare.txt

It saves to out/ckpt.pt, continues from there with --resume, and writes its weights to out/weights.pt.
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

parser = argparse.ArgumentParser()
parser.add_argument("--text", type=Path, help="a text file; default: sums of two numbers")
parser.add_argument("--steps", type=int, default=120)
parser.add_argument("--batch-size", type=int, default=16, help="sequences per step, over all ranks")
parser.add_argument("--lr", type=float, default=3e-3)
parser.add_argument("--save-every", type=int, default=10, help="steps from one checkpoint to the next")
parser.add_argument("--resume", action="store_true", help="continue from out/ckpt.pt")
parser.add_argument("--wandb", action="store_true", help="log to Weights & Biases")
options = parser.parse_args()

OUT = Path("out")
CONTEXT, WIDTH, HEADS, LAYERS, DROPOUT = 32, 32, 2, 2, 0.1

rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
use_cuda = torch.cuda.is_available()
device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if use_cuda else torch.device("cpu")
if use_cuda:
    torch.cuda.set_device(device)
if ranks > 1:
    dist.init_process_group("nccl" if use_cuda else "gloo")
OUT.mkdir(exist_ok=True)


class Block(nn.Module):
    """Attention to the characters so far, then an MLP."""

    def __init__(self):
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention, self.projection = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(DROPOUT)
        )

    def forward(self, x):
        """Map (batch, characters, WIDTH) to the same shape."""
        heads = self.attention(self.norm_1(x)).unflatten(2, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        dropout = DROPOUT if self.training else 0.0
        y = F.scaled_dot_product_attention(*heads, dropout_p=dropout, is_causal=True)
        x = x + self.projection(y.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm_2(x))


class GPT(nn.Module):
    """Predicts the next character at each position."""

    def __init__(self, vocabulary_size):
        super().__init__()
        self.characters = nn.Embedding(vocabulary_size, WIDTH)
        self.positions = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, vocabulary_size))

    def forward(self, x):
        """Map characters, (batch, characters), to logits, (batch, characters, vocabulary)."""
        positions = torch.arange(x.shape[1], device=x.device)
        return self.head(self.blocks(self.characters(x) + self.positions(positions)))


def next_batch():
    """Return random windows of the text for this rank, and the same windows one character later."""
    starts = torch.randint(len(text) - CONTEXT, (options.batch_size // ranks, 1))
    windows = text[starts + torch.arange(CONTEXT + 1)].to(device)
    return windows[:, :-1], windows[:, 1:]


def save(folder, step):
    """Replace the checkpoint in one operation, so that a kill leaves the old or the new one."""
    own_rng = [torch.get_rng_state(), torch.cuda.get_rng_state() if use_cuda else None]
    rng = [own_rng] * ranks
    if ranks > 1:
        dist.all_gather_object(rng, own_rng)
    if rank == 0:
        parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
        state = {name: part.state_dict() for name, part in parts.items()}
        torch.save(state | {"rng": rng, "step": step}, folder / "ckpt.new")
        (folder / "ckpt.new").replace(folder / "ckpt.pt")


def load(folder):
    """Continue from a checkpoint; return its step."""
    state = torch.load(folder / "ckpt.pt", map_location="cpu")
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    scheduler.load_state_dict(state["scheduler"])
    cpu_rng, cuda_rng = state["rng"][rank]
    torch.set_rng_state(cpu_rng)
    if use_cuda:
        torch.cuda.set_rng_state(cuda_rng)
    return state["step"]


if options.text:
    characters = options.text.read_text(encoding="utf-8")
else:
    characters = "".join(f"{a} + {b} = {a + b}\n" for a in range(50) for b in range(50))
vocabulary = sorted(set(characters))
text = torch.tensor([vocabulary.index(character) for character in characters])

torch.manual_seed(1337)
model = GPT(len(vocabulary)).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.steps)
torch.manual_seed(1337 + rank)  # other sequences on each rank
start = load(OUT) if options.resume else 0

wrapped = DistributedDataParallel(model) if ranks > 1 else model
if options.wandb and rank == 0:
    import wandb

    wandb.init(project="gpt")

for step in range(start + 1, options.steps + 1):
    inputs, targets = next_batch()
    loss = F.cross_entropy(wrapped(inputs).flatten(0, 1), targets.flatten())
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    scheduler.step()
    if rank == 0:
        print(f"step {step}: loss {loss.item():.6f}", flush=True)
    if options.wandb and rank == 0:
        wandb.log({"loss": loss.item()}, step=step)
    if step % options.save_every == 0:
        save(OUT, step)

if rank == 0:
    torch.save(model.state_dict(), OUT / "weights.pt")
if ranks > 1:
    dist.destroy_process_group()
