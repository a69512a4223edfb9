"""Checkpoints as plain files: which are valid, whether they are intact, and their removal.

Called by ranks, commands and launchers; only ``checkpoint.checkpointer`` knows the tensors.
"""

from __future__ import annotations

import errno
import hashlib
import math
import re
import secrets
import shutil
import stat
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import xxhash

from hpc_train import __version__
from hpc_train.errors import BadFileError, UsageError
from hpc_train.paths import CheckpointPaths, RunPaths
from hpc_train.run.best import BEST, Best
from hpc_train.run.file_shapes import JSON_KEY, Count, decoded, encoded
from hpc_train.run.files import read_json, write_json
from hpc_train.run.storage_errors import TRANSIENT, retried

FORMAT_VERSION = 2
#: With fewer than two there would be no fallback when the newest is damaged.
MIN_KEEP = 2
#: ``attempt`` of checkpoints, and of rows of metrics, that a run took over from the run that it extends.
INHERITED = 0

#: File server errors that may be temporary. I/O errors are excluded: the file itself may be damaged.
_SERVER_IS_AWAY = TRANSIENT - {errno.EIO}

#: Folders of a program's checkpoint are separated by slashes; no part consists of dots alone.
_PART = r"\.?[A-Za-z0-9_][A-Za-z0-9._=,@+ -]{0,127}"
_PLAIN_NAME = re.compile(rf"{_PART}(?:/{_PART}){{0,15}}")
#: The key of a file's hash in the manifest.
_HASH = "xxh3_128"
#: File in a folder that was set aside.
_WHY = "why.txt"
_LEFT_OVER = re.compile(r"step-[0-9]{8,15}\.(?:tmp-(?P<attempt>[0-9]{1,9})|removed-[0-9a-f]+)")
_SET_ASIDE = re.compile(r"step-[0-9]{8,15}\.(?:bad|unverified)(?:-[0-9]+)?")
#: The key of ``Manifest.verified`` in a manifest, and in the ``extra`` of ``state.json``.
VERIFIED = "verified"


class NewerVersionError(BadFileError):
    """A later hpc-train wrote the checkpoint: it is not damaged, but this version can't read it."""


@dataclass(frozen=True)
class FileEntry:
    """The expected size and XXH3-128 hash (hexadecimal) of one file of a checkpoint."""

    size: Count
    digest: Annotated[str, re.compile("[0-9a-f]{32}").fullmatch] = field(metadata={JSON_KEY: _HASH})


@dataclass(frozen=True)
class Manifest:
    """``manifest.json``: written last, so a checkpoint that has one is complete."""

    step: int
    attempt: int
    world_size: int
    files: dict[str, FileEntry]
    #: The best evaluation up to ``step``; None without ``checkpoint.best``.
    best: Best | None = None
    #: The newest step at which ``recovery.verify_every_steps`` had found no difference; None without it.
    verified: int | None = None

    def write(self, checkpoint: CheckpointPaths) -> None:
        """Write it atomically and sync it to disk; all other files must be there before."""
        data = {
            "version": FORMAT_VERSION,
            "hpc_train": __version__,
            "step": self.step,
            "attempt": self.attempt,
            "world_size": self.world_size,
            "files": {name: encoded(entry) for name, entry in self.files.items()},
        }
        if self.best is not None:
            data[BEST] = encoded(self.best)
        if self.verified is not None:
            data[VERIFIED] = self.verified
        write_json(checkpoint.manifest, data, sync=True)

    @classmethod
    def read(cls, checkpoint: CheckpointPaths) -> Manifest:
        """Raises BadFileError if it is missing or invalid, NewerVersionError if its version is too new."""
        data = read_object(checkpoint.manifest)
        version = data.get("version")
        if type(version) is int and version > FORMAT_VERSION:
            raise NewerVersionError(_newer(checkpoint.manifest, version, data.get("hpc_train")))
        if version != FORMAT_VERSION:
            raise BadFileError(f"{checkpoint.manifest}: version is {version!r}; no hpc-train writes that")
        step, attempt, world_size = (
            _number(checkpoint.manifest, key, data.get(key)) for key in ("step", "attempt", "world_size")
        )
        files = _file_entries(checkpoint.manifest, data.get("files"))
        verified = data.get(VERIFIED)
        if verified is not None:
            verified = _number(checkpoint.manifest, VERIFIED, verified)
        return cls(step, attempt, world_size, files, decoded(Best, data.get(BEST)), verified)


