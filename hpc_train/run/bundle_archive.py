"""The file that ``bundle`` writes and ``reproduce`` reads: a tar archive whose first member lists all others.

``bundle.json`` has the size and the SHA-256 of each other member, and a hash of itself (``content``), so that
a changed byte anywhere is noticed before a file is used. Members are regular files in the order of their
paths, without times, users and links: the same run gives the same bytes. Nothing of the tar format is parsed
on reading: each header must be the one that ``write`` would have written.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import lzma
import os
import re
import sys
import tarfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Literal, NamedTuple, cast

from hpc_train.errors import BadFileError, StorageError, UsageError
from hpc_train.paths import NAME_PATTERN
from hpc_train.run.file_shapes import Count, decoded, encoded
from hpc_train.run.files import (
    MAX_SMALL_BYTES,
    free_space,
    is_plain_path,
    json_text,
    open_regular,
    replacing,
)

VERSION = 1
MANIFEST = "bundle.json"
SUFFIXES = (".tar.zst", ".tar.xz", ".tar.gz", ".tar")
_BLOCK, _BYTES_AT_A_TIME = 512, 1 << 20
_END = bytes(2 * _BLOCK)
#: Names of this length fit into any tar header.
_MAX_NAME = 100
_is_sha256 = re.compile("[0-9a-f]{64}").fullmatch
_is_name = re.compile(NAME_PATTERN).fullmatch


@dataclass(frozen=True)
class Member:
    """One file of the archive."""

    size: Count
    sha256: Annotated[str, _is_sha256]
    is_executable: bool = False


@dataclass(frozen=True)
class Input:
    """A file or folder that the experiment names by its path: data or weights."""

    #: Where the archive has it, or would have it; ends with the name of the file, or of the folder.
    path: str
    is_included: bool
    is_folder: bool
    #: If it is not included: path below the folder (of a file: its name) → SHA-256; None: too large to read.
    files: dict[str, Annotated[str, _is_sha256]] | None = None


@dataclass(frozen=True)
class BundleFacts:
    """The facts of the run in ``bundle.json``."""

    id: Annotated[str, _is_name]
    name: Annotated[str, _is_name]
    #: The first step of a replay is the one after it: 0, or the step of the checkpoint that the run extends.
    begin: Count
    #: Steps of the checkpoints in the archive, lowest first.
    checkpoints: list[Count]
    ranks: Annotated[int, lambda number: 0 < number < 1 << 20]
    #: ``cpu`` or ``cuda``.
    device: str | None
    processor: str | None
    #: CPU threads per rank.
    threads: list[int] | None
    is_deterministic: bool
    versions: dict[str, str]
    #: Changes between its attempts, because of which no replay repeats all steps bitwise; in words.
    changes: list[str]
    #: Dotted key of the experiment → the input that it names.
    inputs: dict[str, Input] = field(default_factory=dict)


class Bundle(NamedTuple):
    """The verified content of an archive."""

    facts: BundleFacts
    #: Identifies the archive's content: a hash of ``bundle.json``.
    content: str
    members: dict[str, Member]


def suffix_of(path: Path) -> str:
    """Return the suffix that selects the compression. Raises UsageError for another one, or without its
    library.
    """
    suffix = next((suffix for suffix in SUFFIXES if path.name.endswith(suffix)), None)
    if suffix is None:
        raise UsageError(f"{path}: a bundle's name ends in {', '.join(SUFFIXES)}; rename it")
    if suffix == ".tar.zst":
        _zstd_library()
    return suffix


def write(target: Path, facts: BundleFacts, files: Mapping[str, Path | bytes], executables: set[str]) -> str:
    """Write the archive, replacing ``target`` at its end; return the hash that identifies its content.

    ``files``: path in the archive → the file, or its content. Raises StorageError if one changes meanwhile.
    """
    suffix = suffix_of(target)
    members = {
        path: Member(*_size_and_hash(files[path]), is_executable=path in executables)
        for path in sorted(files)
    }
    data = {
        "version": VERSION,
        "run": {**encoded(facts), "inputs": {key: encoded(part) for key, part in facts.inputs.items()}},
        "files": {path: encoded(member) for path, member in members.items()},
    }
    content = _content(data)
    manifest = json_text({"content": content, **data}).encode()
    with replacing(target, sync=True) as file, _stream(file, suffix, "wb") as stream:
        _add(stream, MANIFEST, Member(len(manifest), ""), manifest)
        for path, member in members.items():
            _add(stream, path, member, files[path])
        stream.write(_END)
    return content


def _content(data: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a regular file. Raises OSError, UnreadableFileError for a pipe or a device."""
    with open_regular(path) as file:
        return hashlib.file_digest(cast("Any", file), "sha256").hexdigest()


