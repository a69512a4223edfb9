"""What a training script of your own imports to stop, save and resume exactly under ``hpc-train submit``.

    from hpc_train import session

    start = session.load_state(model=model, optimizer=optimizer)
    for step in range(start + 1, steps + 1):
        loss = train(batch(step))
        session.log(step, loss=loss)
        if session.end_step(step, steps):
            break

Scripts that write their files themselves use ``should_stop``, ``checkpoint`` and ``latest`` instead of
``load_state`` and ``end_step``.

Without hpc-train's launcher the script runs as before: nothing is sent anywhere, checkpoints are folders
below ``./checkpoints``, and SIGTERM makes ``should_stop`` true. Steps count from 1: the number of steps done.

Functions marked collective are called by all ranks, in the same order with the same step. Ranks are counted
by the variables ``RANK`` and ``WORLD_SIZE``. Importing this package imports neither torch nor anything else
that takes time.
"""

from __future__ import annotations

import atexit
import functools
import json
import math
import operator
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence, Sized
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from types import FrameType

    from hpc_train.run.early_stopping import Selection
    from hpc_train.session.positions import PositionedSampler
    from hpc_train.session.storage import Saving
    from hpc_train.training.distributed.shared_flags import SharedFlags

__all__ = [
    "checkpoint",
    "end_step",
    "heartbeat",
    "latest",
    "load_state",
    "log",
    "metric",
    "progress",
    "sampler",
    "save_state",
    "should_stop",
]