def _newer(manifest: Path, version: int, written_by: object) -> str:
    use = f"hpc-train {written_by}" if isinstance(written_by, str) else "the hpc-train that wrote it"
    return (
        f"{manifest}: version is {version}, and this hpc-train ({__version__}) reads up to {FORMAT_VERSION}; "
        f"use {use}, or a newer one"
    )


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in ``path``; raises BadFileError, naming the file, if there is none."""
    if path.is_symlink() or (path.exists() and not path.is_file()):
        raise BadFileError(f"{path} is not a plain file")
    try:
        data = read_json(path)
    except RecursionError:
        data = None
    if data is None:
        raise BadFileError(f"{path} is {'not a JSON object' if path.exists() else 'missing'}")
    return data


def _number(manifest: Path, key: str, value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise BadFileError(f"{manifest}: {key} is {value!r}; it must be a whole number")
    return value


def _file_entries(manifest: Path, files: object) -> dict[str, FileEntry]:
    if not isinstance(files, dict):
        raise BadFileError(f"{manifest}: files must be an object")
    return {name: file_entry(manifest, name, entry) for name, entry in files.items()}


def is_plain_name(name: str) -> bool:
    """Return True if a checkpoint may have a file of that name, relative to its folder."""
    # A name with a slash in front or only dots would make a reader leave the checkpoint's folder.
    return _PLAIN_NAME.fullmatch(name) is not None


def file_entry(manifest: Path, name: str, data: object) -> FileEntry:
    """Return the entry of the file ``name`` in a manifest or index. Raises BadFileError if it is invalid."""
    if not is_plain_name(name):
        raise BadFileError(f"{manifest}: {name!r} is not a plain file name")
    entry = decoded(FileEntry, data)
    if entry is None:
        raise BadFileError(f"{manifest}: {name!r} must have a size and a hash ({_HASH})")
    return entry


def hash_file(path: Path) -> str:
    """Return the file's hash in hexadecimal, read in pieces."""
    with path.open("rb") as file:
        return str(hashlib.file_digest(file, xxhash.xxh3_128).hexdigest())


def newest_attempt(paths: RunPaths, before: float = math.inf) -> int:
    """Return the number of the attempt that owns the run, or did before attempt ``before``; 0 if none.

    This is the last one with a record: an attempt that ended before it wrote one never began, and must not
    invalidate what the previous one saved.
    """
    attempts = [attempt for attempt in paths.attempt_folders() if attempt.number < before]
    began = [attempt for attempt in attempts if attempt.record.is_file()]
    return max((attempt.number for attempt in began or attempts), default=0)


def counts(paths: RunPaths, checkpoint: CheckpointPaths, attempt: int) -> bool:
    """Return True if ``attempt`` may read the checkpoint.

    An attempt may read its own checkpoints, inherited ones, and those of an earlier attempt only if they were
    listed when a later attempt started. Raises NewerVersionError: an attempt that did not list a checkpoint
    would invalidate it for good.
    """
    try:
        written_by = Manifest.read(checkpoint).attempt
    except NewerVersionError:
        raise
    except BadFileError:
        return False
    return written_by in {INHERITED, attempt} or any(
        written_by < later.number <= attempt and checkpoint.folder.name in _listed(later.record)
        for later in paths.attempt_folders()
    )


def _listed(record: Path) -> list[object]:
    names = (read_json(record) or {}).get("checkpoints")
    return names if isinstance(names, list) else []


def committed(paths: RunPaths, attempt: int | None = None) -> list[CheckpointPaths]:
    """Return the valid checkpoints for ``attempt`` (default: the newest), newest first."""
    reader = newest_attempt(paths) if attempt is None else attempt
    return [checkpoint for checkpoint in _folders(paths) if counts(paths, checkpoint, reader)]


def kept_best(paths: RunPaths) -> Best | None:
    """Return the best evaluation up to the newest valid checkpoint; None without ``checkpoint.best``."""
    manifest = next(map(_manifest, committed(paths)), None)
    return None if manifest is None else manifest.best


def _manifest(checkpoint: CheckpointPaths) -> Manifest | None:
    try:
        return Manifest.read(checkpoint)
    except BadFileError:  # removed, or damaged, meanwhile
        return None


