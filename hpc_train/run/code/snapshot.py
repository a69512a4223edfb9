"""The snapshot of the code that a run uses: taken at submit, first on the ranks' path (``code``).

``runs/.code/<content>/`` contains ``package/hpc_train/``, ``tree/`` and ``snapshot.json``; ``code`` links
there, or is a file with the path if the file system has no symbolic links.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from hpc_train.errors import StorageError, UserError
from hpc_train.paths import RunPaths
from hpc_train.run import files
from hpc_train.run.code import code_files
from hpc_train.run.code.code_files import commit_of
from hpc_train.run.trust import check_holder, check_own

_VERSION = 1
_MANIFEST = "snapshot.json"
#: Longer than any path on Linux.
_MAX_PATH_BYTES = 1 << 13
_PACKAGE = "package"
#: Folder of the work tree in a snapshot.
TREE = "tree"
#: Maximum number of readings if files change meanwhile; after that, a growing file is taken as it is.
_TRIES = 3
#: A submit takes its snapshot before it creates the runs that link to it. Assumed.
MIN_AGE_S = 3600.0
#: Maximum number of files that a message names.
_NAMED = 5


@dataclass(frozen=True)
class Code:
    """The code as it was read. Paths are within the snapshot, ``tree/…`` and ``package/…``."""

    #: The current folder, relative to the tree; empty for the root.
    cwd: str
    #: Further folders of the tree from which modules are imported.
    search_path: list[str]
    files: dict[str, bytes]
    executables: set[str] = field(default_factory=set)
    links: dict[str, str] = field(default_factory=dict)
    commit: dict[str, Any] | None = None
    #: Excluded files: path relative to the tree → why.
    left_out: dict[str, str] = field(default_factory=dict)

    @cached_property
    def hashes(self) -> dict[str, str]:
        """Path → SHA-256."""
        return {path: hashlib.sha256(content).hexdigest() for path, content in sorted(self.files.items())}

    @cached_property
    def content(self) -> str:
        """The snapshot's name: a hash of everything that affects imports."""
        parts = [_VERSION, self.cwd, self.search_path, self.hashes, sorted(self.executables), self.links]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]

    def manifest(self) -> dict[str, Any]:
        """Return the content of ``snapshot.json``, which has the files' hashes."""
        commit = self.commit or {"commit": None, "dirty": None}
        return {
            "version": _VERSION,
            "content": self.content,
            "cwd": self.cwd,
            "search_path": self.search_path,
            "files": self.hashes,
            "links": self.links,
            **commit,
            "left_out": self.left_out,
        }


@dataclass(frozen=True)
class Differences:
    """The differences between a snapshot and an older one; paths as in ``Code``."""

    added: list[str]
    changed: list[str]
    removed: list[str]

    def __bool__(self) -> bool:
        return bool(self.added or self.changed or self.removed)

    def words(self, than: str = "") -> str:
        """Return ``3 files differ: a.py, b.py (new), c.py (gone)``, with ``than`` after the verb."""
        marks = [(path, "") for path in self.changed]
        marks += [(path, " (new)") for path in self.added] + [(path, " (gone)") for path in self.removed]
        users_files = [
            path.removeprefix(f"{TREE}/") + mark for path, mark in marks if path.startswith(f"{TREE}/")
        ]
        named = [*users_files[:_NAMED], *(["…"] if len(users_files) > _NAMED else [])]
        if num_others := len(marks) - len(users_files):
            named.append(f"hpc-train itself ({num_others} files)" if num_others > 1 else "hpc-train itself")
        count = "1 file differs" if len(marks) == 1 else f"{len(marks)} files differ"
        return f"{count}{than}: {', '.join(named)}" if marks else f"nothing differs{than}"


def read(cwd: Path, exclude: Sequence[Path]) -> Code:
    """Read ``hpc_train`` and the code around ``cwd``, without ``exclude``. UsageError if too large."""
    for _ in range(_TRIES):
        selection = code_files.select(cwd, exclude)
        code = _read(selection)
        if not code_files.has_changed(selection):
            break
    return code


