"""Reports on training: rows of metrics and ``status.json``, without ever waiting for the device.

Every rank calls ``Meters``; only rank 0 writes.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hpc_train.errors import UserError
from hpc_train.loggers.base import Row
from hpc_train.loggers.metrics_writer import MetricsWriter
from hpc_train.paths import RunPaths
from hpc_train.rank import signals
from hpc_train.run.checkpoints import newest_attempt
from hpc_train.run.run_status import RunStatus, try_status, write_status
from hpc_train.run.storage_errors import storage_error
from hpc_train.training.distributed.device import HostCopy
from hpc_train.training.distributed.timed_call import TimedCall
from hpc_train.training.step_digests import StepDigests
from hpc_train.training.step_times import ForwardTime, StepTimes, Stragglers

_log = logging.getLogger(__name__)

#: Assumed: frequent enough for a person watching, rare enough to cost nothing.
STATUS_EVERY_S = 0.5


class SupersededError(UserError):
    """A later attempt owns the run."""


@dataclass
class _PendingRow:
    """A row whose numbers are still being copied from the device."""

    row: Row
    names: list[str]
    #: The values of ``names``, then the per-rank times.
    values: HostCopy

    def finished(self) -> tuple[Row, list[float]]:
        (copied,), num_own = self.values.tensors(), len(self.names)
        values = copied.tolist()
        return self.row | dict(zip(self.names, values[:num_own], strict=True)), values[num_own:]


class Meters:
    """Collects the results of steps and evaluations. ``metrics_writer`` is None on all ranks except 0."""

    def __init__(
        self,
        attempt: int,
        global_batch_size: int,
        steps_per_epoch: int,
        every_steps: int,
        metrics_writer: MetricsWriter | None,
        times: StepTimes | None = None,
        device: torch.device | None = None,
        digests: StepDigests | None = None,
    ) -> None:
        self.digests = digests
        self.times = times or StepTimes(global_batch_size)
        self.forward_time = ForwardTime(device or torch.device("cpu"))
        self.stragglers = Stragglers()
        self._attempt = attempt
        self._global_batch_size = global_batch_size
        self._steps_per_epoch = steps_per_epoch
        self._every_steps = every_steps
        self._metrics_writer = metrics_writer
        self._pending: deque[_PendingRow] = deque()

    def train_row_is_due(self, step: int) -> bool:
        """Return True if ``step`` has a row of metrics."""
        return step % self._every_steps == 0

    def train_row(
        self,
        step: int,
        lr: float,
        loss: Tensor,
        grad_norm: Tensor | None,
        sums: dict[str, Tensor] | None = None,
    ) -> None:
        """Add one step's numbers. Collective: sums ``loss``, the rank's weighted part, and ``sums`` (over the
        rank's samples; the row has the means) over the ranks. The same reduction gathers the ranks' times.
        """
        times = self.times.row(step)
        names = ["loss", *(sums or {})]
        totals = torch.stack([loss, *(value.to(loss.dtype) for value in (sums or {}).values())])
        of_ranks = self._own_times(times, totals)
        totals = torch.cat([totals, of_ranks])
        dist.all_reduce(totals)
        if self._metrics_writer is None:
            return
        totals, of_ranks = totals[: len(names)], totals[len(names) :]
        totals[1:] /= self._global_batch_size
        values = list(totals)
        if grad_norm is not None:
            names, values = [*names, "grad_norm"], [*values, grad_norm.to(loss.dtype)]
        row = self._head("train", step) | {"lr": lr} | times | peak_memory(loss.device)
        self._pending.append(_PendingRow(row, names, HostCopy(torch.cat([torch.stack(values), of_ranks]))))
        self.drain(wait=False)

    def _own_times(self, times: Row, like: Tensor) -> Tensor:
        """Return the forward times of all ranks, then their waits for data, with only this rank's set."""
        rank, world_size = dist.get_rank(), dist.get_world_size()
        forward_s = self.forward_time.take()
        if world_size == 1:
            return like.new_empty(0)
        times_of_ranks = torch.zeros(2, world_size, dtype=like.dtype, pin_memory=like.is_cuda)
        times_of_ranks[0, rank], times_of_ranks[1, rank] = forward_s, float(times.get("data_wait_s") or 0.0)
        return times_of_ranks.flatten().to(like.device, non_blocking=True)

    def val_row(self, step: int, metrics: dict[str, float]) -> None:
        """Write the row of the evaluation at ``step``, after all earlier rows; only rank 0 writes."""
        self.drain(wait=True)
        if self._metrics_writer is not None:
            self._metrics_writer.write(self._head("val", step) | metrics)

    def has_val_row(self, step: int) -> bool:
        """Return True if the evaluation at ``step`` has its row. On rank 0 only."""
        return self._metrics_writer is not None and self._metrics_writer.metrics.has("val", step)

    def exchange_digests(self) -> None:
        """Exchange the digests of the steps so far, if the file has digests. Collective."""
        if self.digests is not None:
            self.digests.exchange()

    def drain(self, *, wait: bool) -> None:
        """Write the rows and digests whose numbers have arrived, or wait for all of them."""
        if self.digests is not None:
            self.digests.drain(wait=wait)
        while self._pending and (wait or self._pending[0].values.is_ready):
            assert self._metrics_writer is not None
            row, of_ranks = self._pending.popleft().finished()
            self._metrics_writer.write(row)
            if of_ranks and isinstance(step_s := row.get("step_s"), float):
                middle = len(of_ranks) // 2
                self.stragglers.add(of_ranks[:middle], of_ranks[middle:], step_s)

    def sync(self) -> None:
        """Sync written rows and digests to the disk, since a checkpoint relies on them. Any thread."""
        if self._metrics_writer is not None:
            self._metrics_writer.metrics.sync()
        if self.digests is not None:
            self.digests.sync()

    def _head(self, split: str, step: int) -> Row:
        return row_head(self._attempt, split, step, self._steps_per_epoch)


def row_head(attempt: int | None, split: str, step: int, steps_per_epoch: int | None) -> Row:
    """Return the first columns of every row. ``attempt`` and ``steps_per_epoch``: None if unknown."""
    return {
        "time": round(time.time(), 3),
        "attempt": attempt,
        "split": split,
        "step": step,
        "epoch": round(step / steps_per_epoch, 4) if steps_per_epoch else None,
    }


def peak_memory(device: torch.device) -> Row:
    """Return the peak memory of this process's tensors on a GPU so far, in GiB."""
    if device.type != "cuda":
        return {}
    return {"peak_memory_gib": round(torch.cuda.max_memory_allocated(device) / 2**30, 3)}


@dataclass
class StatusWriter:
    """Writes ``status.json`` at most half a second or one step late. Rank 0 of the owning attempt only.

    While the run trains, a thread writes it: all ranks would wait for a slow disk otherwise.
    """

    paths: RunPaths
    attempt: int
    total_steps: int
    steps_per_epoch: int
    stragglers: Stragglers = field(default_factory=Stragglers)
    #: Returns the best evaluation so far.
    best: Callable[[], dict[str, Any] | None] = lambda: None
    _written_at: float = -math.inf
    _step: int = 0
    _compiling: dict[str, Any] | None = None
    #: ``errno`` of the errors that were logged.
    _logged: set[int | None] = field(default_factory=set)
    _in_background: TimedCall[None] = field(default_factory=lambda: TimedCall("status"))
    _superseded: SupersededError | None = None
    #: Numbers of the newest status, and of the newest that was written: one that waits in the thread
    #: must not replace a later one.
    _number: int = 0
    _written_number: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def step_done(self, step: int) -> None:
        """Begin to write the status unless a write began within ``STATUS_EVERY_S`` or is still running.

        Raises SupersededError if an earlier write has found that another attempt owns the run.
        """
        if self._superseded is not None:
            raise self._superseded
        if time.monotonic() - self._written_at < STATUS_EVERY_S or self._in_background.is_under_way:
            return
        number, status = self._next("running", step, None)

        def write() -> None:
            signals.block()  # the training thread handles them
            try:
                self._write(number, status)
            except SupersededError as error:
                self._superseded = error

        self._in_background.do(write, limit_s=0)

    def compiles(self, graph: int, earlier_s: float) -> None:
        """Show that torch compiles graph number ``graph``, after ``earlier_s`` for earlier graphs; 0: none.

        May be called from any thread while no other method of this class runs.
        """
        since = datetime.now(UTC) - timedelta(seconds=earlier_s)
        self._compiling = {"graph": graph, "since": since.isoformat(timespec="seconds")} if graph else None
        with suppress(SupersededError):  # the next step raises it outside the compiler
            self.write("running", self._step)

    def write(self, state: str, step: int, reason: str | None = None) -> None:
        """Write the run's status. Raises SupersededError if another attempt owns the run.

        A failed write is ignored, since the next status replaces it. Only ``completed`` is the last, so it is
        retried and raises StorageError or TransientStorageError.
        """
        self._write(*self._next(state, step, reason))

    def _next(self, state: str, step: int, reason: str | None) -> tuple[int, RunStatus]:
        """Return the number of a new status and the status."""
        self._written_at, self._step = time.monotonic(), step
        self._number += 1
        return self._number, RunStatus(
            state=state,
            step=step,
            total_steps=self.total_steps,
            epoch=round(step / self.steps_per_epoch, 4),
            attempt=self.attempt,
            reason=reason,
            compiling=self._compiling,
            slow_ranks=self.stragglers.slow(),
            best=self.best(),
        )

    def _write(self, number: int, status: RunStatus) -> None:
        is_last = status.state == "completed"
        try:
            with self._lock:
                if number > self._written_number:
                    self._put(status, write_status if is_last else try_status)
                    self._written_number = number
        except OSError as error:
            if is_last:
                raise storage_error(error, self.paths.status) from error
            if error.errno not in self._logged:
                self._logged.add(error.errno)
                _log.warning("%s can't be written now (%s); training continues", self.paths.status, error)

    def _put(self, status: RunStatus, put: Callable[[RunPaths, RunStatus], None]) -> None:
        if newest_attempt(self.paths) > self.attempt:
            raise SupersededError(
                f"another attempt continues this run; attempt {self.attempt} ends: its node was given up"
            )
        if not self.paths.cancelled.exists() or status.state == "completed":
            put(self.paths, status)  # otherwise the cancelling command writes it