#: Between two writes to the file of messages, or changes of its time: on a network disk each takes a request.
_BEAT_S = 0.5
#: Seconds between saves of ``end_step`` by default.
_SAVE_EVERY_S = 600.0
#: Columns of each row; ``epoch`` may be set.
_COLUMNS = frozenset({"step", "time", "attempt", "split"})
#: Flags that ranks exchange.
_STOP, _SAVE, _BEST, _FINISHED = 1, 2, 4, 8
_NUM_FLAGS = 4


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
        #: ``checkpoint`` and ``early_stopping`` of the file.
        self.settings: dict[str, Any] = json.loads(os.environ.get("HPC_TRAIN_SESSION") or "{}")
        self.is_stopping = False
        #: ``early_stopping`` has ended the run; the same on all ranks.
        self.is_finished = False
        #: Step of an evaluation that is the best so far, which ``end_step`` saves.
        self.best_step = -1
        #: What ``load_state`` has restored, and ``end_step`` saves.
        self.objects: dict[str, Any] | None = None
        #: Signal → our handler.
        self._handlers: dict[int, Any] = {}
        #: How ranks exchange flags: in shared memory on one node, else over a group of gloo. See ``_begin``.
        self._shared: SharedFlags | None = None
        self._group: Any = None
        self._exchange: tuple[Any, Any] | None = None
        self._selection: Selection | None = None
        self._saving: Saving | None = None
        self.saved_at = time.monotonic()
        self._messages: Any = None
        #: Rows that have not been written yet: time, step, split, metrics; and the newest progress.
        self._rows: list[tuple[float, int, str, dict[str, float]]] = []
        self._progress: tuple[int, int] | None = None
        self._lock = threading.Lock()
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

    # Decisions of all ranks.

    def all_flags(self, *, may_save: bool = False) -> int:
        """Return the flags that any rank had set at the previous call; alone, in this one. Collective."""
        flags = _STOP if self.is_stopping else 0
        if self.ranks == 1:
            return flags | self._save_flag(may_save=may_save)
        agreed = self._wait()
        if agreed & _SAVE:
            self.saved_at = time.monotonic()
        self._begin(flags | self._save_flag(may_save=may_save))
        return agreed

    def _save_flag(self, *, may_save: bool) -> int:
        """Return the flag of a save that is due by this rank's clock; only rank 0's counts."""
        every_s = self.settings.get("every_s", _SAVE_EVERY_S) if may_save and self.rank == 0 else None
        return _SAVE if every_s is not None and time.monotonic() - self.saved_at >= every_s else 0

    def _begin(self, flags: int) -> None:
        """Publish this rank's flags, one bit each, without waiting for others."""
        if self._group is None:
            self._join()
        if self._shared is not None:
            self._shared.write(flags)
            self._exchange = (None, None)
            return
        import torch
        import torch.distributed as dist

        counts = torch.tensor([flags >> place & 1 for place in range(_NUM_FLAGS)])
        work = dist.all_reduce(counts, dist.ReduceOp.MAX, group=self._group, async_op=True)
        self._exchange = (counts, work)

    def _wait(self) -> int:
        """Return the flags that any rank has set at the last ``_begin``; 0 if they have been read."""
        if self._exchange is None:
            return 0
        (counts, work), self._exchange = self._exchange, None
        if self._shared is not None:
            numbers = self._shared.wait()
            return functools.reduce(operator.or_, numbers)
        work.wait()
        return sum(int(count) << place for place, count in enumerate(counts.tolist()))

    def _join(self) -> None:
        import torch.distributed as dist

        from hpc_train.training.distributed.shared_flags import open_shared_flags

        if not dist.is_initialized():
            raise RuntimeError("session: initialize torch.distributed first: ranks must agree")
        # Longer than rank 0 evaluates alone. The watchdog ends a hang earlier.
        self._group = dist.new_group(backend="gloo", timeout=timedelta(days=7))
        if _number("LOCAL_WORLD_SIZE", 0) == self.ranks:
            self._shared = open_shared_flags(self.rank, self.ranks, self._group, math.inf)

    def decide(self, step: int, metrics: dict[str, float]) -> None:
        """Follow ``checkpoint.best`` and ``early_stopping``. Collective; rank 0's metrics count."""
        if not (self.settings.get("best") or self.settings.get("early_stopping")):
            return
        flags = 0
        if self.rank == 0:
            is_best, is_last = self.selection.add(step, metrics)
            flags = _BEST * is_best | _FINISHED * is_last
        if self.ranks > 1:  # at once: the decision is on the weights of this step
            self.is_stopping |= bool(self._wait() & _STOP)
            self._begin(flags)
            flags = self._wait()
        self.is_finished |= bool(flags & _FINISHED)
        if flags & _BEST:
            self.best_step = step

    @property
    def selection(self) -> Selection:
        if self._selection is None:
            from hpc_train.run.early_stopping import Selection

            self._selection = Selection(self.settings, self.run)
        return self._selection

    def has_ended(self, step: int) -> None:
        """Record that the script is about to end, and why."""
        self.send("finished" if self.is_finished else "stopping", step, self.selection.reason)

    # Messages to the supervisor of this rank: lists in JSON, which begin with their kind.

    def send(self, *message: Any) -> None:
        """Write a message; nothing without a supervisor."""
        file = self._file()
        if file is None or file.closed:
            return
        with self._lock:
            rows, self._rows = self._rows, []
            progress, self._progress = self._progress, None
            lines: list[Sequence[Any]] = [["rows", rows]] if rows else []
            lines += [["progress", *progress]] if progress else []
            lines += [message] if message else []
            if lines:
                file.write("".join(f"{json.dumps(line)}\n" for line in lines))
                file.flush()
            else:
                with suppress(OSError):
                    os.utime(file.fileno())

    def beat(self) -> None:
        """Write waiting rows, or change the time of the file of messages, twice per second at most."""
        at = time.monotonic()
        if at - self._beat_at >= _BEAT_S:
            self._beat_at = at
            self.send()

    def add_row(self, step: int, split: str, metrics: dict[str, float]) -> None:
        """Add a row. It is written with others: a message takes longer than the step of a small model."""
        if self.run is not None:
            self._rows.append((time.time(), step, split, metrics))
            self.beat()

    def add_progress(self, step: int, total: int) -> None:
        """Set the newest progress."""
        if self.run is not None:
            self._progress = (step, total)
            self.beat()

    def _file(self) -> Any:
        if self.run is not None and self._messages is None:
            path = self.run / "attempts" / str(self.attempt) / f"rank-{self.rank}.session"
            self._messages = path.open("a", encoding="utf-8")
            atexit.register(self.send)
        return self._messages

    # Checkpoints.

    @property
    def saving(self) -> Saving:
        if self._saving is None:
            from hpc_train.session.storage import Saving

            self._saving = Saving(
                self.run, self.attempt, self.rank, self.ranks, self.settings.get("keep"), heartbeat
            )
        return self._saving

    def resumed_from(self, folder: Path | None) -> Path | None:
        """Continue to follow the metrics as of the checkpoint, on all ranks."""
        if folder is not None:
            self.selection.restore(json.loads((folder / "state.json").read_text("utf-8")))
            self.is_finished = self.selection.reason is not None
        return folder


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