def find_step(paths: RunPaths, *, best: bool | None = None, step: int | None = None) -> int:
    """Return the step of the best valid checkpoint, or of the newest; or ``step`` itself if there is one.

    ``best``: True or False to request the best or the newest; None: the best if ``checkpoint.best`` has
    selected one. Raises UsageError if there is no such checkpoint. Reads no tensors: it may be damaged.
    """
    steps = [checkpoint.step for checkpoint in committed(paths)]
    if not steps:
        raise UsageError(f"{paths.folder}: this run has no checkpoint yet; try again once it has saved one")
    if step is None and best is not False:
        evaluation = kept_best(paths)
        if evaluation is None and best:
            raise UsageError(
                f"--best: {paths.folder} has no best checkpoint; omit --best, or train with checkpoint.best: "
                "{metric: accuracy, mode: max}"
            )
        step = None if evaluation is None else evaluation.step
    if step is not None and step not in steps:
        listed = ", ".join(map(str, steps))
        raise UsageError(f"{paths.checkpoints}: there is no checkpoint of step {step}; there are {listed}")
    return steps[0] if step is None else step


def selection_words(paths: RunPaths, step: int, last: str = "--last") -> str:
    """Return ``the best checkpoint, accuracy 0.97 at step 40 (--last: step 120)``.

    ``last``: how the caller's user requests the newest. Empty if ``checkpoint.best`` has selected none.
    """
    evaluation, newest = kept_best(paths), find_step(paths, best=False)
    if evaluation is None:
        return ""
    if step != evaluation.step:
        return f"the {'last ' * (step == newest)}checkpoint, step {step} (the best: {evaluation})"
    other = "also the last" if step == newest else f"{last}: step {newest}"
    return f"the best checkpoint, {evaluation} ({other})"


def damaged(paths: RunPaths) -> dict[CheckpointPaths, str]:
    """Return the folders whose manifest can't be read, newest first, and why.

    A folder gets its final name only after its manifest was written, so these are not half-written. Raises
    NewerVersionError.
    """
    reasons = {}
    for checkpoint in _folders(paths):
        try:
            Manifest.read(checkpoint)
        except NewerVersionError:
            raise
        except BadFileError as error:
            if checkpoint.folder.exists():  # otherwise another attempt has removed it since
                reasons[checkpoint] = str(error)
    return reasons


def _folders(paths: RunPaths) -> list[CheckpointPaths]:
    """Newest first; other spellings of the same step with more zeros are excluded."""
    folders = paths.checkpoint_folders()[::-1]
    return [folder for folder in folders if folder == paths.checkpoint(folder.step)]


def listing(paths: RunPaths, attempt: float = math.inf) -> list[str]:
    """Return the checkpoints that are valid for the attempt before ``attempt``, which has no record yet."""
    earlier = newest_attempt(paths, before=attempt)
    return [checkpoint.folder.name for checkpoint in committed(paths, earlier)]


def verify(checkpoint: CheckpointPaths, part: int = 0, parts: int = 1) -> list[str]:
    """Return the problems of the checkpoint's files, one per line; empty if it is intact.

    With ``parts`` the files are divided and only those of ``part`` are read, for ranks that share the work.
    Raises OSError if a file server does not answer.
    """
    try:
        manifest = Manifest.read(checkpoint)
    except BadFileError as error:
        return error.problems
    problems = []
    if manifest.step != checkpoint.step:
        problems.append(f"{checkpoint.manifest}: step is {manifest.step}, not the folder's")
    if checkpoint.state.name not in manifest.files:
        problems.append(f"{checkpoint.manifest}: {checkpoint.state.name} is not among the files")
    for name in sorted(manifest.files)[part::parts]:
        path, entry = checkpoint.folder / name, manifest.files[name]
        problem = retried(partial(_file_problem, path, entry), path, transient=_SERVER_IS_AWAY)
        if problem:
            problems.append(f"{path} {problem}")
    return problems


def _file_problem(path: Path, entry: FileEntry) -> str | None:
    """Raises OSError if a file server does not answer: the file may be intact."""
    try:
        facts = path.lstat()
        if not stat.S_ISREG(facts.st_mode):  # a link leads outside, a pipe blocks
            return "is not a plain file"
        if facts.st_size != entry.size:
            return f"has {facts.st_size} bytes, the manifest says {entry.size}"
        if hash_file(path) != entry.digest:
            return "is damaged: its hash is not the manifest's"
        if path.name == "state.json":
            read_object(path)
    except FileNotFoundError:
        return "is missing"
    except BadFileError:
        return "is not a JSON object"
    except OSError as error:
        if error.errno in _SERVER_IS_AWAY:
            raise
        return f"can't be read: {error.strerror}"
    return None