def _read(selection: code_files.Selection) -> Code:
    left_out = dict(selection.left_out)
    contents = {
        f"{_PACKAGE}/{path}": source.read_bytes() for path, source in code_files.package_files().items()
    }
    executables = set()
    for path, seen in selection.files.items():
        try:
            content = _read_file(selection.root / path)
        except FileNotFoundError:
            continue  # removed since it was listed
        except OSError as error:
            left_out[path] = error.strerror or str(error)
            continue
        if code_files.holds_private_key(content):
            left_out[path] = "contains a private key"
            continue
        contents[f"{TREE}/{path}"] = content
        if seen.st_mode & stat.S_IXUSR:
            executables.add(f"{TREE}/{path}")
    return Code(
        cwd=selection.cwd,
        search_path=code_files.import_folders(selection),
        files=contents,
        executables=executables & contents.keys(),
        links={f"{TREE}/{path}": target for path, target in selection.links.items()},
        commit=commit_of(selection.root),
        left_out=left_out,
    )


def _read_file(path: Path) -> bytes:
    descriptor = os.open(
        path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
    )  # it may have been replaced by a pipe
    with os.fdopen(descriptor, "rb") as file:
        return file.read()


def place(root: Path, code: Code) -> Path:
    """Write ``code`` below ``root`` atomically, unless it exists."""
    folder = root / code.content
    if folder.exists():
        os.utime(folder)  # `clean` does not remove a snapshot that a submit has just requested
        check_owner(folder)
        check_whole(folder)
        return folder
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        files.create_folder(folder, lambda temporary: _write(temporary, code), mode=0o700, syncs_parent=False)
    except OSError as error:
        error.filename = error.filename or str(root)  # an error of a write to an open file names no file
        raise
    files.sync_folder(root)  # also if another process was first
    return folder


