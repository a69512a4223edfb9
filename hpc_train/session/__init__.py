"""Functions with which your own training script stops, saves and resumes under ``hpc-train submit``.

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

import time
from collections.abc import Iterator, Sized
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpc_train.session.process_state import SAVE, STOP, SessionState, protect_forks

if TYPE_CHECKING:
    from hpc_train.session.positions import PositionedSampler

__all__ = [
    "checkpoint",
    "end_step",
    "heartbeat",
    "latest",
    "load_state",
    "log",
    "metric",
    "per_rank",
    "progress",
    "sampler",
    "save_state",
    "should_stop",
]

#: Columns of each row; ``epoch`` may be set.
_COLUMNS = frozenset({"step", "time", "attempt", "split"})

_session = SessionState()
if _session.run is not None:
    protect_forks()


def load_state(**objects: Any) -> int:
    """Restore the objects from the newest intact checkpoint; return its step, 0 if there is none. Collective.

    Objects have ``state_dict`` and ``load_state_dict`` (modules, optimizers, schedulers, scalers, the sampler
    of ``session.sampler``), are a ``torch.Generator``, or a dict or list of plain values, which is changed in
    place. They are the same on all ranks, and rank 0 saves them, except for those in ``per_rank``. The state
    of the random number generators of Python, NumPy and torch is restored on each rank; ranks beyond those of
    the checkpoint derive theirs from its step. Wrappers of DDP and ``torch.compile`` may differ from the time
    of the save.

    Call it once, when everything is built, before the first step. ``end_step`` and ``save_state`` save the
    same objects. Raises TypeError for an object that can't be saved, such as one of FSDP, and BadFileError if
    the checkpoint lacks one.

    If early stopping had ended the run with that checkpoint, and the script was killed before its own end,
    the next ``end_step`` restores the objects once more and returns True: the step before it has no effect.
    """
    from hpc_train.session.objects import check, restore

    check(objects)
    _session.objects = objects
    folder = latest()
    _session.ended_in = folder if _session.is_finished else None
    return 0 if folder is None else restore(folder, objects, _session.rank, _session.ranks)


def per_rank(value: Any) -> Any:
    """Return an object for ``load_state`` that is saved by each rank, and restored on the same rank.

    For state that differs between ranks, like ``buffer=session.per_rank(buffer)``: a dict or list of plain
    values and tensors, or another object of ``load_state``. ``load_state`` raises BadFileError on another
    number of ranks than the checkpoint's.
    """
    from hpc_train.session.objects import PerRank

    return PerRank(value)


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
    if session.ended_in is not None:
        from hpc_train.session.objects import restore

        restore(session.ended_in, session.objects, session.rank, session.ranks)
        session.has_ended(step)
        return True
    if total is not None and session.rank == 0:
        session.add_progress(step, total)
    every = session.settings.get("every_steps") or ("every_s" not in session.settings and save_every) or None
    session.handle_signals()
    session.beat()
    if session._saving is not None:
        session._saving.raise_failure()
    flags = session.all_flags(may_save=every is None or "every_s" in session.settings)
    stops = bool(flags & STOP) or session.is_finished
    is_due = flags & SAVE or session.best_step == step or (every is not None and step % every == 0)
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
    stops = bool(_session.all_flags() & STOP) or _session.is_finished
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
