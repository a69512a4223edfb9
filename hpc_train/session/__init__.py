"""What a training script of your own imports to stop, save and resume exactly under ``hpc-train submit``.

    from hpc_train import session

    for step in range(start, steps):
        train(step)
        session.log(step + 1, loss=loss)
        if session.should_stop(step + 1):
            with session.checkpoint(step + 1) as folder:
                torch.save(state, folder / "state.pt")
            break

Without hpc-train's launcher the script runs as before: nothing is sent anywhere, checkpoints are folders
below ``./checkpoints``, and SIGTERM makes ``should_stop`` true. Steps count from 1: the number of steps done.

Functions marked collective are called by all ranks, in the same order with the same step. Ranks are counted
by the variables ``RANK`` and ``WORLD_SIZE``. Importing this package imports neither torch nor anything else
that takes time.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import time
from collections.abc import Iterator, Sized
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from types import FrameType

    from hpc_train.session.storage import Saving

__all__ = ["checkpoint", "heartbeat", "latest", "log", "progress", "sampler", "should_stop"]

#: Between two changes of the file's time: on a network disk each takes a request.
_BEAT_S = 1.0


def _number(name: str, default: int) -> int:
    text = os.environ.get(name, "")
    return int(text) if text.isdecimal() else default


class _Session:
    """The state of this process's session."""

    def __init__(self) -> None:
        run = os.environ.get("HPC_TRAIN_RUN")
        self.attempt = _number("HPC_TRAIN_ATTEMPT", 1)
        self.run = None if run is None else Path(run)
        self.rank, self.ranks = _number("RANK", 0), _number("WORLD_SIZE", 1)
        self.is_stopping = False
        #: Signal → our handler.
        self._handlers: dict[int, Any] = {}
        #: The exchange of the previous call of ``should_stop``: the ranks' flag, and the work to wait for.
        self._exchange: tuple[Any, Any] | None = None
        self._group: Any = None
        self._messages: Any = None
        self._beat_at = float("-inf")

    def handle_signals(self) -> None:
        """Record SIGTERM and SIGUSR2 instead of ending; another handler of the script is called as well,
        even if it has replaced ours since the previous call.
        """
        for number in (signal.SIGTERM, signal.SIGUSR2):
            before = signal.getsignal(number)
            if number in self._handlers and before is self._handlers[number]:
                continue

            def note(number: int, frame: FrameType | None, before: Any = before) -> None:
                self.is_stopping = True
                if callable(before):
                    before(number, frame)

            with suppress(ValueError):  # not the main thread
                signal.signal(number, note)
                self._handlers[number] = note

    def all_stop(self) -> bool:
        """Return True if a rank had received a signal at the previous call. Collective."""
        if self.ranks == 1:
            return self.is_stopping
        import torch
        import torch.distributed as dist

        if not dist.is_initialized():
            raise RuntimeError("session.should_stop: initialize torch.distributed first: ranks must agree")
        if self._group is None:
            self._group = dist.new_group(backend="gloo")
        agreed = False
        if self._exchange is not None:
            flag, work = self._exchange
            work.wait()
            agreed = bool(flag.item())
        flag = torch.tensor(int(self.is_stopping))
        # Its result is read at the next call: no rank waits for another within a step.
        self._exchange = (flag, dist.all_reduce(flag, dist.ReduceOp.MAX, group=self._group, async_op=True))
        return agreed

    def send(self, **message: Any) -> None:
        """Pass a message to the supervisor of this rank; nothing without one."""
        if (file := self._file()) is not None:
            file.write(json.dumps(message) + "\n")
            file.flush()

    def beat(self) -> None:
        """Change the time of the file of messages, at most once per second."""
        if time.monotonic() - self._beat_at < _BEAT_S:
            return
        self._beat_at = time.monotonic()
        if (file := self._file()) is not None:
            with suppress(OSError):
                os.utime(file.fileno())

    def _file(self) -> Any:
        if self.run is not None and self._messages is None:
            path = self.run / "attempts" / str(self.attempt) / f"rank-{self.rank}.session"
            self._messages = path.open("a", encoding="utf-8")
        return self._messages

    @property
    def saving(self) -> Saving:
        from hpc_train.session.storage import Saving

        return Saving(self.run, self.attempt, self.rank, self.ranks, heartbeat)


def _kill_instead() -> None:
    from multiprocessing import popen_fork

    popen_fork.Popen.terminate = popen_fork.Popen.kill  # type: ignore[method-assign]


def _block_signals() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGUSR2))


_session = _Session()
if _session.run is not None:
    # Slurm signals all processes of a job: a data loader that SIGTERM ends would fail the script before it
    # has saved. ``terminate`` of a forked process therefore sends SIGKILL.
    os.register_at_fork(before=_kill_instead, after_in_child=_block_signals)


