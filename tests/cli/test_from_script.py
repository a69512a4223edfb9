"""``init --from-script``: what it reads from scripts of several styles, and that each file validates."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from hpc_train.cli.init import job_values
from hpc_train.experiment.config.schema import Program
from hpc_train.experiment.validate.loading import load
from hpc_train.workloads.script_survey import Script, survey
from tests.cli.commands import hpc_train, stderr_of, succeeded

NANOGPT = """
import os
import torch
from torch.distributed import init_process_group

out_dir = 'out'
eval_interval = 2000
init_from = 'scratch'  # 'scratch' or 'resume'
batch_size = 12
learning_rate = 6e-4
max_iters = 600000
device = 'cuda'
exec(open('configurator.py').read())
if int(os.environ.get('RANK', -1)) != -1:
    init_process_group(backend='nccl')
os.makedirs(out_dir, exist_ok=True)
torch.manual_seed(1337)
if init_from == 'scratch':
    pass
elif init_from == 'resume':
    checkpoint = torch.load(os.path.join(out_dir, 'ckpt.pt'))
iter_num = 0
while True:
    if iter_num % eval_interval == 0:
        print(f"step {iter_num}: train loss {losses['train']:.4f}, val loss {losses['val']:.4f}")
        torch.save(checkpoint, os.path.join(out_dir, 'ckpt.pt'))
    for micro_step in range(8):
        scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    print(f"iter {iter_num}: loss {lossf:.4f}, time {dt*1000:.2f}ms")
    iter_num += 1
"""
ARGPARSE = """
import argparse
import logging

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

parser = argparse.ArgumentParser()
parser.add_argument("data", help="folder")
parser.add_argument("--name", required=True)
parser.add_argument("-b", "--batch-size", type=int, default=64)
parser.add_argument("--lr", type=float, default=0.1)
parser.add_argument("--epochs", default=90, type=int)
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--resume", default="", type=str)
parser.add_argument("--log-interval", type=int, default=10)


def main(rank, args):
    dist.init_process_group("gloo", rank=rank, world_size=2)
    optimizer = torch.optim.SGD(model.parameters(), args.lr)
    for epoch in range(args.epochs):
        for i, batch in enumerate(loader):
            optimizer.step()
            if i % args.log_interval == 0:
                logging.info("epoch %d loss %f", epoch, loss)
        print("Epoch", epoch, "loss", loss.item(), "acc", acc)
        torch.save({"epoch": epoch}, "checkpoint.pth.tar")


mp.spawn(main, (parser.parse_args(),), nprocs=2)
"""
HYDRA = """
import hydra
from pathlib import Path

@hydra.main(config_path="conf", config_name="config")
def main(cfg):
    out = Path("ckpts")
    for step, batch in enumerate(data, start=1):
        opt.step()
        print(f"[{step:5d}/{cfg.steps}] loss={loss.item():.3f} lr={lr}")
        if step % 100 == 0:
            torch.save(model.state_dict(), out / f"step_{step}.pt")

main()
"""
LIGHTNING = """
from lightning.pytorch.cli import LightningCLI

LightningCLI(Model, Data)
"""
HUGGING_FACE = """
from dataclasses import dataclass
from transformers import HfArgumentParser, Trainer, TrainingArguments

@dataclass
class Options:
    dropout: float = 0.1
    pretrained: str = "gpt2"

parser = HfArgumentParser((Options, TrainingArguments))
options, _ = parser.parse_args_into_dataclasses()
Trainer(args=TrainingArguments(output_dir="results", max_steps=10)).train()
"""
FLAG = """
import argparse, json, pathlib
parser = argparse.ArgumentParser()
parser.add_argument("--out", default="runs/a")
parser.add_argument("--resume", action="store_true")
args = parser.parse_args()
for epoch in range(3):
    optimizer.step()
    print(f"100% of epoch {epoch} done | val accuracy: {acc:.1%} of {n}")
    torch.save(state, args.out + "/last.pt")
