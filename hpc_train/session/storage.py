"""Checkpoints of a program: folders that all ranks write, committed by one rename."""

from __future__ import annotations

import atexit
import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hpc_train.errors import BadFileError
from hpc_train.paths import CheckpointPaths, RunPaths
from hpc_train.run.best import BEST, Best
from hpc_train.run.checkpoints import (
    FileEntry,
    Manifest,
    committed,
    hash_file,
    is_plain_name,
    move_away,
    prune,
    set_aside,
    verify,
)
from hpc_train.run.file_shapes import decoded
from hpc_train.run.files import sync_folder, write_json

_POLL_S = 0.01
#: Checkpoints that are kept by default.
_KEEP = 3
#: Files by which ranks tell that they are ready to write, have written, and have hashed their share.
_READY, _LEFT, _HASHED = ".ready", ".left", ".hashed"
#: Set by torchrun, which may start all ranks again within one attempt.
_RESTART_VARIABLE = "TORCHELASTIC_RESTART_COUNT"


class Saving:
    """Saves and finds the checkpoints of one attempt. ``beat`` is called while this rank waits for others.

    ``sync_rows`` syncs the rows up to now to disk: no resume repeats them once a checkpoint contains their
    steps.
    """

    def __init__(
        self,
        run: Path | None,
        attempt: int,
        rank: int,
        ranks: int,
        keep: int | None,
        beat: Callable[[], None],
        sync_rows: Callable[[], None],
    ) -> None:
        self._run = RunPaths(Path.cwd() if run is None else run)
        self._has_launcher = run is not None
        self._rank, self._ranks, self._beat, self._sync_rows = rank, ranks, beat, sync_rows
        self._attempt = attempt if run is not None or ranks == 1 else _start_number()
        self._keep = keep or _KEEP
        #: Collective calls so far: part of the names of files by which ranks find each other in this call.
        self._number = 0
        #: Of the asynchronous save: its thread, and the error by which it failed.
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None

    def start(
        self,
        step: int,
        objects: Mapping[str, Any],
        state: Mapping[str, Any],
        is_committed: Callable[[], None],
    ) -> None:
        """Copy the objects into memory, and save them in a thread. Collective; ``wait`` comes before."""
        from hpc_train.session.objects import staged

        write = staged(step, objects, self._rank)

        def save() -> None:
            try:
                write(self.begin(step))
                self.commit(step, state)
                is_committed()
            except BaseException as error:
                self._failure = error

        atexit.unregister(self._at_exit)
        atexit.register(self._at_exit)
        self._thread = threading.Thread(target=save, name=f"save of step {step}")
        self._thread.start()

    def wait(self) -> None:
        """Wait for the asynchronous save. Raises the error by which it, or an earlier one, failed."""
        thread, self._thread = self._thread, None
        while thread is not None and thread.is_alive():
            thread.join(1.0)
            self._beat()
        self.raise_failure()

    def raise_failure(self) -> None:
        """Raise the error by which an asynchronous save has failed, once."""
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _at_exit(self) -> None:
        """A script whose last save has failed does not end with exit code 0."""
        try:
            self.wait()
        except BaseException as error:
            print(f"hpc-train: the checkpoint could not be saved: {error}", file=sys.stderr, flush=True)
            os._exit(1)

    def begin(self, step: int) -> Path:
        """Return the folder into which this rank writes. Collective."""
        self._number += 1
        folder = self._unfinished(step)
        ready = folder / self._mark(_READY)
        if self._rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            ready.touch()
        self._await([ready])
        return folder

    def commit(self, step: int, state: Mapping[str, Any]) -> None:
        """Hash and sync the files once all ranks have written, and give the folder its name. Collective.

        ``state``: entries for ``state.json``; only rank 0's are used. Raises BadFileError for a file that a
        checkpoint can't have.
        """
        folder, target = self._unfinished(step), self._run.checkpoint(step)
        is_repeated = target.manifest.exists()
        (folder / self._mark(_LEFT, self._rank)).touch()
        self._await([folder / self._mark(_LEFT, rank) for rank in range(self._ranks)])
        hashed = {name: _hashed(folder / name) for name in _names(folder)[self._rank :: self._ranks]}
        _write_whole(folder / self._mark(_HASHED, self._rank), json.dumps(hashed))
        if self._rank == 0:
            self._await([folder / self._mark(_HASHED, rank) for rank in range(self._ranks)])
            self._finish(folder, target, step, state)
        self._await([target.manifest])
        while is_repeated and folder.exists():
            self._pause()

    def latest(self) -> Path | None:
        """Return the folder of the newest intact checkpoint. Collective."""
        self.wait()  # the thread of a save counts calls, too
        self._number += 1
        checkpoints = self._run.checkpoints
        answer = checkpoints / self._mark(f".resume-{self._attempt}")
        if self._rank > 0:
            self._await([answer])
            name = answer.read_text(encoding="utf-8")
        else:
            name = self._newest_intact()
            if self._ranks > 1:
                checkpoints.mkdir(parents=True, exist_ok=True)
                _write_whole(answer, name)
        return checkpoints / name if name else None

    def _mark(self, name: str, *rank: int) -> str:
        """Return the name of a file by which ranks find each other, in this call only."""
        restart = os.environ.get(_RESTART_VARIABLE, "0")
        return "-".join(map(str, (name, *rank, restart, self._number)))

    def _newest_intact(self) -> str:
        candidates = committed(self._run, self._attempt) if self._has_launcher else self._complete()
        for checkpoint in candidates:
            problems = verify(checkpoint)
            if not problems:
                return checkpoint.folder.name
            print(f"hpc-train: {checkpoint.folder} is set aside: {problems[0]}", file=sys.stderr)
            set_aside(checkpoint, "\n".join(problems))
        return ""

    def _finish(self, folder: Path, target: CheckpointPaths, step: int, state: Mapping[str, Any]) -> None:
        files = {
            name: FileEntry(*entry)
            for rank in range(self._ranks)
            for name, entry in json.loads((folder / self._mark(_HASHED, rank)).read_text("utf-8")).items()
        }
        for name in set(_names(folder)) - files.keys():  # a network disk has shown another rank less
            files[name] = FileEntry(*_hashed(folder / name))
        for path in list(folder.iterdir()):
            if _is_mark(folder, path):
                path.unlink()
        unfinished = CheckpointPaths(folder)
        write_json(unfinished.state, {"version": 1, "step": step, "program": True, **state}, sync=True)
        files[unfinished.state.name] = FileEntry(*_hashed(unfinished.state))
        best = decoded(Best, state.get(BEST))
        Manifest(step, self._attempt, self._ranks, files, best).write(unfinished)
        for inner in {path.parent for path in folder.rglob("*")}:
            sync_folder(inner)
        self._sync_rows()
        # The same step again, maybe after one that is not intact or does not count.
        replaced = move_away(target.folder) if target.folder.exists() else None
        folder.rename(target.folder)
        sync_folder(target.folder.parent)
        if replaced is not None:
            shutil.rmtree(replaced)
        if self._has_launcher:
            prune(self._run, self._keep, self._attempt)
        else:
            for old in self._complete()[self._keep :]:
                shutil.rmtree(old.folder)

    def _complete(self) -> list[CheckpointPaths]:
        """Return the checkpoints of a script without hpc-train's launcher, newest first."""
        return [folder for folder in self._run.checkpoint_folders()[::-1] if folder.manifest.is_file()]

    def _unfinished(self, step: int) -> Path:
        folder = self._run.checkpoint(step).folder
        return folder.with_name(f"{folder.name}.tmp-{self._attempt}")

    def _await(self, files: Sequence[Path]) -> None:
        """Wait until the files exist. If a rank dies meanwhile, its launcher ends this process."""
        for file in files:
            while not file.exists():
                self._pause()

    def _pause(self) -> None:
        self._beat()
        time.sleep(_POLL_S)


