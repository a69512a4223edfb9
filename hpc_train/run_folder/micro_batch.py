"""``micro_batch.json``: what ``micro_batch_size: auto`` came to.

Found once and kept for the run's life: the size is part of a step's mathematics, so all attempts use one.
"""

from __future__ import annotations

import os
import secrets
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from typing import Any

from hpc_train.errors import StorageError
from hpc_train.paths import RunPaths
from hpc_train.run_folder.files import read_json, sync_folder, write_json


@dataclass(frozen=True)
class Found:
    """All of ``micro_batch.json`` but its version."""

    #: m.
    size: int
    #: The next size up, which did not fit; None where there is none.
    too_large: int | None
    #: Of the attempt that found it.
    ranks: int
    attempt: int

    def to_json(self) -> dict[str, Any]:
        return {"version": 1} | asdict(self)


def kept(paths: RunPaths) -> Found | None:
    """Return what the run has found, None before that. Raises StorageError where the file can't be read."""
    if not paths.micro_batch.exists():
        return None
    data = read_json(paths.micro_batch) or {}
    values: dict[str, Any] = {field.name: data.get(field.name) for field in fields(Found)}
    numbers = [values["size"], values["ranks"], values["attempt"]]
    if not all(isinstance(number, int) and number > 0 for number in numbers):
        raise StorageError(
            f"{paths.micro_batch}: can't be read, and another micro_batch_size would be another run; put it "
            "back, or start anew with hpc-train submit --new"
        )
    return Found(**values)


def kept_size(paths: RunPaths) -> int | None:
    """Return the size alone, for words about a run: None also where the file can't be read."""
    with suppress(OSError, StorageError):
        found = kept(paths)
        return None if found is None else found.size
    return None


def keep(paths: RunPaths, found: Found) -> Found:
    """Write ``found`` down, on the disk when this returns; return what was first.

    An attempt that was given up for dead may still be looking: both use what the quicker one wrote.
    """
    temporary = paths.micro_batch.with_name(f".{paths.micro_batch.name}.{secrets.token_hex(4)}")
    try:
        write_json(temporary, found.to_json(), sync=True)
        with suppress(FileExistsError):
            os.link(temporary, paths.micro_batch)  # fails where a rename would replace
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(paths.folder)
    first = kept(paths)
    assert first is not None, "it was linked, or stood there"
    return first