"""
PATHLIB = """
import argparse, json, pathlib
parser = argparse.ArgumentParser()
parser.add_argument("--resume", action="store_true")
checkpoint = pathlib.Path("out/state.json")
checkpoint.parent.mkdir(exist_ok=True)
checkpoint.write_text(json.dumps(state))
"""
EMPTY = "print('nothing')\n"
#: Script → the section ``program`` without its command, and the line of ``optimizer.step()``.
CASES: dict[str, tuple[str, dict[str, Any], int]] = {
    "nanogpt": (NANOGPT, {
        "args": {"batch_size": 12, "learning_rate": 6e-4, "max_iters": 600000},
        "outputs": ["out"],
        "resume": {"if_exists": "out/ckpt.pt", "args": ["--init_from=resume"]},
    }, 29),
    "argparse": (ARGPARSE, {
        "per": "node",
        "args": {"name": "NAME", "batch-size": 64, "lr": 0.1, "epochs": 90, "seed": "{seed}"},
        "outputs": ["checkpoint.pth.tar"],
        "resume": {"if_exists": "checkpoint.pth.tar", "args": ["--resume=checkpoint.pth.tar"]},
    }, 25),
    "hydra": (HYDRA, {"style": "key=value", "outputs": ["outputs", "ckpts"]}, 9),
    "lightning": (LIGHTNING, {}, 0),
    "hugging_face": (HUGGING_FACE, {"args": {"dropout": 0.1}, "outputs": ["results"]}, 0),
    "flag": (FLAG, {
        "outputs": ["runs"], "resume": {"if_exists": "runs/a/last.pt", "args": ["--resume"]}
    }, 8),
    "pathlib": (PATHLIB, {
        "outputs": ["out"], "resume": {"if_exists": "out/state.json", "args": ["--resume"]}
    }, 0),
    "empty": (EMPTY, {}, 0),
}  # fmt: skip
#: Script → a line that it prints, and the row that is read from it.
LINES = {
    "nanogpt": (
        "step 250: train loss 3.1, val loss nan", {"step": "250", "loss": "3.1", "val_loss": "nan"}
    ),
    "argparse": ("Epoch 3 loss 0.25 acc 0.5", {"step": "3", "loss": "0.25", "acc": "0.5"}),
    "hydra": ("[   12/100] loss=1e-05 lr=0.1", {"step": "12", "loss": "1e-05"}),
    "flag": ("100% of epoch 2 done | val accuracy: 71.5% of 9", {"step": "2", "val_accuracy": "71.5"}),
}  # fmt: skip


@pytest.mark.parametrize("style", CASES)
def test_the_file_validates_and_has_what_the_script_says(style: str) -> None:
    text, expected, step_line = CASES[style]
    Path(f"{style}.py").write_text(text)
    done = succeeded("init", "--local", "--from-script", f"{style}.py", "--json")
    job = load(Path("exp.yaml")).experiment
    assert isinstance(job, Program)
    program = job.program.model_dump(exclude_defaults=True)
    command, metrics = program.pop("command"), program.pop("metrics", None)
    assert command[:2] == ["python", f"{style}.py"] and program == expected
    assert command[2:] == {"lightning": ["fit"], "argparse": ["DATA"]}.get(style, [])
    assert (metrics is not None) == (style in LINES)
    if metrics is not None:
        line, row = LINES[style]
        match = re.search(metrics["regex"], line)
        assert match is not None and match.groupdict() == row
    lines = json.loads(done.out)["script"]
    assert (f"  after line {step_line};" in "\n".join(lines)) == (step_line > 0)
    assert any("from hpc_train.session.lightning import" in line for line in lines) == (style == "lightning")


def test_values_that_only_the_user_knows_are_marked() -> None:
    Path("train.py").write_text(ARGPARSE)
    done = hpc_train("init", "--local", "--from-script", "train.py", "--json")
    lines = Path("exp.yaml").read_text().splitlines()
    marked = [lines[number - 1].split(":")[0].strip() for number in json.loads(done.out)["lines_to_change"]]
    assert marked == ["command", "name"]


@pytest.mark.parametrize(("path", "text", "words"), [
    ("train.sh", "", "command: [bash, train.sh]"),
    ("missing.py", None, "No such file"),
    ("bad.py", "x = (\n", "bad.py:1: is not Python"),
    ("../outside.py", "", "then `hpc-train init --from-script outside.py`"),
])  # fmt: skip
def test_a_script_that_can_t_be_read_is_refused(path: str, text: str | None, words: str) -> None:
    if text is not None:
        Path(path).write_text(text)
    assert words in stderr_of(2, "init", "--local", "--from-script", path)
    assert not Path("exp.yaml").exists()


def test_the_clusters_section_fits_the_ranks_of_the_script() -> None:
    cluster = {"partition": "gpu", "nodes": 1, "gpus_per_node": 8}
    assert job_values(Script(is_distributed=True), cluster) == cluster
    assert job_values(Script(starts_ranks=True), cluster) == cluster | {"ranks_per_node": 1}
    assert job_values(Script(), cluster) == cluster | {"gpus_per_node": 1}
    assert job_values(Script(), {"partition": "cpu"}) == {"partition": "cpu"}


def test_a_name_that_contains_itself_has_no_path() -> None:
    assert survey("p = p + '/x'\ntorch.save(m, p)\n").outputs == []
