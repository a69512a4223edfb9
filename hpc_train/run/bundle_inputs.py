"""Data and weights, which an experiment names by their paths: in a bundle, and where it is reproduced."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpc_train.paths import expanded
from hpc_train.run.bundle_archive import Input, Member, sha256_of
from hpc_train.run.code.code_files import MAX_FILE_MB, holds_private_key, is_secret

_MB = 1 << 20
#: Larger data have no hash of each file: their fingerprint is the run's own, of a sample.
_MAX_HASHED_BYTES, _MAX_HASHED_FILES = 4 << 30, 100_000


@dataclass
class NamedFiles:
    """The files and folders that an experiment names; those of at most ``max_bytes`` in all are included."""

    max_bytes: int
    inputs: dict[str, Input] = field(default_factory=dict)
    #: Path in the archive → file.
    files: dict[str, Path | bytes] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    #: Path here → path in the archive.
    origins: dict[str, str] = field(default_factory=dict)

    def add(self, key: str, text: str) -> str:
        """Return the path in the archive of a path of this machine."""
        path = Path(os.path.abspath(expanded(text)))  # noqa: PTH100  (".." goes, links stay)
        for origin, place in self.origins.items():
            if path.is_relative_to(origin):
                return str(Path(place, path.relative_to(origin)))
        is_folder = path.is_dir()
        keeps_name = path.is_file() or (path / "manifest.json").is_file()
        folder = re.sub(r"[^A-Za-z0-9._-]", "_", key)
        place = f"inputs/{folder}/{path.name if keeps_name else 'content'}"
        self.origins[str(path)] = place
        files = self._below(path) if is_folder or path.is_file() else None
        size = sum(file.stat().st_size for file in (files or {}).values())
        is_included = files is not None and size <= self.max_bytes
        hashes = None
        if files is not None and is_included:
            self.max_bytes -= size
            for name, file in files.items():
                if file.stat().st_size <= MAX_FILE_MB * _MB and holds_private_key(file.read_bytes()):
                    self.left_out[name] = "contains a private key"
                else:
                    self.files[f"{place}/{name}" if is_folder else place] = file
        elif files is not None and size <= _MAX_HASHED_BYTES:
            hashes = {name: sha256_of(file) for name, file in files.items()}
        self.inputs[key] = Input(place, is_included, is_folder, hashes)
        return place

    def _below(self, path: Path) -> dict[str, Path] | None:
        """Return the regular files by path below a folder, or a file by its name; None for too many."""
        if path.is_file():
            return {path.name: path}
        files: dict[str, Path] = {}
        for name, file in files_below(path):
            if is_secret(name):
                self.left_out[name] = "may contain a secret"
            elif len(files) < _MAX_HASHED_FILES:
                files[name] = file
            else:
                return None
        return files


def files_below(folder: Path) -> Iterator[tuple[str, Path]]:
    """Yield path below the folder and path of each regular file; links to folders above are not followed."""
    seen: set[tuple[int, int]] = set()
    for parent, folders, names in os.walk(folder, followlinks=True):
        facts = Path(parent).stat()
        if (facts.st_dev, facts.st_ino) in seen:
            folders.clear()
            continue
        seen.add((facts.st_dev, facts.st_ino))
        folders.sort()
        for name in sorted(names):
            path = Path(parent, name)
            if path.is_file():
                yield str(path.relative_to(folder)), path


def mapped_strings(value: Any, change: Callable[[str, str], Any], key: str = "") -> Any:
    """Return JSON with each string replaced by ``change`` of its dotted key and itself."""
    if isinstance(value, dict):
        return {
            name: mapped_strings(part, change, f"{key}.{name}".lstrip(".")) for name, part in value.items()
        }
    if isinstance(value, list | tuple):
        return [mapped_strings(part, change, f"{key}.{place}") for place, part in enumerate(value)]
    return change(key, value) if isinstance(value, str) else value


def with_place(text: str, named: Input, path: Path) -> str:
    """Return JSON whose strings begin with ``path`` in place of the input's path in the archive."""
    target = json.dumps(str(path), ensure_ascii=False)[:-1]
    return re.sub(rf'"{re.escape(named.path)}(?=["/])', lambda _: target, text)


def file_problems(named: Input, path: Path, members: Mapping[str, Member]) -> list[str]:
    """Return the names of files below ``path`` that are not those of the run, and why; empty if unknown."""
    expected = named.files
    if named.is_included:
        prefix = f"{named.path}/" if named.is_folder else f"{named.path.rpartition('/')[0]}/"
        expected = {
            member.removeprefix(prefix): entry.sha256
            for member, entry in members.items()
            if member.startswith(prefix)
        }
    if expected is None:
        return []
    if named.is_folder:
        files = dict(files_below(path))
    else:
        files = dict.fromkeys(expected, path)  # one file, which may have another name here
    problems = [f"{name} is missing" for name in expected if name not in files]
    problems += [
        f"{name} was changed"
        for name, digest in expected.items()
        if name in files and sha256_of(files[name]) != digest
    ]
    return problems + [f"{name} is new" for name in files if name not in expected and not is_secret(name)]