def _size_and_hash(source: Path | bytes) -> tuple[int, str]:
    if isinstance(source, Path):
        return source.stat().st_size, sha256_of(source)
    return len(source), hashlib.sha256(source).hexdigest()


def _add(stream: BinaryIO, path: str, member: Member, source: Path | bytes) -> None:
    stream.write(_header(path, member))
    size = 0
    for block in _blocks(source):
        stream.write(block)
        size += len(block)
    if size != member.size:
        raise StorageError(
            f"{source!s}: changed while it was read; repeat the command once nothing writes it"
        )
    stream.write(_padding(size))


def _blocks(source: Path | bytes) -> Iterator[bytes]:
    if isinstance(source, bytes):
        yield source
        return
    with open_regular(source) as file:
        while block := file.read(_BYTES_AT_A_TIME):
            yield block


def _header(path: str, member: Member) -> bytes:
    """Return the tar header of a member; a path that does not fit has a hash in its place."""
    info = tarfile.TarInfo(path)
    info.size, info.mode = member.size, 0o755 if member.is_executable else 0o644
    try:
        return info.tobuf(tarfile.USTAR_FORMAT, "utf-8", "surrogateescape")
    except ValueError:  # a long path, or over 8 GiB
        if len(os.fsencode(path)) > _MAX_NAME:
            info.name = f"long/{hashlib.sha256(os.fsencode(path)).hexdigest()[:32]}"
        return info.tobuf(tarfile.GNU_FORMAT, "utf-8", "surrogateescape")


def _padding(size: int) -> bytes:
    return bytes(-size % _BLOCK)


def extract(archive: Path, folder: Path) -> Bundle:
    """Extract into ``folder``, which is empty and private, and return the content, all of it verified.

    Raises BadFileError if the archive was changed or cut off; the folder then has unverified files.
    """
    suffix = suffix_of(archive)
    damage: tuple[type[Exception], ...] = (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile)
    if suffix == ".tar.zst":
        damage = (*damage, _zstd_library().ZstdError)
    try:
        with open_regular(archive) as file, _stream(file, suffix, "rb") as stream:
            bundle = _read_manifest(stream)
            total, free = sum(member.size for member in bundle.members.values()), free_space(folder)
            if free is not None and total > free:
                raise StorageError(
                    f"{folder}: has {free:,} bytes free, and {archive} needs {total:,}; free some"
                )
            folders = {folder}
            for path, member in bundle.members.items():
                _extract(stream, path, member, folder / path, folders)
            if _read(stream, len(_END)) != _END or stream.read(1):
                raise _ChangedError("has more members than it lists")
    except _ChangedError as error:
        raise BadFileError(
            f"{archive}: {error}, so it is not what `hpc-train bundle` wrote; get it again"
        ) from error
    except damage as error:
        raise BadFileError(f"{archive}: was changed or cut off ({error}); get it again") from error
    return bundle


class _ChangedError(Exception):
    """The archive is not one that ``write`` wrote."""


def _read_manifest(stream: BinaryIO) -> Bundle:
    header = _read(stream, _BLOCK)
    try:
        size = tarfile.TarInfo.frombuf(header, "utf-8", "surrogateescape").size
    except tarfile.HeaderError as error:
        raise _ChangedError(f"does not begin with {MANIFEST}") from error
    if header != _header(MANIFEST, Member(size, "")):
        raise _ChangedError(f"does not begin with {MANIFEST}")
    if size > MAX_SMALL_BYTES:
        raise _ChangedError(f"{MANIFEST} has {size:,} bytes, over {MAX_SMALL_BYTES:,}")
    text = _read(stream, size)
    _skip_padding(stream, size)
    try:
        data = json.loads(text)
        is_ours = isinstance(data, dict) and json_text(data).encode() == text
    except (ValueError, RecursionError):
        is_ours = False
    if not is_ours:
        raise _ChangedError(f"{MANIFEST} was changed")
    content = data.pop("content", None)
    if data.get("version") != VERSION:
        raise _ChangedError(f"version is {data.get('version')!r} and this hpc-train reads {VERSION}")
    facts, members = decoded(BundleFacts, data.get("run")), data.get("files")
    is_plain = facts is not None and all(is_plain_path(named.path) for named in facts.inputs.values())
    if content != _content(data) or facts is None or not (is_plain and isinstance(members, dict)):
        raise _ChangedError(f"{MANIFEST} was changed")
    return Bundle(facts, content, dict(_members(members)))