def _start_number() -> int:
    """Return a number for the files by which the ranks of this start find each other. Collective.

    Without hpc-train's launcher no attempt tells them from the files of an earlier start.
    """
    import torch.distributed as dist

    if not dist.is_initialized():
        raise RuntimeError("session: initialize torch.distributed first: ranks must agree")
    numbers = [int(time.time()) % 10**9]
    dist.broadcast_object_list(numbers, src=0)
    return numbers[0]


def _is_mark(folder: Path, path: Path) -> bool:
    return path.parent == folder and path.name.partition("-")[0] in {_READY, _LEFT, _HASHED}


def _names(folder: Path) -> list[str]:
    """Return the files that ranks have written, relative to the folder.

    Raises BadFileError for a name with which no checkpoint can be read, and for links: both would be noticed
    only when a run resumes.
    """
    reserved = {path.name for path in (CheckpointPaths(folder).state, CheckpointPaths(folder).manifest)}
    names = []
    for path in folder.rglob("*"):
        name = str(path.relative_to(folder))
        if _is_mark(folder, path) or not (path.is_file() or path.is_symlink()):
            continue
        if name in reserved:
            raise BadFileError(f"session.checkpoint: {name} is a file of hpc-train; choose another name")
        if path.is_symlink():
            raise BadFileError(f"session.checkpoint: {name} is a link; copy the file into the folder")
        if not is_plain_name(name):
            raise BadFileError(
                f"session.checkpoint: {name!r} is not a plain file name; begin it with a letter or digit, "
                "and use only letters, digits and . _ = , @ + - and blanks"
            )
        names.append(name)
    return sorted(names)


def _write_whole(path: Path, text: str) -> None:
    """Write a file so that others see all of it or none."""
    temporary = path.with_name(f"{path.name}.new")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


def _hashed(path: Path) -> list[Any]:
    with path.open("rb") as file:
        os.fsync(file.fileno())
    return [path.stat().st_size, hash_file(path)]
