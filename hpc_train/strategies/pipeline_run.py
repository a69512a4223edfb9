"""A step of a pipeline: torch.distributed.pipelining's schedule over the micro-batches of a rank's slots.

Made by ``pipeline`` and ``split``. Legend: R data-parallel ranks, M micro-batches of a step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B

from hpc_train.datasets.types import Batch
from hpc_train.strategies.base import Forward
from hpc_train.strategies.buffers import buffers_kept
from hpc_train.strategies.running_statistics import RunningStatistics


class Run:
    """A schedule, and the step that it runs: the batches and the sum of their losses."""

    def __init__(
        self, stages: list[MicroBatchStage], schedule: type[Any], in_flight: int, data_ranks: int
    ) -> None:
        """``in_flight``: micro-batches that the schedule runs at a time."""
        self._in_flight = in_flight
        self._data_ranks = data_ranks
        self._batches: Sequence[Batch] = ()
        self._forward: Forward
        self._first = 0
        self._device = stages[0].device
        self._kept = ExitStack()
        self._has_last = any(stage.is_last for stage in stages)
        for stage in stages:
            stage.run = self
        # A schedule of one stage takes the stage itself.
        is_multi = issubclass(schedule, ScheduleInterleaved1F1B)
        self._schedule = schedule(
            stages if is_multi else stages[0], in_flight, loss_fn=self._scaled_loss, scale_grads=False
        )

    def step(self, batches: Sequence[Batch], forward: Forward) -> Tensor:
        """Run all micro-batches forward and backward; return the weighted sum of losses, 0 without losses."""
        self._batches, self._forward = batches, forward
        self._total = torch.zeros((), dtype=torch.float64, device=self._device)
        targets = {"target": torch.arange(self._in_flight)} if self._has_last else {}
        with self._kept:
            for first in range(0, len(batches), self._in_flight):
                self._first = first
                self._schedule.step(return_outputs=False, **targets)
        self._batches = ()
        return self._total

    @property
    def is_at_end(self) -> bool:
        """Whether the current micro-batches are the last of the step."""
        return self._first + self._in_flight >= len(self._batches)

    @contextmanager
    def begun(self, chunk: int, stage: MicroBatchStage) -> Iterator[Batch]:
        """Enter the context of a stage's forward; yield the batch."""
        slot = self._first + chunk
        batch = self._batches[slot]
        is_spare = batch.weight == 0
        if is_spare:
            # Until the end of the step, because a checkpointed forward is repeated in backward. It is the
            # last slot.
            self._kept.enter_context(buffers_kept(stage.submod))
        statistics = stage.statistics.micro_batch(slot, is_spare=is_spare)
        with statistics, self._forward.begin(batch, stage.stage_index):
            yield self._forward.to_input(batch) if stage.is_first else batch

    def _scaled_loss(self, outputs: Any, chunk: Tensor) -> Tensor:
        batch = self._batches[self._first + _number(chunk)]
        loss = self._forward.loss_of(outputs, batch)
        self._total += loss.detach() * batch.weight
        # fully_shard divides by R, but the result must be the mean over M micro-batches.
        return self._forward.scale(loss * (batch.weight * self._data_ranks))


class MicroBatchStage(PipelineStage):
    """torch's stage, whose micro-batches (torch: chunks) run in the context of the training loop."""

    run: Run

    def __init__(self, *args: Any, statistics: RunningStatistics, **keys: Any) -> None:
        super().__init__(*args, **keys)
        self.statistics = statistics

    def forward_one_chunk(
        self,
        fwd_chunk_id: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None = None,
        save_forward_output: bool = True,
    ) -> Any:
        """Run a micro-batch within ``Run.begun``; raise the errors of its forward unwrapped."""
        with self.run.begun(fwd_chunk_id, self) as batch:
            if self.is_first:
                # Contiguous, as the stages expect: torch compares the layout under debug level DETAIL.
                args = (batch.inputs.contiguous(),)
            try:
                return super().forward_one_chunk(fwd_chunk_id, args, kwargs, save_forward_output)
            except RuntimeError as error:
                if error.__cause__ is None:
                    raise
                cause = error.__cause__
            # torch wraps errors of a forward, and hides the message for the user.
            raise cause

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """Reduce the gradients only after the step's last micro-batches."""
        if self.run.is_at_end:
            super().perform_reduce_grad(grad_scale_factor)


def _number(chunk: Tensor) -> int:
    """Return the micro-batch index in a chunk of ``arange``: its value, or its offset for a fake tensor."""
    return int(chunk.storage_offset() if isinstance(chunk, FakeTensor) else chunk)