def _members(entries: Mapping[str, Any]) -> Iterator[tuple[str, Member]]:
    if list(entries) != sorted(entries):
        raise _ChangedError(f"the files in {MANIFEST} are not sorted")
    for path, entry in entries.items():
        member = decoded(Member, entry)
        if member is None or not is_plain_path(path):
            raise _ChangedError(f"{MANIFEST} has {path!r}, not a path below a folder with a hash")
        yield path, member


def _extract(stream: BinaryIO, path: str, member: Member, target: Path, folders: set[Path]) -> None:
    """Write a member into a new file; no link is followed, since the archive creates none."""
    if _read(stream, _BLOCK) != _header(path, member):
        raise _ChangedError(f"{path}: its tar header was changed")
    digest = hashlib.sha256()
    try:
        _make(target.parent, folders)
        mode = 0o700 if member.is_executable else 0o600
        descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode)
    except (FileExistsError, NotADirectoryError) as error:
        raise _ChangedError(f"{path}: is in it twice, or is a file and a folder") from error
    with os.fdopen(descriptor, "wb") as file:
        for begin in range(0, member.size, _BYTES_AT_A_TIME):
            block = _read(stream, min(_BYTES_AT_A_TIME, member.size - begin))
            digest.update(block)
            file.write(block)
    if digest.hexdigest() != member.sha256:
        raise _ChangedError(f"{path}: its SHA-256 is not the one in {MANIFEST}")
    _skip_padding(stream, member.size)


def _make(folder: Path, folders: set[Path]) -> None:
    """Create a folder and those above it, closed to other users, and add them to ``folders``."""
    if folder not in folders:
        _make(folder.parent, folders)
        folder.mkdir(mode=0o700)
        folders.add(folder)


def _skip_padding(stream: BinaryIO, size: int) -> None:
    padding = _padding(size)
    if _read(stream, len(padding)) != padding:
        raise _ChangedError("bytes between two members were changed")


def _read(stream: BinaryIO, size: int) -> bytes:
    """Return exactly ``size`` bytes. Raises EOFError if the archive ends before."""
    parts = []
    while size and (part := stream.read(size)):
        parts.append(part)
        size -= len(part)
    if size:
        raise EOFError("it ends early")
    return b"".join(parts)


@contextmanager
def _stream(file: BinaryIO, suffix: str, mode: Literal["rb", "wb"]) -> Iterator[BinaryIO]:
    """Compress or decompress within the context; ``file`` remains open."""
    if suffix == ".tar":
        yield file
        return
    if suffix == ".tar.gz":
        opened: Any = gzip.GzipFile("", mode, 6, file, mtime=0)
    elif suffix == ".tar.xz":
        opened = lzma.LZMAFile(file, mode, preset=1 if mode == "wb" else None)  # noqa: SIM115
    else:
        opened = _zstd_file(file, mode)
    with opened as stream:
        yield stream


def _zstd_library() -> Any:
    """Return Python's module (from 3.14 on) or ``zstandard``, which both have ``ZstdError``."""
    try:
        if sys.version_info >= (3, 14):
            from compression import zstd
        else:
            import zstandard as zstd
    except ImportError as error:
        raise UsageError(
            "a bundle .tar.zst needs Python 3.14 or `pip install 'hpc-train[zstd]'`; or write one .tar.gz"
        ) from error
    return zstd


def _zstd_file(file: BinaryIO, mode: Literal["rb", "wb"]) -> Any:
    library = _zstd_library()
    if hasattr(library, "ZstdFile"):
        checksum = {library.CompressionParameter.checksum_flag: 1}
        return library.ZstdFile(file, mode, **({"options": checksum} if mode == "wb" else {}))
    if mode == "wb":
        return library.ZstdCompressor(write_checksum=True).stream_writer(file, closefd=False)
    return library.ZstdDecompressor().stream_reader(file, closefd=False)