def _write(folder: Path, code: Code) -> None:
    """Write the snapshot: its folders closed to other users, every file synced to survive a power failure."""
    folders = {folder}
    for path in [f"{TREE}/.", *code.files, *code.links]:
        _make_parents((folder / path).parent, folders)
    (folder / TREE).mkdir(mode=0o700, exist_ok=True)
    for path, content in code.files.items():
        mode = 0o500 if path in code.executables else 0o400
        descriptor = os.open(folder / path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
    for path, target in code.links.items():
        try:
            (folder / path).symlink_to(target)
        except OSError as error:
            if not files.is_unsupported(error):
                raise
            raise StorageError(
                f"{folder.parent}: this file system has no symbolic links, and {path} is one in your code; "
                "replace it by a file, or set HPC_TRAIN_RUNS to a folder on another file system"
            ) from error
    # 250 files take 0.04 s in parallel, one by one 1 s (measured).
    files.in_parallel(files.sync_folder, [folder / path for path in code.files] + sorted(folders))
    files.write_json(folder / _MANIFEST, code.manifest(), sync=True)
    try:
        (folder / _MANIFEST).chmod(0o400)
    except OSError as error:  # a precaution: the folder is closed to others by its own mode
        if not files.is_unsupported(error):
            raise
        files.report_unsupported("chmod", "files keep the permissions that the mount gives them")


def _make_parents(folder: Path, folders: set[Path]) -> None:
    if folder not in folders:
        _make_parents(folder.parent, folders)
        folder.mkdir(mode=0o700)
        folders.add(folder)


def check_whole(folder: Path) -> None:
    """Raise StorageError if a file is missing or its SHA-256 is not the manifest's."""
    for path, expected in _manifest(folder)["files"].items():
        try:
            with files.open_regular(folder / path) as file:
                digest = hashlib.sha256(file.read()).hexdigest()
        except (FileNotFoundError, files.UnreadableFileError):
            digest = None
        if digest != expected:
            raise StorageError(
                f"{folder / path}: differs from what was written there; move {folder} away and submit again; "
                "runs that use it continue with `hpc-train resume RUN --code new`"
            )


def load(folder: Path) -> Code:
    """Return the code of a snapshot, which may be somebody else's.

    Raises StorageError if a file is not what the manifest states, or a path leads out of the snapshot.
    """
    manifest = _manifest(folder)
    for path in _paths_in(manifest):
        if not (files.is_plain_path(path) and f"{path}/".startswith((f"{_PACKAGE}/", f"{TREE}/"))):
            raise StorageError(f"{folder / _MANIFEST}: {path!r} leads out of the snapshot")
    check_whole(folder)
    contents = {path: (folder / path).read_bytes() for path in manifest["files"]}
    return Code(
        cwd=manifest["cwd"],
        search_path=manifest["search_path"],
        files=contents,
        executables={path for path in contents if (folder / path).stat().st_mode & stat.S_IXUSR},
        links=manifest["links"],
        commit={key: manifest.get(key) for key in ("commit", "dirty")},
        left_out=manifest["left_out"],
    )


def _paths_in(manifest: Mapping[str, Any]) -> Iterator[str]:
    """Yield the paths that a manifest names, within the snapshot: of files, links, targets and imports."""
    yield from [*manifest["files"], *manifest["links"]]
    for inner in (manifest["cwd"], *manifest["search_path"]):
        yield f"{TREE}/{inner}" if inner else TREE
    for path, target in manifest["links"].items():
        place = os.path.normpath(os.path.join(os.path.dirname(path), target))  # noqa: PTH118, PTH120
        # Behind another link ".." would lead elsewhere than it seems.
        yield place if target == os.path.normpath(target) else target


def link(paths: RunPaths, snapshot: Path) -> None:
    """Link the snapshot into the run folder; without symbolic links, write a file with its path."""
    if paths.code.is_dir() and not paths.code.is_symlink():  # the run was copied with its links followed
        files.remove_folder(paths.code)
    temporary = files.hidden_beside(paths.code)
    target = os.path.relpath(snapshot, paths.folder)
    try:
        temporary.symlink_to(target)
    except OSError as error:
        if not files.is_unsupported(error):
            raise
        files.write_text(temporary, f"{target}\n", sync=True)
    temporary.replace(paths.code)


def link_target(paths: RunPaths) -> Path | None:
    """Return the path of the snapshot as ``link`` wrote it, relative to the run folder; None without one."""
    if paths.code.is_symlink():
        return paths.code.readlink()
    return Path(files.read_text(paths.code, _MAX_PATH_BYTES).strip()) if paths.code.is_file() else None


def linked(paths: RunPaths) -> Path | None:
    """Return the run's snapshot, None if it has none. Raises StorageError if it is gone."""
    if not os.path.lexists(paths.code):
        return None
    # Links further up are not resolved: a node may mount their targets elsewhere. A folder in place of the
    # link is a copy of the snapshot, from a copy of the run with its links followed.
    target = link_target(paths) or paths.code.name
    folder = Path(os.path.normpath(paths.folder.absolute() / target))
    if _read_manifest(folder) is None:
        folder = Path(os.path.realpath(paths.code))  # unlike resolve, it accepts a link that leads to itself
    if _read_manifest(folder) is None:
        raise StorageError(
            f"{paths.code}: the code that this run uses is gone; take the current one with "
            f"`hpc-train resume {paths.folder.name} --code new`"
        )
    return folder


def content_of(folder: Path) -> str:
    """Return the name that a snapshot of the same content has."""
    return str(_manifest(folder)["content"])


def search_path(paths: RunPaths) -> list[str]:
    """Return the entries to put first on the ranks' PYTHONPATH; empty if the run has no snapshot."""
    folder = linked(paths)
    if folder is None:
        return []
    manifest = _manifest(folder)
    tree = [folder / TREE / inner for inner in (manifest["cwd"], "", *manifest["search_path"])]
    entries = list(dict.fromkeys(str(entry) for entry in [folder / _PACKAGE, *tree]))
    if bad := [entry for entry in entries if os.pathsep in entry]:
        raise UserError(
            f"{bad[0]}: Python can't import modules from it because of the {os.pathsep!r}; rename it"
        )
    return entries


def folder_in_tree(folder: Path) -> str:
    """Return the folder of ``submit`` relative to the snapshot's tree; empty for its root."""
    return str(_manifest(folder)["cwd"])


def check_owner(folder: Path) -> None:
    """Raise UntrustedError if another user could have written files in ``folder``, or can replace it."""
    check_holder(folder.parent)
    # Files that imports cache there have the usual modes, and are unreachable if the folder is closed.
    is_closed = not folder.stat().st_mode & 0o077
    check_own(folder)
    for parent, folders, names in code_files.walk(folder):
        if is_closed:
            folders[:] = [name for name in folders if name != "__pycache__"]
        for name in (*folders, *names):
            check_own(Path(f"{parent}/{name}"))


def differences(old: Path | Code, new: Path | Code) -> Differences:
    """Compare two snapshots, links by their target."""
    before, after = _contents(old), _contents(new)
    return Differences(
        added=sorted(after.keys() - before.keys()),
        changed=sorted(path for path in before.keys() & after.keys() if before[path] != after[path]),
        removed=sorted(before.keys() - after.keys()),
    )


def _contents(snapshot: Path | Code) -> dict[str, str]:
    manifest = snapshot.manifest() if isinstance(snapshot, Code) else _manifest(snapshot)
    links = {path: f"link to {target}" for path, target in manifest["links"].items()}
    return {**manifest["files"], **links}


def _manifest(folder: Path) -> dict[str, Any]:
    manifest = _read_manifest(folder)
    if manifest is None:
        raise StorageError(f"{folder / _MANIFEST}: missing or not what was written there")
    return manifest


def _read_manifest(folder: Path) -> dict[str, Any] | None:
    manifest = files.read_json(folder / _MANIFEST)
    return manifest if manifest is not None and manifest.get("version") == _VERSION else None


def unused_snapshots(snapshots: Path) -> list[Path]:
    """Return the entries of ``runs/.code`` that no run below ``runs`` links to, except recent ones.

    Raises OSError if a folder of this user can't be read: a run in it may use any of them. Other users' runs
    have their own snapshots.
    """
    if not snapshots.is_dir():
        return []
    old = [path for path in snapshots.iterdir() if _is_old_folder(path)]
    used = set(_used(snapshots.parent)) if old else set()
    return sorted(path for path in old if not {_normal(path), _real(path)} & used)


def _is_old_folder(path: Path) -> bool:
    try:
        seen = path.lstat()
    except FileNotFoundError:
        return False
    return path.is_dir() and not path.is_symlink() and time.time() - seen.st_mtime > MIN_AGE_S


def _used(runs: Path) -> Iterator[Path]:
    """Yield the targets of the runs' links, including runs that are still being created."""
    for experiment in _folders(runs):
        for run in _folders(experiment):
            code = RunPaths(run).code
            if code.is_symlink():
                yield _normal(run / code.readlink())
                yield _real(code)


def _folders(parent: Path) -> list[Path]:
    try:
        return [path for path in parent.iterdir() if path.is_dir()]
    except PermissionError:
        if parent.stat().st_uid == os.geteuid():
            raise
        return []


def _real(path: Path) -> Path:
    """Return the path with links resolved; keeps a link to itself, for which ``Path.resolve`` raises."""
    return Path(os.path.realpath(path))


def _normal(path: Path) -> Path:
    """Return the path without ``..``, with links kept, as ``snapshot.linked`` does."""
    return Path(os.path.normpath(path.absolute()))