def load_state(**objects: Any) -> int:
    """Restore the objects from the newest intact checkpoint; return its step, 0 if there is none. Collective.

    Objects have ``state_dict`` and ``load_state_dict`` (modules, optimizers, schedulers, scalers, the sampler
    of ``session.sampler``), are a ``torch.Generator``, or a dict or list of plain values, which is changed in
    place. They are the same on all ranks: rank 0 saves them. The state of the random number generators of
    Python, NumPy and torch is restored on each rank; ranks beyond those of the checkpoint derive theirs from
    its step. Wrappers of DDP and ``torch.compile`` may differ from the time of the save.

    Call it once, when everything is built, before the first step. ``end_step`` and ``save_state`` save the
    same objects. Raises TypeError for an object that can't be saved, such as one of FSDP, and BadFileError if
    the checkpoint lacks one.
    """
    from hpc_train.session.objects import check, restore

    check(objects)
    _session.objects = objects
    folder = latest()
    return 0 if folder is None else restore(folder, objects, _session.rank)


def save_state(step: int, **objects: Any) -> None:
    """Save the objects of ``load_state``, or those given, after ``step`` steps. Collective.

    Copies them to memory; a thread writes, syncs and commits the checkpoint. The next save, the end of the
    script and ``end_step``, if it returns True, wait for it. Raises the error of an earlier save that failed.
    """
    from hpc_train.session.objects import check

    check(objects)
    saved = objects or _session.objects
    if not saved:
        raise RuntimeError("session.save_state: call session.load_state(model=…, optimizer=…) first")
    _session.saving.wait()
    _session.send()  # the supervisor has the rows when it learns of the checkpoint
    _session.saved_at = time.monotonic()
    _session.saving.start(step, saved, _session.selection.state(), lambda: _session.send("saved", step))


def end_step(step: int, total: int | None = None, *, save_every: int | None = None) -> bool:
    """Call it after each step: save if it is due, and return True if the script is to end. Collective.

    ``step``: the steps done; ``total``: the steps of the whole training, for ``hpc-train status``; the last
    one is saved. ``save_every``: steps between saves, if the file has neither ``checkpoint.every_steps`` nor
    ``checkpoint.every_min``; by default 10 minutes. It also saves after the best ``session.metric`` so far
    (``checkpoint.best``). Returns the value of ``should_stop``; if it is true the checkpoint is on disk.
    """
    session = _session
    if session.objects is None:
        raise RuntimeError("session.end_step: call session.load_state(model=…, optimizer=…) before the loop")
    if total is not None and session.rank == 0:
        session.add_progress(step, total)
    every = session.settings.get("every_steps") or ("every_s" not in session.settings and save_every) or None
    session.handle_signals()
    session.beat()
    if session._saving is not None:
        session._saving.raise_failure()
    flags = session.all_flags(may_save=every is None or "every_s" in session.settings)
    stops = bool(flags & _STOP) or session.is_finished
    is_due = flags & _SAVE or session.best_step == step or (every is not None and step % every == 0)
    if stops or is_due or step == total:
        save_state(step)
    if stops or step == total:
        session.saving.wait()
    if stops:
        session.has_ended(step)
    return stops


