"""Handles losses and gradients that are NaN or infinite: ``optimization.on_non_finite``.

``training.build`` creates one ``Guard`` on every rank. Under ``stop`` nothing waits for the device; ``skip``
and ``rollback`` need the result before the weights change, so they wait for the device once per step.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hpc_train.errors import FINITE_REMEDY, NonFiniteError, counted
from hpc_train.experiment.config.training_sections import OptimizationConfig
from hpc_train.training.distributed.device import HostCopy
from hpc_train.training.strategies.buffers import Buffers


class RollbackError(Exception):
    """All ranks go back to the newest checkpoint and skip the data of ``step``.

    ``training.build`` catches it.
    """

    def __init__(self, step: int) -> None:
        super().__init__(f"step {step + 1} has a loss or gradient that is NaN or infinite")
        self.step = step


class FiniteWatch:
    """Records whether any number passed to ``look`` is NaN or infinite, without waiting for the device."""

    def __init__(self) -> None:
        self._has_seen = False
        self._under_way: deque[HostCopy] = deque()

    def look(self, number: Tensor) -> None:
        """Add a number, shape ()."""
        if number.device.type == "cpu":
            self._has_seen |= not math.isfinite(number.item())
        else:
            self._under_way.append(HostCopy(number.isfinite()))

    @property
    def has_seen(self) -> bool:
        """True if a number that has reached the host is not finite."""
        while self._under_way and self._under_way[0].is_ready:
            self._has_seen |= not self._under_way.popleft().tensors()[0].item()
        return self._has_seen


class Guard:
    """Checks one rank's steps. ``skips``: number of steps that the run has skipped, in earlier attempts too.

    ``norm_counts``: also check the gradients' norm; under fp16 the loss scale handles infinite gradients.
    """

    def __init__(
        self, config: OptimizationConfig, model: nn.Module, *, norm_counts: bool, skips: int = 0
    ) -> None:
        self.policy = config.on_non_finite
        self.skips = skips
        self._most = config.max_non_finite
        self._norm_counts = norm_counts
        self._watch = FiniteWatch()
        # A forward with NaN also corrupts BatchNorm's statistics.
        self._buffers = Buffers(model) if self.policy == "skip" else None
        self._kept: list[Tensor] = []

    @property
    def needs_norm(self) -> bool:
        """True if the gradients' norm is checked, clipped or not."""
        return self.policy != "stop" and self._norm_counts

    @property
    def has_seen(self) -> bool:
        """True if this rank has had a loss that is not finite. Under ``stop`` only."""
        return self._watch.has_seen

    def before_step(self) -> None:
        """Copy the buffers under ``skip``, so that ``after_skip`` can restore them."""
        if self._buffers is not None:
            self._kept = self._buffers.copies()

    def allows(self, loss: Tensor, norm: Tensor | None) -> bool:
        """Return True if the step's gradients may change the weights; the same on all ranks.

        ``loss``: this rank's part, shape (); ``norm``: the gradients' norm, the same on all ranks. Under
        ``skip`` and ``rollback`` it is collective and waits for the device.
        """
        if self.policy == "stop":
            self._watch.look(loss)
            return True
        numbers = [loss.isfinite()]
        if norm is not None and self._norm_counts:
            numbers.append(norm.isfinite())
        are_finite = torch.stack(numbers).all().to(torch.int32)
        dist.all_reduce(are_finite, op=dist.ReduceOp.MIN)
        return bool(are_finite.item())

    def after_skip(self, step: int) -> None:
        """Count a step that ``allows`` refused under ``skip``. Raises NonFiniteError above the maximum."""
        if self._buffers is not None:
            self._buffers.put_back(self._kept)
        self.skips += 1
        if self.skips > self._most:
            raise NonFiniteError(
                f"a loss or gradient is NaN or infinite at step {step}, {counted(self.skips, 'time')} "
                f"so far; optimization.max_non_finite allows {self._most}: {FINITE_REMEDY}",
                step=step,
            )

    def clip(self, clip_gradients: Callable[[float], Tensor], max_norm: float | None) -> Tensor | None:
        """Clip if ``max_norm`` is set; return the norm if it is clipped or checked."""
        if max_norm is None and not self.needs_norm:
            return None
        return clip_gradients(math.inf if max_norm is None else max_norm)


class NoGuard(Guard):
    """Allows every step; not collective. For a step on a sample, and for one without data."""

    def before_step(self) -> None:
        """Do nothing."""

    def allows(self, loss: Tensor, norm: Tensor | None) -> bool:
        """Return True."""
        return True


def seen_error(step: int) -> NonFiniteError:
    """Return the error that all ranks raise under ``stop`` once a rank has had such a loss."""
    return NonFiniteError(
        f"the train loss is NaN or infinite on a rank, at step {step} or just before; {FINITE_REMEDY}",
        step=step,
    )


def check_evaluation(step: int, metrics: dict[str, float]) -> None:
    """Raise NonFiniteError if the validation loss is not finite; ``metrics`` are the same on all ranks."""
    loss = metrics.get("loss", 0.0)
    if not math.isfinite(loss):
        raise NonFiniteError(f"the val loss is {loss} at step {step}; {FINITE_REMEDY}")


def check_rollbacks(skipped: tuple[int, ...], config: OptimizationConfig, step: int | None = None) -> None:
    """Raise NonFiniteError if more windows are skipped than the file allows. ``step``: of the last one."""
    if len(skipped) > config.max_non_finite:
        raise NonFiniteError(
            f"a loss or gradient was NaN or infinite {counted(len(skipped), 'time')}; "
            f"optimization.max_non_finite allows {config.max_non_finite} rollbacks: {FINITE_REMEDY}",
            step=step,
        )
