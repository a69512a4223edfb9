"""Small files that are always whole: written aside, then renamed."""

from __future__ import annotations

import errno
import json
import os
import secrets
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

#: Over NFS a file that another node replaces while it is read is stale; the next look finds the new one.
_STALE_READS = 3


def write_text(path: Path, text: str, *, sync: bool = False) -> None:
    """Replace ``path`` by ``text`` in one step; with ``sync`` it is on the disk when this returns."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            if sync:
                file.flush()
                os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if sync:
        sync_folder(path.parent)


def write_json(path: Path, data: dict[str, Any], *, sync: bool = False) -> None:
    """Replace ``path`` by ``data`` as JSON in one step."""
    write_text(path, json.dumps(data, indent=1, allow_nan=False) + "\n", sync=sync)


def read_json(path: Path) -> dict[str, Any] | None:
    """Return the object in ``path``, or None where there is no such file or no JSON object in it."""
    try:
        data = json.loads(_read_text(path))
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None
    return data if isinstance(data, dict) else None


def _read_text(path: Path) -> str:
    for _ in range(_STALE_READS):
        try:
            return path.read_text(encoding="utf-8")
        except OSError as error:
            if error.errno != errno.ESTALE:
                raise
    return path.read_text(encoding="utf-8")


def sync_folder(folder: Path) -> None:
    """Put the folder's own entries (a rename, a new file) on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_folder(folder: Path) -> None:
    """Remove a folder so that nobody sees half of it; none is fine."""
    aside = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}")
    with suppress(FileNotFoundError):
        folder.rename(aside)
        shutil.rmtree(aside, ignore_errors=True)