def should_stop(step: int) -> bool:
    """Return True if the script is to save and end: after SIGTERM or the time limit's warning. Collective.

    Also after ``early_stopping``, which ``session.metric`` follows. ``step``: the steps done. On several
    ranks it needs an initialized ``torch.distributed``; a signal then counts from the next call on, on all
    ranks at the same step. Call it in the main thread.
    """
    _session.handle_signals()
    _session.beat()
    stops = bool(_session.all_flags() & _STOP) or _session.is_finished
    if stops:
        _session.has_ended(step)
    return stops


def heartbeat() -> None:
    """Tell the watchdog that this rank makes progress; other functions of each step do so too."""
    _session.beat()


def log(step: int, /, *, split: str = "train", **metrics: float) -> None:
    """Record metrics after ``step`` steps, in the run's ``metrics.jsonl``. Only rank 0's are recorded.

    ``split``: ``train`` or ``val``; ``compare``, ``report`` and searches read both. The decision on the best
    checkpoint and early stopping reads ``session.metric``. Raises ValueError for the name of a column.
    """
    if _session.rank == 0:
        if metrics.keys() & _COLUMNS:
            name = min(metrics.keys() & _COLUMNS)
            raise ValueError(f"session.log: {name} is a column of every row; choose another name")
        _session.add_row(step, split, {name: float(value) for name, value in metrics.items()})


def metric(step: int, /, **values: float) -> None:
    """Record an evaluation after ``step`` steps: a row of ``val`` that decides. Collective; rank 0's counts.

    ``checkpoint.best`` and ``early_stopping`` of the file follow one of the values, and ``sweep.search``
    may. Call it before ``end_step`` or ``should_stop`` of the same step. Raises ValueError if the value that
    the file names is missing.
    """
    log(step, split="val", **values)
    _session.decide(step, values)


def progress(step: int, total: int) -> None:
    """Show that ``step`` of ``total`` steps are done, in ``hpc-train status``."""
    if _session.rank == 0:
        _session.add_progress(step, total)


@contextmanager
def checkpoint(step: int) -> Iterator[Path]:
    """Yield a folder into which all ranks write what they like; commit it when all have left. Collective.

    The files are hashed and synced to disk, then the folder gets its name: a checkpoint is complete or does
    not exist. Older ones are removed, except the newest ``checkpoint.keep`` of the file (default: 3) and the
    best. If a rank raises within it, nothing is committed. Blocks until the checkpoint is committed.
    """
    saving = _session.saving
    saving.wait()
    yield saving.begin(step)
    saving.commit(step, _session.selection.state())
    _session.send("saved", step)


def latest() -> Path | None:
    """Return the folder of the newest intact checkpoint; None if there is none. Collective.

    Rank 0 reads all files again and compares their hashes; a damaged checkpoint is set aside.
    """
    return _session.resumed_from(_session.saving.latest())


def sampler(
    dataset: Sized, *, global_batch_size: int, step: int = 0, seed: int = 0, shuffle: bool = True
) -> PositionedSampler:
    """Return a sampler of this rank's indices that begins at ``step``, for any number of ranks.

    A sampler for ``torch.utils.data.DataLoader``, and an object for ``load_state``, which sets its step. Each
    pass over it is an epoch of ``len(dataset) // global_batch_size`` steps; the rest is skipped. Begin with
    ``sampler.epoch``; ``set_epoch(epoch)`` chooses another one, as of ``DistributedSampler``.
    ``global_batch_size``: samples per step of all ranks. The samples of a step are the same on any number of
    ranks that divides it; each rank gets ``global_batch_size // ranks`` of them in turn. Raises ValueError if
    it does not divide it.
    """
    from hpc_train.session.positions import PositionedSampler

    return PositionedSampler(
        len(dataset), global_batch_size, _session.rank, _session.ranks, step=step, seed=seed, shuffle=shuffle
    )