def set_aside(checkpoint: CheckpointPaths, why: str, kind: str = "bad") -> Path | None:
    """Rename the folder to ``….bad`` (numbered if taken), so that it is not loaded but can be inspected.

    ``kind``: ``unverified`` if it is intact but may have wrong numbers. Returns None if the folder no longer
    exists: another attempt has removed it.
    """
    folder = checkpoint.folder
    target, number = folder.with_name(f"{folder.name}.{kind}"), 1
    while target.exists():
        number += 1
        target = folder.with_name(f"{folder.name}.{kind}-{number}")
    try:
        folder.rename(target)
    except FileNotFoundError:
        return None
    with suppress(OSError):  # the name is enough; a full disk may have caused the damage
        (target / _WHY).write_text(why + "\n", encoding="utf-8")
    return target


def all_set_aside(paths: RunPaths) -> dict[str, str]:
    """Return the folders that ``set_aside`` renamed in this attempt and before, and why."""
    reasons = {}
    for folder in sorted(paths.checkpoints.glob("step-*.bad*")):
        why = folder / _WHY
        reasons[folder.name] = why.read_text("utf-8", "replace").strip() if why.is_file() else "damaged"
    return reasons


def prune(
    paths: RunPaths, keep: int, attempt: int, keep_every: int | None = None, needed: Collection[int] = ()
) -> list[str]:
    """Remove the folders that ``attempt`` no longer needs and return their names.

    These are its committed checkpoints except the newest ``keep`` (at least two), the best and the newest
    verified one up to each of these and those of multiples of ``keep_every`` steps, unfinished saves of
    earlier attempts, and unfinished removals. ``needed``: steps of more checkpoints to keep. Removes nothing
    once a later attempt exists, which may have listed checkpoints that this one does not need.
    """
    checkpoints = [one for one in committed(paths, attempt) if _is_real_folder(one.folder)]
    newest = checkpoints[: max(keep, MIN_KEEP)]
    # For each kept one: a resume falls back to an earlier one if the newest turns out to be damaged.
    required = set(needed)
    for manifest in filter(None, map(_manifest, newest)):
        if manifest.best is not None:
            required.add(manifest.best.step)
        if (step := manifest.verified) is not None:
            required.add(next((checkpoint.step for checkpoint in checkpoints if checkpoint.step <= step), 0))
    surplus = [item for item in checkpoints[len(newest) :] if item.step not in required]
    folders = [item.folder for item in surplus if keep_every is None or item.step % keep_every]
    removed = []
    for path in sorted(paths.checkpoints.iterdir()) if paths.checkpoints.is_dir() else []:
        match = _LEFT_OVER.fullmatch(path.name)
        if match and _is_real_folder(path) and (match["attempt"] is None or int(match["attempt"]) < attempt):
            folders.append(path)
    for folder in folders:
        if newest_attempt(paths) > attempt:
            break
        remove(folder)
        removed.append(folder.name)
    return removed


def is_left_over(folder: Path) -> bool:
    """Return True if this is an unfinished save or removal."""
    return _LEFT_OVER.fullmatch(folder.name) is not None and _is_real_folder(folder)


def is_set_aside(folder: Path) -> bool:
    """Return True if ``set_aside`` renamed the folder."""
    return _SET_ASIDE.fullmatch(folder.name) is not None and _is_real_folder(folder)


def _is_real_folder(path: Path) -> bool:
    """Return False for a link: hpc-train writes none, so it leads to somebody else's files."""
    return path.is_dir() and not path.is_symlink()


def move_away(folder: Path) -> Path:
    """Rename the folder to a name that no checkpoint has; ``prune`` removes it if it is still there."""
    name = folder.name.partition(".")[0]
    return folder.rename(folder.with_name(f"{name}.removed-{secrets.token_hex(4)}"))


def remove(folder: Path) -> None:
    """Remove a checkpoint's folder; it is renamed first, so that a partly removed folder is never valid."""
    shutil.rmtree(move_away(folder))
