"""One optimizer step. The training loop and the batch-size search both call ``train_step``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from hpc_train.training.datasets.types import Batch
from hpc_train.training.non_finite import Guard
from hpc_train.training.strategies.base import Forward
from hpc_train.training.train_state import TrainState


@dataclass(frozen=True)
class StepResult:
    """The numbers of one step; tensors are on the device, shape ()."""

    #: The file's rate; under ``layer_decay`` parameters may have lower rates.
    learning_rate: float
    #: This rank's weighted part of the mean loss.
    loss: Tensor
    #: Before clipping; None if it is not needed.
    grad_norm: Tensor | None
    #: True if the guard allowed the weights to change.
    is_allowed: bool


class StepObserver:
    """Receives the results of a rank's steps as they are computed; every method does nothing here.

    Tensors are on the device, and an observer of training must not wait for them. The methods are called on
    all ranks, so they may be collective.
    """

    def step_begun(self, step: int, batches: Sequence[Batch], forward: Forward) -> None:
        """Called before the first forward, once the ranks share buffers and ``loss_factor`` is set."""

    def loss_computed(self, batch: Batch, loss: Tensor) -> None:
        """Called with the mean loss of a micro-batch, shape (), on ranks that own the loss."""

    def gradients_ready(self, step: int, batches: Sequence[Batch], forward: Forward) -> None:
        """Called after the last backward, before the gradients are clipped."""

    def step_done(self, step: int, batches: Sequence[Batch], result: StepResult) -> None:
        """Called at the end of each step, once the weights have changed."""


def train_step(
    state: TrainState,
    step: int,
    batches: Sequence[Batch],
    forward: Forward,
    guard: Guard,
    max_norm: float | None,
    before_update: Callable[[], None] = lambda: None,
    observers: Sequence[StepObserver] = (),
) -> StepResult:
    """Train step ``step``, counted from 0, on this rank's micro-batches. Collective.

    ``before_update`` is called between backward and the optimizer step, which changes the weights.
    ``observers``: called in their order; ``forward`` calls ``loss_computed``.
    """
    strategy, optimization, ema = state.strategy, state.optimization, state.ema
    learning_rate = optimization.set_learning_rate(step)
    strategy.share_buffers(all_persistent=False)
    guard.before_step()
    batches = forward.with_loss_factors(batches, owns_loss=strategy.owns_loss)
    for observer in observers:
        observer.step_begun(step, batches, forward)
    loss = strategy.accumulate(batches, forward)  # forward and backward of each micro-batch
    before_update()
    optimization.unscale_gradients()
    for observer in observers:
        observer.gradients_ready(step, batches, forward)
    grad_norm = guard.clip(strategy.clip_gradients, max_norm)
    is_allowed = guard.allows(loss, grad_norm, step)
    optimization.step(is_allowed=is_allowed)
    optimization.zero_grad()  # here, not first, so that evaluation and saves can use the gradients' memory
    if is_allowed:
        strategy.weights_changed()
        if ema is not None:
            ema.update()
    result = StepResult(learning_rate, loss, grad_norm, is_allowed)
    for observer in observers:
        observer.step_done(step, batches, result)
    return result
