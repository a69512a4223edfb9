"""The floating-point operations (FLOPs) of a training step: ``tflops_per_s`` and ``mfu`` in rows of metrics.

Rank 0 counts them once per attempt, for the whole model before it is split, wrapped or compiled, so that the
count does not depend on the strategy and excludes recomputation by activation checkpointing. The count runs
on the meta device, whose tensors have shapes and no values, in a child process.
"""

from __future__ import annotations

import copy
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from hpc_train.loggers.base import Row
from hpc_train.training.datasets.types import Batch
from hpc_train.training.distributed.forking import ForkedCall
from hpc_train.training.tasks.base import Task, mean_loss

#: Namespaces in which operators that torch's counter skips, except ``_PRODUCTS``, are elementwise, reductions
#: or copies: negligible next to matrix products.
_NAMESPACES = ("aten", "prim", "prims", "profiler")
#: Operators of torch that multiply matrices or vectors and that its counter has no formula for.
_PRODUCTS = frozenset({
    "mv", "addmv", "dot", "vdot", "addbmm", "_trilinear", "_cdist_forward", "_int_mm", "_grouped_mm",
    "_scaled_grouped_mm",
})  # fmt: skip
_PRODUCT_PREFIXES = ("linalg_", "_linalg_", "_fft_")
_log = logging.getLogger(__name__)
_MODULE, _FUNCTION = "transformers.masking_utils", "find_packed_sequence_indices"


class UncountedError(Exception):
    """The model runs an operator whose FLOPs are unknown."""


class _KnownOperators(TorchDispatchMode):
    """Raises UncountedError at an operator that torch's counter would wrongly count as 0."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not _is_countable(func):
            raise UncountedError(f"the FLOPs of the operator {func} are unknown")
        return func(*args, **(kwargs or {}))


def _is_countable(operator: Any) -> bool:
    packet = operator.overloadpacket
    if packet in flop_registry:
        return True
    name = packet.__name__
    is_product = name in _PRODUCTS or name.startswith(_PRODUCT_PREFIXES)
    return operator.namespace in _NAMESPACES and not is_product


def count_flops(model: nn.Module, task: Task, batch: Batch) -> int:
    """Return the FLOPs of one forward and backward pass; model and batch are on the meta device.

    Counts matrix products, convolutions and attention; a multiply-add is two operations. Causal attention
    counts in full, as in PaLM (arXiv:2204.02311, appendix B). Raises UncountedError.
    """
    modes = FlopCounterMode(display=False), _KnownOperators(), sdpa_kernel(SDPBackend.MATH)
    with unpacked_sequences(), modes[0] as counter, modes[1], modes[2]:
        mean_loss(task, task.forward(model.train(), batch), batch).backward()
    return int(counter.get_total_flops())


def without_weights(model: nn.Module) -> nn.Module | None:
    """Return a copy of the model on the meta device; None if it can't be copied.

    Allocates nothing and runs no code of the model except its ``__deepcopy__``, if any.
    """
    copies: dict[int, Any] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        empty = torch.empty_like(tensor, device="meta", requires_grad=False)
        is_parameter = isinstance(tensor, nn.Parameter)
        copies[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if is_parameter else empty
    try:
        return copy.deepcopy(model, copies)
    except Exception as error:  # from any attribute of the model
        _log_uncounted(f"the model can't be copied: {error}")
        return None


@dataclass
class FlopCount:
    """The FLOPs per sample, counted in a child process while training continues."""

    #: Of ``without_weights``.
    model: nn.Module
    task: Task
    #: As in training, but to the meta device.
    to_input: Callable[[Batch], Batch]
    _call: ForkedCall | None = None
    _per_sample: float | None = None

    def start(self, batch: Batch) -> None:
        """Count a micro-batch, as the loader yields it. Call before this process's first backward pass."""
        self._call = ForkedCall(lambda: self._count(batch))

    def per_sample(self, within_s: float = 0.0) -> float | None:
        """Return the FLOPs per sample; None if they are unknown, or not known within this time."""
        if self._call is not None and self._call.has_ended(within_s):
            result, self._call = self._call.result(), None
            if isinstance(result, float):
                self._per_sample = result
            else:
                _log_uncounted(result or "the process that counts them died")
        return self._per_sample

    def close(self) -> None:
        """End the child process if it is still counting."""
        if self._call is not None:
            self._call.close()
            self._call = None

    def _count(self, batch: Batch) -> float | str:
        """Return the FLOPs per sample, or why they are unknown. Runs in the child."""
        torch.set_deterministic_debug_mode("default")
        try:
            return count_flops(self.model, self.task, self.to_input(batch)) / len(batch.valid)
        except Exception as error:  # from the code of the model or the task
            first_line = f"{error}".partition("\n")[0]
            return (
                first_line if isinstance(error, UncountedError) else f"{type(error).__name__}: {first_line}"
            )


def _log_uncounted(why: str) -> None:
    _log.info("rows have no tflops_per_s and no mfu: %s", why)


@dataclass(frozen=True)
class FlopRates:
    """Columns of a row about FLOPs: achieved per device, and as a fraction of the device's peak."""

    count: FlopCount
    num_devices: int
    #: At the run's precision; None if it is unknown.
    peak_tflops: float | None = None

    def row(self, samples_per_s: float) -> Row:
        """Return ``tflops_per_s`` and ``mfu``, as far as known, at the sample rate of all ranks."""
        per_sample = self.count.per_sample()
        if per_sample is None:
            return {}
        tflops_per_s = per_sample * samples_per_s / self.num_devices / 1e12
        row: Row = {"tflops_per_s": float(f"{tflops_per_s:.6g}")}
        if self.peak_tflops is not None:
            row["mfu"] = float(f"{tflops_per_s / self.peak_tflops:.4g}")
        return row


@contextmanager
def unpacked_sequences() -> Iterator[None]:
    """Declare that no batch packs several sequences into one row, which transformers 5 detects from
    positions.

    Detection fails on the meta device, and under FakeTensorMode it makes each layer store a mask that no run
    has. The number of matrix products is the same with and without a mask.
    """
    module = sys.modules.get(_MODULE)
    if module is None or not hasattr(module, _FUNCTION):
        yield
        return
    with patch.object(module, _FUNCTION, lambda position_ids: None):
        yield
