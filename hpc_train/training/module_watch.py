"""Hooks on all modules of a model that receive their inputs and outputs, for replays alone.

``training.replaying`` searches for the first NaN with them and measures ranges; ``training.step_digests``
computes digests.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from hpc_train.training.strategies.pieces import local_part


class ModuleWatch(ABC):
    """Receives each module's inputs and outputs, in their order, while its hooks are registered."""

    def __init__(self, model: nn.Module) -> None:
        self._modules = dict(model.named_modules())
        self._handles: list[Any] = []

    def register(self) -> None:
        """Register the hooks."""
        for name, module in self._modules.items():
            self._handles += [
                module.register_forward_pre_hook(self._before(name), with_kwargs=True),
                module.register_forward_hook(self._after(name)),
            ]

    def remove(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    @abstractmethod
    def _note(self, name: str, value: Any, *, is_output: bool) -> None:
        """Receive the inputs, or the outputs, of module ``name``."""

    def _before(self, name: str) -> Any:
        def note(module: nn.Module, args: Any, kwargs: Any) -> None:
            self._note(name, (args, kwargs), is_output=False)

        return note

    def _after(self, name: str) -> Any:
        def note(module: nn.Module, args: Any, output: Any) -> None:
            self._note(name, output, is_output=True)

        return note


class OutputRanges(ModuleWatch):
    """The ranges of each module's outputs in one rank's micro-batches of a step."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        #: Module → minimum, maximum, sum of absolute values and number of elements, of each tensor of the
        #: micro-batch that runs.
        self._values: dict[str, list[Tensor]] = {}
        #: By micro-batch, so that one that runs twice (DDP's warm-up) counts once.
        self._batches: dict[int, dict[str, list[Tensor]]] = {}

    @override
    @torch.no_grad()
    def _note(self, name: str, value: Any, *, is_output: bool) -> None:
        for tensor in floating_tensors(value) if is_output else ():
            part = local_part(tensor)
            if part.numel():
                total = part.abs().sum(dtype=torch.float64)
                numbers = [*torch.aminmax(part), total, total.new_tensor(part.numel())]
                self._values.setdefault(name, []).append(torch.stack([number.double() for number in numbers]))

    def end_batch(self, number: int) -> None:
        """Assign the values to a micro-batch; never called on stages that compute no loss."""
        self._batches[number], self._values = self._values, {}

    def taken(self) -> dict[str, list[float]]:
        """Return the four numbers by module, in the order of their calls, and forget them."""
        batches = [*self._batches.values(), self._values]
        self._batches, self._values = {}, {}
        names = dict.fromkeys(name for values in batches for name in values)
        ranges = {}
        for name in names:
            parts = [part for values in batches for part in values.get(name, ())]
            lows, highs, sums, counts = torch.stack(parts).unbind(1)
            ranges[name] = torch.stack([lows.amin(), highs.amax(), sums.sum(), counts.sum()]).tolist()
        return ranges


class NonFiniteSearch(ModuleWatch):
    """Records, while it is entered, whether each module's inputs and outputs are finite, in their order."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        #: Module, whether it is its output, and the flag, of the micro-batch that runs.
        self._events: list[tuple[str, bool, Tensor]] = []
        #: The place of the first number that is not finite.
        self.place: dict[str, Any] | None = None

    def __enter__(self) -> NonFiniteSearch:
        self.register()
        return self

    def __exit__(self, *exception: object) -> None:
        self.remove()
        self.end_batch(None)

    @override
    @torch.no_grad()
    def _note(self, name: str, value: Any, *, is_output: bool) -> None:
        flags = [~local_part(tensor).isfinite().all() for tensor in floating_tensors(value)]
        if flags:
            self._events.append((name, is_output, torch.stack(flags).any()))

    def end_batch(self, number: int | None) -> None:
        """Look through the events of a micro-batch; None: of a stage whose micro-batch is not known."""
        events, self._events = self._events, []
        if self.place is not None or not events:
            return
        flags = torch.stack([flag for _, _, flag in events]).tolist()
        for (name, is_output, _), is_bad in zip(events, flags, strict=True):
            if is_bad:
                self.place = {"micro_batch": number} | self._described(name, is_output=is_output)
                return

    def _described(self, name: str, *, is_output: bool) -> dict[str, Any]:
        if not is_output and not name:
            return {"where": "inputs", "module": None}
        if not is_output:  # computed by the code of the module that contains it, before it
            parent = name.rpartition(".")[0]
            return {"where": "before", "module": parent, "class": self._class(parent), "before": name}
        parameters = self._modules[name].parameters()
        finite = all(bool(local_part(value.detach()).isfinite().all()) for value in parameters)
        return {"where": "output", "module": name, "class": self._class(name), "has_finite_weights": finite}

    def _class(self, name: str) -> str:
        return type(self._modules[name]).__name__


def floating_tensors(value: Any) -> Iterator[Tensor]:
    """Yield the floating-point tensors of a structure, in its order."""
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, dict):
        for part in value.values():
            yield from floating_tensors(part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from floating_tensors(part)
