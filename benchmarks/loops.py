"""The training loops that benchmarks/step.py compares hpc-train with; one rank of one loop per process.

    python -m benchmarks.loops LOOP WORKLOAD [--quick]

Under torchrun a rank takes its part of the global batch, with gloo and DistributedDataParallel. Rank 0 prints
the seconds per step of each window as JSON. Peers are imported where they are used.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from benchmarks.turns import TURN_S

NUM_CLASSES, NUM_TOKENS, SEQUENCE_LENGTH = 10, 65, 64
GPT_ARGS = {"num_layers": 3, "num_heads": 4, "dim": 96}
DEEP_GPT_ARGS = {"num_layers": 12, "num_heads": 4, "dim": 32}
Split = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Workload:
    """What is trained. Each window of ``window`` steps gives one time; the first ``warm_up`` don't count."""

    model: Callable[[], nn.Module]
    data: Callable[[], Split]
    #: uint8 images → what the model reads; tokens stay.
    prepare: Callable[[Tensor], Tensor]
    optimizer: str
    lr: float
    global_batch_size: int
    ranks: int
    window: int
    warm_up: int
    counted: int
    #: Seconds of an arm's turn (``benchmarks.turns``), long compared with a step.
    turn_s: float = TURN_S
    #: ``compile.scope``; None: eager.
    compiled: str | None = None

    def steps(self) -> int:
        return self.window * (self.warm_up + self.counted)

    def quick(self) -> Workload:
        return replace(self, window=max(self.window // 20, 1), warm_up=1, counted=2)


def mlp(num_classes: int = NUM_CLASSES) -> nn.Module:
    """A model whose step takes less time than most of what surrounds it."""
    return nn.Sequential(nn.Flatten(), nn.Linear(1024, 64), nn.ReLU(), nn.Linear(64, num_classes))


def resnet18(num_classes: int = NUM_CLASSES) -> nn.Module:
    """torchvision's ResNet-18 for images of one channel."""
    return _resnet("resnet18", num_classes)


def resnet50(num_classes: int = NUM_CLASSES) -> nn.Module:
    """torchvision's ResNet-50 for images of one channel, enlarged to 224 × 224."""
    return nn.Sequential(nn.Upsample(size=224), _resnet("resnet50", num_classes))


def _resnet(name: str, num_classes: int) -> nn.Module:
    from torchvision.models import get_model

    model: nn.Module = get_model(name, num_classes=num_classes)
    model.conv1 = nn.Conv2d(1, 64, kernel_size=7, stride=2, padding=3, bias=False)
    return model


def vit_tiny(num_classes: int = NUM_CLASSES) -> nn.Module:
    """timm's ViT-Tiny for images of 32 × 32 in one channel: 16 patches."""
    from timm import create_model

    shape = {"img_size": 32, "patch_size": 8, "in_chans": 1}
    model: nn.Module = create_model("vit_tiny_patch16_224", num_classes=num_classes, **shape)
    return model


def gpt() -> nn.Module:
    """The model ``gpt`` of hpc-train."""
    from hpc_train.training.models.gpt import GPT, GPTArgs

    return GPT(NUM_TOKENS, SEQUENCE_LENGTH, GPTArgs(**GPT_ARGS))


def deep_gpt() -> nn.Module:
    """A GPT of twelve layers, so narrow that nearly all of a step is work of the host."""
    from hpc_train.training.models.gpt import GPT, GPTArgs

    return GPT(NUM_TOKENS, SEQUENCE_LENGTH, GPTArgs(**DEEP_GPT_ARGS))


def digits() -> Split:
    """Return the training images and classes of the data set ``digits``, as hpc-train reads them."""
    from hpc_train.experiment.config.training_sections import DataConfig
    from hpc_train.training.datasets.sources.digits import build

    split: Any = build("", DataConfig(name="digits"), download=False).train
    return split.images, split.targets


def sequences() -> Split:
    """Return random tokens as inputs and targets, both (N, T)."""
    tokens = torch.randint(
        NUM_TOKENS, (4096, SEQUENCE_LENGTH + 1), generator=torch.Generator().manual_seed(0)
    )
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def normalized(images: Tensor) -> Tensor:
    return (images.float() / 255 - 0.5) / 0.5


def _same(tokens: Tensor) -> Tensor:
    return tokens


#: The steps that count take about 10 s, of ResNet-50 25 s.
WORKLOADS = {
    "mlp": Workload(mlp, digits, normalized, "sgd", 0.01, 64, ranks=1, window=100, warm_up=5, counted=150),
    "mlp_ddp": Workload(mlp, digits, normalized, "sgd", 0.01, 64, ranks=2, window=50, warm_up=5, counted=60),
    "resnet18": Workload(
        resnet18, digits, normalized, "sgd", 0.01, 64, ranks=1, window=2, warm_up=2, counted=25
    ),
    "resnet18_ddp": Workload(
        resnet18, digits, normalized, "sgd", 0.01, 64, ranks=2, window=2, warm_up=2, counted=25
    ),
    "resnet50": Workload(
        resnet50, digits, normalized, "sgd", 0.01, 8, ranks=1, window=1, warm_up=2, counted=5, turn_s=20
    ),
    "vit_tiny": Workload(
        vit_tiny, digits, normalized, "adamw", 0.001, 32, ranks=1, window=1, warm_up=3, counted=40
    ),
    "vit_tiny_ddp": Workload(
        vit_tiny, digits, normalized, "adamw", 0.001, 64, ranks=2, window=1, warm_up=3, counted=40
    ),
    "gpt": Workload(gpt, sequences, _same, "adamw", 0.001, 32, ranks=1, window=5, warm_up=2, counted=25),
    "gpt_ddp": Workload(gpt, sequences, _same, "adamw", 0.001, 32, ranks=2, window=5, warm_up=2, counted=25),
}
_HOST = Workload(
    deep_gpt, sequences, _same, "fused_adamw", 0.001, 1, ranks=1, window=20, warm_up=5, counted=40
)
#: The overhead of the host, which is what a GPU waits for: eager, and by each scope of ``compile``.
WORKLOADS |= {
    "host_eager": _HOST,
    "host_model": replace(_HOST, compiled="model"),
    "host_blocks": replace(_HOST, compiled="blocks"),
}
#: Those of torch, with the kernels that hpc-train chooses where it matters.
_OPTIMIZERS = {
    "sgd": torch.optim.SGD,
    "adamw": torch.optim.AdamW,
    "fused_adamw": functools.partial(torch.optim.AdamW, fused=True),
}


def loss_of(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the cross entropy over all targets, of images or of tokens."""
    return cross_entropy(outputs.flatten(0, -2), targets.flatten())


@dataclass(frozen=True)
class _Setup:
    """What a loop is written with; types are the peer's own."""

    model: Any
    optimizer: Any
    batches: Iterator[Split]
    backward: Callable[[Tensor], Any] = torch.autograd.backward


@dataclass(frozen=True)
class _Job:
    """One rank's part of the work."""

    workload: Workload
    rank: int
    model: nn.Module
    optimizer: torch.optim.Optimizer
    data: Split

    @property
    def batch_size(self) -> int:
        return self.workload.global_batch_size // self.workload.ranks

    def loader(self, *, is_sharded: bool = False) -> Any:
        """Return a DataLoader; ``is_sharded``: with a sampler for this rank, where there are several."""
        data = TensorDataset(*self.data)
        if not is_sharded or self.workload.ranks == 1:
            return DataLoader(data, self.batch_size, shuffle=True, drop_last=True)
        sampler = DistributedSampler(data, self.workload.ranks, self.rank, drop_last=True)
        return DataLoader(data, self.batch_size, sampler=sampler, drop_last=True)

    def replicated(self) -> nn.Module:
        if self.workload.ranks == 1:
            return self.model
        dist.init_process_group("gloo")
        return DistributedDataParallel(self.model)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("loop", choices=[*LOOPS])
    parser.add_argument("workload", choices=[*WORKLOADS])
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    workload = WORKLOADS[arguments.workload]
    if arguments.quick:
        workload = workload.quick()
    model = workload.model()
    for module in _compiled(model, workload.compiled):
        module.compile()
    rank = int(os.environ.get("RANK", "0"))
    optimizer = _OPTIMIZERS[workload.optimizer](model.parameters(), lr=workload.lr)
    job = _Job(workload, rank, model, optimizer, workload.data())
    times = LOOPS[arguments.loop](job)
    if rank == 0:
        print(json.dumps(differences(times[workload.warm_up :], workload.window)), flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()


def _compiled(model: Any, scope: str | None) -> list[nn.Module]:
    """Return the modules that are compiled each on its own."""
    if scope is None:
        return []
    return [model] if scope == "model" else list(model.blocks())


def differences(times: list[float], window: int) -> list[float]:
    """Return the seconds per step between consecutive times, which are ``window`` steps apart."""
    return [(after - before) / window for before, after in itertools.pairwise(times)]


def _steps(setup: Callable[[_Job], _Setup]) -> Callable[[_Job], list[float]]:
    """Return a loop written by hand around a peer's parts; it returns when each window began."""

    def train(job: _Job) -> list[float]:
        parts, workload = setup(job), job.workload
        times: list[float] = []
        for step, (inputs, targets) in enumerate(parts.batches):
            if step % workload.window == 0:
                times.append(time.time())
            if step == workload.steps():
                break
            parts.backward(loss_of(parts.model(workload.prepare(inputs)), targets))
            parts.optimizer.step()
            parts.optimizer.zero_grad()
        return times

    return train


def _bare(job: _Job) -> _Setup:
    return _Setup(job.replicated(), job.optimizer, _indexed(job))


def _with_loader(job: _Job) -> _Setup:
    return _Setup(job.replicated(), job.optimizer, _epochs(job.loader(is_sharded=True)))


def _with_fabric(job: _Job) -> _Setup:
    from lightning_fabric import Fabric

    ranks = job.workload.ranks
    fabric = Fabric(accelerator="cpu", devices=ranks, strategy="ddp" if ranks > 1 else "auto")
    fabric.launch()
    model, optimizer = fabric.setup(job.model, job.optimizer)
    return _Setup(model, optimizer, _epochs(fabric.setup_dataloaders(job.loader())), fabric.backward)


def _with_accelerate(job: _Job) -> _Setup:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model, optimizer, loader = accelerator.prepare(job.model, job.optimizer, job.loader())
    return _Setup(model, optimizer, _epochs(loader), accelerator.backward)


def _trainer(job: _Job) -> list[float]:
    """Train by Hugging Face's Trainer, which has a loop of its own; return when each window began."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    workload, times = job.workload, []

    class Clock(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, _: Any, state: Any, __: Any, **___: Any) -> None:
            if state.global_step % workload.window == 0:
                times.append(time.time())

        def on_train_end(self, *_: Any, **__: Any) -> None:
            times.append(time.time())

    class Wrapped(nn.Module):
        """Returns the loss as transformers' models do."""

        def __init__(self) -> None:
            super().__init__()
            self.model = job.model

        def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
            return {"loss": loss_of(self.model(workload.prepare(inputs)), labels)}

    folder = tempfile.mkdtemp()
    arguments = TrainingArguments(
        output_dir=folder,
        max_steps=workload.steps(),
        per_device_train_batch_size=job.batch_size,
        use_cpu=True,
        ddp_backend="gloo" if workload.ranks > 1 else None,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        logging_strategy="no",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        dataloader_drop_last=True,
        dataloader_pin_memory=False,
    )
    data = [{"inputs": inputs, "labels": labels} for inputs, labels in zip(*job.data, strict=True)]
    trainer = Trainer(
        Wrapped(), arguments, train_dataset=data, callbacks=[Clock()], optimizers=(job.optimizer, None)
    )
    trainer.train()
    shutil.rmtree(folder)
    return times


LOOPS: dict[str, Callable[[_Job], list[float]]] = {
    "bare loop": _steps(_bare),
    "DataLoader loop": _steps(_with_loader),
    "Fabric": _steps(_with_fabric),
    "Accelerate": _steps(_with_accelerate),
    "HF Trainer": _trainer,
}


def _indexed(job: _Job) -> Iterator[Split]:
    images, targets = job.data
    torch.manual_seed(job.rank)
    while True:
        order = torch.randperm(len(images))
        for start in range(0, len(images) - job.batch_size + 1, job.batch_size):
            chosen = order[start : start + job.batch_size]
            yield images[chosen], targets[chosen]


def _epochs(loader: Any) -> Iterator[Split]:
    while True:
        yield from loader


if __name__ == "__main__":
    main()
