"""The stages of a model that a rank owns, and the forward of a batch through the stages of all ranks.

Used by ``pipeline`` and ``split``. Legend: K ranks of a pipeline; stage s is on its rank s mod K.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hpc_train.errors import BadFileError
from hpc_train.training.models.splitting import Stage
from hpc_train.training.models.tracing import cant_be_cut

Values = tuple[Tensor, ...]


class HeldStages(nn.Module):
    """Several stages as one module, in which modules and tensors have the model's names."""

    def __init__(self, stages: Sequence[nn.Module]) -> None:
        super().__init__()
        self._stages = nn.ModuleList(stages)

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """Yield this module, then the stages' modules; named parameters and buffers use this method, too."""
        memo = set() if memo is None else memo
        if self not in memo:
            memo.add(self)
            yield prefix, self
        for stage in self._stages:
            yield from stage.named_modules(memo, prefix, remove_duplicate)

    def state_dict(self, *args: Any, **keys: Any) -> Any:
        """Return the stages' state dicts in one; their names are disjoint."""
        return {
            name: value for stage in self._stages for name, value in stage.state_dict(*args, **keys).items()
        }


def drop_other_stages(model: nn.Module, held: Sequence[Stage]) -> None:
    """Free the memory of all parameters and buffers of ``model`` that are not in a stage of ``held``."""
    in_use = {id(value) for stage in held for value in (*stage.parameters(), *stage.buffers())}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and id(parameter) not in in_use:
                empty = torch.empty_like(parameter, device="meta")
                module._parameters[name] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
        for name, buffer in module._buffers.items():
            if buffer is not None and id(buffer) not in in_use:
                module._buffers[name] = torch.empty_like(buffer, device="meta")


def make_contiguous(stage: nn.Module) -> None:
    """Make ``stage`` return contiguous tensors, because a send takes only these.

    Anything but a tensor or a tuple is unchanged; ``OutputSpecs`` refuses it.
    """

    def in_order(module: nn.Module, inputs: Any, outputs: Any) -> Any:
        if isinstance(outputs, tuple):
            return tuple(in_order(module, inputs, value) for value in outputs)
        return outputs.contiguous() if isinstance(outputs, Tensor) else outputs

    stage.register_forward_hook(in_order)


@dataclass(frozen=True)
class OutputSpec:
    """The properties of a tensor that a rank needs to receive it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    @classmethod
    def of(cls, value: Tensor) -> OutputSpec:
        """Describe a tensor that this rank has computed."""
        return cls(tuple(value.shape), value.dtype, value.requires_grad)

    def zeros(self, device: torch.device | str) -> Tensor:
        """Return zeros of this shape and dtype, without a gradient."""
        return torch.zeros(self.shape, dtype=self.dtype, device=device)

    def on_meta(self) -> Tensor:
        """Return a tensor without memory."""
        return self.zeros("meta").requires_grad_(self.requires_grad)


@dataclass(frozen=True)
class OutputSpecs:
    """The outputs of a stage."""

    values: tuple[OutputSpec, ...]
    is_tuple: bool

    @classmethod
    def of(cls, outputs: Any) -> OutputSpecs:
        """Raises BadFileError if ``outputs`` is neither a tensor nor a tuple of tensors."""
        is_tuple = isinstance(outputs, tuple)
        values = outputs if is_tuple else (outputs,)
        if not all(isinstance(value, Tensor) for value in values):
            raise cant_be_cut(f"it returns a {type(outputs).__name__}, not a tensor or a tuple of tensors")
        return cls(tuple(OutputSpec.of(value) for value in values), is_tuple)

    def joined(self, values: Sequence[Tensor]) -> Any:
        """Return ``values`` in the form that the stage returns: a tuple or a single tensor."""
        return tuple(values) if self.is_tuple else values[0]


def only_tensor(inputs: Any) -> Tensor:
    """Return the inputs of a batch. Raises BadFileError if they are a structure."""
    if isinstance(inputs, Tensor):
        return inputs
    raise BadFileError(
        "parallel.strategy: stages of a model take one tensor of inputs, and the data have several "
        f"({type(inputs).__name__}); write ddp, fsdp or zero1"
    )


Around = Callable[[int], AbstractContextManager[object]]


class PipelineForward(nn.Module):
    """The whole model's forward, one batch from stage to stage: for evaluation, and to find the specs.

    ``held``: index → stage of this rank, in order; ``model`` has their tensors. ``group``: the ranks of the
    pipeline.
    """

    def __init__(
        self,
        model: nn.Module,
        held: dict[int, nn.Module],
        num_stages: int,
        group: dist.ProcessGroup,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.model = model
        self._held = list(held.items())
        self._num_stages = num_stages
        self._group = group
        self._device = device
        self._specs: dict[tuple[Any, ...], list[OutputSpecs]] = {}

    def forward(self, inputs: Tensor) -> Any:
        """Return the outputs on the ranks of the last stage, zeros of the same form on the others.

        Collective within the pipeline; all its ranks pass the same inputs.
        """
        inputs = only_tensor(inputs)
        key = (tuple(inputs.shape), inputs.dtype, self.training)
        outputs, specs = self.run(inputs, self._specs.get(key))
        self._specs[key] = specs
        if outputs is not None:
            return outputs
        return specs[-1].joined([spec.zeros(self._device) for spec in specs[-1].values])

    def run(
        self,
        inputs: Tensor,
        cached: list[OutputSpecs] | None = None,
        around: Around = lambda stage: nullcontext(),
    ) -> tuple[Any, list[OutputSpecs]]:
        """Return the outputs, None except on the last stage's ranks, and the output specs of each stage.

        The specs are broadcast unless they are ``cached``. ``around``: the context of a stage's forward.
        """
        held = dict(self._held)
        specs = list(cached or ())
        values: Values = (inputs,)
        outputs = None
        for index in range(self._num_stages):
            if index in held:
                if index > 0:
                    values = self._received(index, values, specs[index - 1])
                with around(index):
                    outputs = held[index](*values)
            if cached is None:
                specs.append(self._broadcast_specs(index, outputs if index in held else None))
            if index in held:
                values = outputs if isinstance(outputs, tuple) else (outputs,)
                if index < self._num_stages - 1 and not self._is_here(index + 1):
                    for value in values:
                        dist.send(value.detach(), dst=self._rank_of(index + 1), group=self._group)
        return (outputs if self._num_stages - 1 in held else None), specs

    def _rank_of(self, stage: int) -> int:
        return dist.get_global_rank(self._group, stage % self._group.size())

    def _broadcast_specs(self, stage: int, outputs: Any) -> OutputSpecs:
        box = [None if outputs is None else OutputSpecs.of(outputs)]
        if self._group.size() > 1:
            dist.broadcast_object_list(box, src=self._rank_of(stage), group=self._group, device=self._device)
        assert box[0] is not None
        return box[0]

    def _received(self, stage: int, before: Values, specs: OutputSpecs) -> Values:
        """Return the inputs of ``stage``, as leaves of a new graph."""
        if self._is_here(stage - 1):
            values = [value.detach() for value in before]
        else:
            values = [spec.zeros(self._device) for spec in specs.values]
            for value in values:
                dist.recv(value, src=self._rank_of(stage - 1), group=self._group)
        pairs = zip(values, specs.values, strict=True)
        return tuple(value.requires_grad_(spec.requires_grad) for value, spec in pairs)

    def _is_here(self, stage: int) -> bool:
        return self._rank_of(stage) == dist.get_rank()
