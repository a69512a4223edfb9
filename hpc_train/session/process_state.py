"""The state of a script's session: signals, flags that ranks exchange, messages to the supervisor."""

from __future__ import annotations

import atexit
import functools
import json
import math
import operator
import os
import signal
import sys
import threading
import time

# signal.getsignal also looks for an enum: 5 µs of each step.
from _signal import getsignal  # type: ignore[import-not-found]
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from types import FrameType

    from hpc_train.run.early_stopping import Selection
    from hpc_train.session.storage import Saving
    from hpc_train.training.distributed.shared_flags import SharedFlags

#: Between two writes to the file of messages, or changes of its time: on a network disk each takes a request.
_BEAT_S = 0.5
#: Seconds between saves of ``end_step`` by default.
_SAVE_EVERY_S = 600.0
#: Flags that ranks exchange.
STOP, SAVE, _BEST, _FINISHED = 1, 2, 4, 8
_NUM_FLAGS = 4


def _number(name: str, default: int) -> int:
    text = os.environ.get(name, "")
    return int(text) if text.isdecimal() else default


class SessionState:
    """The session of this process: received signals, decisions of all ranks, rows that wait to be written."""

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
        #: The checkpoint of ``load_state``, if early stopping had ended the run when it was saved. Nothing
        #: counts any more: ``end_step`` restores it and ends the script, which was killed before it could.
        self.ended_in: Path | None = None
        #: Signal → our handler.
        self._handlers: dict[int, Any] = {}
        #: How ranks exchange flags: in shared memory on one node, else over a group of gloo. See ``_begin``.
        self._shared: SharedFlags | None = None
        self._group: Any = None
        self._exchange: tuple[Any, Any] | None = None
        #: Flags of an exchange that ``decide`` has ended, for the next ``all_flags``.
        self._agreed = 0
        self._selection: Selection | None = None
        self._saving: Saving | None = None
        self.saved_at = time.monotonic()
        self._messages: Any = None
        #: Rows that have not been written yet: time, step, split, metrics; and the newest progress. The
        #: thread of a save writes them, too.
        self._rows: list[tuple[float, int, str, dict[str, float]]] = []
        self._progress: tuple[int, int] | None = None
        self._lock = threading.RLock()  # a handler of a signal may log
        self._beat_at = float("-inf")

    def handle_signals(self) -> None:
        """Record SIGTERM and SIGUSR2 instead of ending; another handler of the script is called as well,
        even if it has replaced ours since the previous call.
        """
        for number in (signal.SIGTERM, signal.SIGUSR2):
            before = getsignal(number)
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
        self._check_ranks()
        flags = STOP if self.is_stopping else 0
        if self.ranks == 1:
            return flags | self._save_flag(may_save=may_save)
        agreed, self._agreed = self._agreed | self._wait(), 0
        if agreed & SAVE:
            self.saved_at = time.monotonic()
        self._begin(flags | self._save_flag(may_save=may_save))
        return agreed

    def set_ranks(self, rank: int, ranks: int) -> None:
        """Replace the ranks of the environment by those of a library that starts ranks by itself."""
        if (rank, ranks) != (self.rank, self.ranks):
            self.rank, self.ranks, self._saving = rank, ranks, None

    def _check_ranks(self) -> None:
        """Raise RuntimeError if ``torch.distributed`` has other ranks than the environment at the import.

        Each of them would be rank 0 of its own session, and overwrite the checkpoints of the others.
        """
        dist = sys.modules.get("torch.distributed")
        if dist is None or not dist.is_available() or not dist.is_initialized():
            return
        if (there := dist.get_world_size()) != self.ranks:
            raise RuntimeError(
                f"session: torch.distributed has {there} ranks, but WORLD_SIZE was {self.ranks} when "
                "hpc_train.session was imported; start the ranks with torchrun or `per: rank`, or set RANK "
                "and WORLD_SIZE before the import"
            )

    def _save_flag(self, *, may_save: bool) -> int:
        """Return the flag of a save that is due by this rank's clock; only rank 0's counts."""
        every_s = self.settings.get("every_s", _SAVE_EVERY_S) if may_save and self.rank == 0 else None
        return SAVE if every_s is not None and time.monotonic() - self.saved_at >= every_s else 0

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
        if self.ended_in is not None or not (
            self.settings.get("best") or self.settings.get("early_stopping")
        ):
            return
        flags = 0
        if self.rank == 0:
            is_best, is_last = self.selection.add(step, metrics)
            flags = _BEST * is_best | _FINISHED * is_last
        if self.ranks > 1:  # at once: the decision is on the weights of this step
            self._agreed |= self._wait()
            self._begin(flags)
            flags = self._wait()
        self.is_finished |= bool(flags & _FINISHED)
        if flags & _BEST:
            self.best_step = step

    @property
    def selection(self) -> Selection:
        """The rule of ``checkpoint.best`` and ``early_stopping``."""
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

    def _sync_rows(self) -> None:
        """Write waiting rows and sync them to disk; the supervisor may be killed before it reads them."""
        self.send()
        if self._messages is not None and not self._messages.closed:
            os.fsync(self._messages.fileno())

    def beat(self) -> None:
        """Write waiting rows, or change the time of the file of messages, twice per second at most."""
        at = time.monotonic()
        if at - self._beat_at >= _BEAT_S:
            self._beat_at = at
            self.send()

    def add_row(self, step: int, split: str, metrics: dict[str, float]) -> None:
        """Add a row. It is written with others: a message takes longer than the step of a small model."""
        if self.run is not None and self.ended_in is None:
            with self._lock:
                self._rows.append((time.time(), step, split, metrics))
            self.beat()

    def add_progress(self, step: int, total: int) -> None:
        """Set the newest progress."""
        if self.run is not None and self.ended_in is None:
            with self._lock:
                self._progress = (step, total)
            self.beat()

    def _file(self) -> Any:
        if self.run is not None and self._messages is None:
            path = self.run / "attempts" / str(self.attempt) / f"rank-{self.rank}.session"
            self._messages = path.open("a", encoding="utf-8")
            if self._messages.tell():  # of a process that may have been killed within a line
                self._messages.write("\n")
            atexit.register(self.send)
        return self._messages

    # Checkpoints.

    @property
    def saving(self) -> Saving:
        """The checkpoints of this attempt."""
        if self._saving is None:
            self._check_ranks()
            from hpc_train.session.storage import Saving

            self._saving = Saving(
                self.run,
                self.attempt,
                self.rank,
                self.ranks,
                self.settings.get("keep"),
                self.beat,
                self._sync_rows,
            )
        return self._saving

    def resumed_from(self, folder: Path | None) -> Path | None:
        """Continue to follow the metrics as of the checkpoint, on all ranks; later rows are withdrawn."""
        if folder is not None:
            if self.rank == 0:
                self.send("resumed", int(folder.name.removeprefix("step-")))
            self.selection.restore(json.loads((folder / "state.json").read_text("utf-8")))
            self.is_finished = self.selection.reason is not None
        return folder


def protect_forks() -> None:
    """Keep forked processes, such as data loaders, alive while the script saves.

    Slurm signals all processes of a job: a data loader that SIGTERM ends would fail the script before it has
    saved. ``terminate`` of a forked process therefore sends SIGKILL.
    """
    os.register_at_fork(before=_kill_instead, after_in_child=_block_signals)


def _kill_instead() -> None:
    from multiprocessing import popen_fork

    popen_fork.Popen.terminate = popen_fork.Popen.kill  # type: ignore[method-assign]


def _block_signals() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGUSR2))