def should_stop(step: int) -> bool:
    """Return True if the script is to save and end: after SIGTERM or the time limit's warning. Collective.

    ``step``: the steps done. On several ranks it needs an initialized ``torch.distributed``; a signal then
    counts from the next call on, on all ranks at the same step. Call it in the main thread.
    """
    _session.handle_signals()
    heartbeat()
    stops = _session.all_stop()
    if stops:
        _session.send(stopping=step)
    return stops


def heartbeat() -> None:
    """Tell the watchdog that this rank makes progress; ``should_stop`` and ``log`` do so too."""
    _session.beat()


def log(step: int, *, split: str = "train", **metrics: float) -> None:
    """Record metrics after ``step`` steps, in the run's ``metrics.jsonl``. Only rank 0's are recorded.

    ``split``: ``train`` or ``val``; ``compare``, ``report`` and searches read both.
    """
    if _session.rank == 0:
        _session.send(step=step, split=split, **{name: float(value) for name, value in metrics.items()})


def progress(step: int, total: int) -> None:
    """Show that ``step`` of ``total`` steps are done, in ``hpc-train status``."""
    if _session.rank == 0:
        _session.send(progress=step, total=total)


@contextmanager
def checkpoint(step: int) -> Iterator[Path]:
    """Yield a folder into which all ranks write what they like; commit it when all have left. Collective.

    The files are hashed and synced to disk, then the folder gets its name: a checkpoint is complete or does
    not exist. Older ones are removed, except the newest three. If a rank raises within it, nothing is
    committed. Blocks until the checkpoint is committed.
    """
    saving = _session.saving
    yield saving.begin(step)
    saving.commit(step)
    _session.send(saved=step)


def latest() -> Path | None:
    """Return the folder of the newest intact checkpoint; None if there is none. Collective.

    Rank 0 reads all files again and compares their hashes; a damaged checkpoint is set aside.
    """
    return _session.saving.latest()


def sampler(
    dataset: Sized, *, global_batch_size: int, step: int = 0, seed: int = 0, shuffle: bool = True
) -> PositionedSampler:
    """Return a sampler of this rank's indices that begins at ``step``, for any number of ranks.

    A sampler for ``torch.utils.data.DataLoader``; call ``set_epoch(epoch)`` before each epoch, as of
    ``DistributedSampler``. An epoch has ``len(dataset) // global_batch_size`` steps; the rest is skipped.
    The samples of a step are the same on any number of ranks that divides ``global_batch_size``; each rank
    gets ``global_batch_size // ranks`` of them in turn. Raises ValueError if it does not divide it.
    """
    return PositionedSampler(
        len(dataset), global_batch_size, _session.rank, _session.ranks, step=step, seed=seed, shuffle=shuffle
    )


class PositionedSampler:
    """Yields one rank's indices of an epoch, from a position on. See ``session.sampler``."""

    def __init__(
        self,
        num_samples: int,
        global_batch_size: int,
        rank: int,
        ranks: int,
        *,
        step: int = 0,
        seed: int = 0,
        shuffle: bool = True,
    ) -> None:
        if global_batch_size % ranks:
            raise ValueError(f"global_batch_size {global_batch_size} is not a multiple of {ranks} ranks")
        if num_samples < global_batch_size:
            raise ValueError(f"{num_samples} samples are fewer than global_batch_size {global_batch_size}")
        self._num_samples, self._batch = num_samples, global_batch_size
        self._rank, self._ranks, self._seed, self._shuffle = rank, ranks, seed, shuffle
        self._start_epoch, self._start_step = divmod(step, self.steps_per_epoch)
        self._epoch = self._start_epoch

    @property
    def steps_per_epoch(self) -> int:
        """Whole batches in an epoch."""
        return self._num_samples // self._batch

    @property
    def epoch(self) -> int:
        """The epoch that the next iteration yields; at first that of ``step``."""
        return self._epoch

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iteration; the first one begins in its middle if ``step`` does."""
        self._epoch = epoch

    def __len__(self) -> int:
        """Return the indices that this rank still gets in the epoch."""
        return (self.steps_per_epoch - self._skipped()) * (self._batch // self._ranks)

    def __iter__(self) -> Iterator[int]:
        order = self._order()
        for step in range(self._skipped(), self.steps_per_epoch):
            yield from order[step * self._batch + self._rank : (step + 1) * self._batch : self._ranks]

    def _skipped(self) -> int:
        return self._start_step if self._epoch == self._start_epoch else 0

    def _order(self) -> list[int]:
        if not self._shuffle:
            return list(range(self._num_samples))
        import torch

        digest = hashlib.sha256(f"{self._seed} {self._epoch}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
        return [int(index) for index in torch.randperm(self._num_samples, generator=generator)]
