"""``micro_batch.json``: the result of ``micro_batch_size: auto``.

Determined once for the run's lifetime: the size affects the numerics of a step, so all attempts use it.
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

from hpc_train.errors import StorageError
from hpc_train.paths import RunPaths
from hpc_train.run.file_shapes import decoded
from hpc_train.run.files import hidden_beside, is_unsupported, read_json, sync_folder, write_json

_Positive = Annotated[int, lambda number: number > 0]


@dataclass(frozen=True)
class Found:
    """The content of ``micro_batch.json`` without its version."""

    #: m.
    size: _Positive
    #: The next larger size, which did not fit; None if there is none.
    too_large: int | None
    #: The attempt that found it.
    ranks: _Positive
    attempt: _Positive

    def to_json(self) -> dict[str, Any]:
        """Return the content of ``micro_batch.json``."""
        return {"version": 1} | asdict(self)


def kept(paths: RunPaths) -> Found | None:
    """Return the size that was found; None before that. Raises StorageError if the file can't be read."""
    if not paths.micro_batch.exists():
        return None
    result = decoded(Found, read_json(paths.micro_batch))
    if result is None:
        raise StorageError(
            f"{paths.micro_batch}: can't be read, and another micro_batch_size would be another run; put it "
            "back, or start again with hpc-train submit --new"
        )
    return result


def kept_size(paths: RunPaths) -> int | None:
    """Return the size alone, for messages about a run; also None if the file can't be read."""
    with suppress(OSError, StorageError):
        result = kept(paths)
        return None if result is None else result.size
    return None


def _replace_first(temporary: Path, target: Path) -> None:
    """Rename to a target that does not exist, on a file system without hard links.

    Among several processes, the one that creates the claim's folder renames; a later one does so only if the
    target is still missing, because that process has died.
    """
    try:
        target.with_name(f".{target.name}.claim").mkdir()
    except FileExistsError:
        if target.exists():
            return
    temporary.replace(target)


def keep(paths: RunPaths, result: Found) -> Found:
    """Write ``result``, on disk when this returns; return the first result.

    An attempt that was presumed dead may still be searching: both use the result written first.
    """
    temporary = hidden_beside(paths.micro_batch)
    try:
        write_json(temporary, result.to_json(), sync=True)
        try:
            os.link(temporary, paths.micro_batch)  # fails if a rename would replace the target
        except FileExistsError:
            pass
        except OSError as error:
            if not is_unsupported(error):
                raise
            _replace_first(temporary, paths.micro_batch)
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(paths.folder)
    first = kept(paths)
    assert first is not None, "it was linked, or existed"
    return first
