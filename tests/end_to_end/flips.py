"""A net and its data in which one bit flips, in chosen micro-batches of chosen steps.

A flip in ``model.args``, in the data or in the library ``flipping_library`` is repeated by replays. A flip in
the environment (``FLIP``) is not, like the fault of a machine, which may be limited to one node or rank.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from hpc_train.experiment.config.training_sections import DataConfig
from hpc_train.training.datasets.base import TensorSplit
from hpc_train.training.datasets.random_numbers import stream_seed
from hpc_train.training.datasets.sources import digits
from tests.end_to_end import paced
from tests.end_to_end.parts import Block

#: In the environment: a flip that no replay repeats: ``gradient:10:1:head:18``, or ``…:10-60:0-3:…``.
FLIP = "FLIPPED_BIT"
#: The node, or the rank, on which alone bits flip, and a file that the first and only flip creates.
FLIPS_ON, FLIPS_ONCE = "FLIPPED_BIT_ON", "FLIPPED_BIT_ONCE"
#: A file that the first flip creates, with the name of its node: no other node flips bits. That one does
#: once or, if the flip has several steps, in each of them.
BAD_NODE = "FLIPPED_BIT_NODE"
#: The package outside of the snapshot, in a folder of PYTHONPATH, with a flip in its ``FLIP``.
LIBRARY = "flipping_library"
SEED = 3
#: Of ``net``, in the order of its forward.
MODULES = ("stem", "blocks.0.conv", "blocks.0.norm", "blocks.1.conv", "blocks.1.norm", "head")
DROPOUTS = ("blocks.0.dropout", "blocks.1.dropout")


@dataclass(frozen=True)
class Flip:
    """``bit`` of the largest element, counted from the lowest one of the 32.

    ``number``: of the micro-batch, which one rank trains: the flip is on that rank. ``num_steps`` and
    ``num_numbers``: it recurs in this many of each.
    """

    kind: str
    step: int
    number: int
    module: str = "blocks.0.conv"
    bit: int = 18
    num_steps: int = 1
    num_numbers: int = 1

    @classmethod
    def parsed(cls, text: str) -> Flip:
        kind, steps, numbers, module, bit = text.split(":")
        (step, num_steps), (number, num_numbers) = map(_first_and_count, (steps, numbers))
        return cls(kind, step, number, module, int(bit), num_steps, num_numbers)

    def __str__(self) -> str:
        steps, numbers = _span(self.step, self.num_steps), _span(self.number, self.num_numbers)
        return f"{self.kind}:{steps}:{numbers}:{self.module}:{self.bit}"

    @cached_property
    def _seeds(self) -> set[int]:
        steps = range(self.step - 1, self.step - 1 + self.num_steps)
        numbers = range(self.number, self.number + self.num_numbers)
        return {stream_seed(SEED, step, number) for step in steps for number in numbers}

    def is_due(self) -> bool:
        """Return True in the micro-batches, which their random stream identifies, on the node or rank."""
        is_its = torch.initial_seed() in self._seeds and _is_here() and _is_first()
        return is_its and (BAD_NODE not in os.environ or self._is_on_bad_node())

    def _is_on_bad_node(self) -> bool:
        if dist.get_rank() != self.number % dist.get_world_size():
            return False  # it repeats the micro-batch of that rank
        file, node = Path(os.environ[BAD_NODE]), os.environ["SLURMD_NODENAME"]
        try:
            with file.open("x") as opened:
                opened.write(node)
        except FileExistsError:
            return self.num_steps > 1 and file.read_text() == node
        return True

    def of(self, value: Tensor) -> Tensor:
        """Return a copy in which the bit differs."""
        copy = value.detach().clone(memory_format=torch.contiguous_format)
        self.change(copy)
        return copy

    def change(self, value: Tensor) -> None:
        """Change the bit in ``value``."""
        with torch.no_grad():
            flat = value.detach().view(-1)
            largest = int(flat.abs().argmax())
            mask = torch.tensor(1 << self.bit, dtype=torch.int32)
            flat.view(torch.int32)[largest] ^= mask


def _first_and_count(text: str) -> tuple[int, int]:
    first, _, last = text.partition("-")
    return int(first), int(last or first) - int(first) + 1


def _span(first: int, count: int) -> str:
    return str(first) if count == 1 else f"{first}-{first + count - 1}"


def _is_here() -> bool:
    where = os.environ.get(FLIPS_ON)
    return where is None or where in (os.environ.get("SLURMD_NODENAME"), str(dist.get_rank()))


def _is_first() -> bool:
    if file := os.environ.get(FLIPS_ONCE):
        try:
            Path(file).touch(exist_ok=False)
        except FileExistsError:
            return False
    return True


class Flipping(nn.Module):
    """A stem, blocks and a head, for 1×32×32 digits. ``center``: its sum depends on the CPU threads."""

    def __init__(self, num_classes: int, dropout: float, *, center: bool, depth: int) -> None:
        super().__init__()
        self.center = Center() if center else nn.Identity()
        self.stem = nn.Conv2d(1, 8, 4, stride=4)
        self.blocks = nn.Sequential(*(Block(8, norm=True, dropout=dropout) for _ in range(depth)))
        self.head = nn.Linear(8 * 8 * 8, num_classes)

    def forward(self, images_BCHW: Tensor) -> Tensor:
        logits: Tensor = self.head(self.blocks(self.stem(self.center(images_BCHW))).flatten(1))
        return logits


class Center(nn.Module):
    """Subtracts the mean of a micro-batch: a sum over more elements than one thread adds up."""

    def forward(self, images_BCHW: Tensor) -> Tensor:
        return images_BCHW - images_BCHW.mean()


def net(
    num_classes: int, dropout: float = 0.2, flip: str = "", center: bool = False, depth: int = 2
) -> nn.Module:
    model = Flipping(num_classes, dropout, center=center, depth=depth)
    text = os.environ.get(FLIP) or _in_library() or flip
    if text:
        inject(model, Flip.parsed(text))
    return model


def vit(num_classes: int, flip: str = "") -> nn.Module:
    """Return a transformer whose layers ranks can share."""
    model = paced.vit(num_classes, dropout=0.0)
    if flip:
        inject(model, Flip.parsed(flip))
    return model


def _in_library() -> str:
    try:
        import flipping_library
    except ImportError:
        return ""
    text: str = flipping_library.FLIP
    return text


def inject(model: nn.Module, flip: Flip) -> None:
    """Let the flip occur in training."""
    target = model.get_submodule(flip.module)
    if flip.kind == "output":
        target.register_forward_hook(lambda module, args, output: _with_gradient(flip, module, output))
    elif flip.kind == "backward":
        target.register_forward_hook(lambda module, args, output: _flip_gradient(flip, module, output))
    elif flip.kind == "input":  # of the model, as if a copy to the device had changed it
        model.register_forward_pre_hook(lambda module, args: (_with_gradient(flip, module, args[0]),))
    elif flip.kind in ("moment", "stored weight"):
        _before_or_after_update(model, flip)
    else:
        target.register_forward_pre_hook(_before_forward(flip))


def _with_gradient(flip: Flip, module: nn.Module, value: Tensor) -> Tensor:
    return value + (flip.of(value) - value.detach()) if module.training and flip.is_due() else value


def _flip_gradient(flip: Flip, module: nn.Module, value: Tensor) -> None:
    if module.training and flip.is_due():
        value.register_hook(flip.of)


def _before_forward(flip: Flip) -> Callable[[nn.Module, Any], None]:
    has_flipped = False

    def change(module: nn.Module, args: Any) -> None:
        nonlocal has_flipped
        if not module.training or not flip.is_due():
            return
        if flip.kind == "rng":
            torch.rand(1)
        elif flip.kind == "gradient":
            handles: list[Any] = []

            def flip_once(gradient: Tensor) -> Tensor:
                handles.pop().remove()
                return flip.of(gradient)

            handles.append(module.weight.register_hook(flip_once))
        elif not has_flipped:  # a weight stays flipped: DDP runs the first micro-batch twice
            flip.change(module.weight)
            has_flipped = True

    return change


def _before_or_after_update(model: nn.Module, flip: Flip) -> None:
    """Flip a bit of ``exp_avg`` before the optimizer's step, or one of the weight after it."""
    is_due = False

    def look(module: nn.Module, args: Any) -> None:
        nonlocal is_due
        is_due = is_due or (module.training and flip.is_due())

    def change(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        nonlocal is_due
        if not is_due:
            return
        is_due = False
        # The strategy may have replaced the parameters, but not their order.
        names = [name for name, value in model.named_parameters() if value.requires_grad]
        parameters = [value for group in optimizer.param_groups for value in group["params"]]
        parameter = parameters[names.index(f"{flip.module}.weight")]
        value = optimizer.state[parameter]["exp_avg"] if flip.kind == "moment" else parameter
        flip.change(value.to_local() if hasattr(value, "to_local") else value)

    model.register_forward_pre_hook(look)
    before, after = register_optimizer_step_pre_hook, register_optimizer_step_post_hook
    (before if flip.kind == "moment" else after)(change)


def data(sample: int | None = None, bit: int = 0) -> tuple[TensorSplit, TensorSplit]:
    """Return the digits, one of which may have a pixel with another bit."""
    source = digits.build("", DataConfig(name="digits"), download=False)
    train, val = source.train, source.val
    assert isinstance(train, TensorSplit) and isinstance(val, TensorSplit)
    if sample is not None:
        train.images[sample, 0, 16, 16] ^= 1 << bit
    return train, val
