"""Selects the files of a run's code: ``hpc_train`` itself and the git work tree around the current folder.

No program that the settings of a repository name is run.
"""

from __future__ import annotations

import os
import re
import stat
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from itertools import pairwise
from pathlib import Path, PurePosixPath
from typing import Any, NoReturn

import hpc_train
from hpc_train.errors import UsageError

MAX_FILE_MB = 16
MAX_TOTAL_MB = 64
MAX_FILES = 20_000
#: Without git: the suffixes of code and of its settings; JSON may also be data.
CODE_SUFFIXES = (
    ".py", ".pyi", ".sh", ".yaml", ".yml", ".toml", ".ini", ".cfg",
    ".c", ".cc", ".cpp", ".cu", ".cuh", ".h", ".hpp",
)  # fmt: skip
MAX_SETTINGS_MB = 1
#: Number of entries after which a walk without git gives up.
_MAX_WALKED = 200_000
_MB = 1 << 20

_SECRET_NAMES = (
    ".env.*", "*.env", ".envrc", ".netrc", "_netrc", ".npmrc", ".pypirc", ".pgpass", ".my.cnf",
    ".boto", ".s3cfg", ".dockercfg", ".htpasswd", "kaggle.json", "credentials*", "client_secret*",
    "*service[-_]account*.json", "secrets.*", "*.pem", "*.key", "*.p12", "*.pfx", "*.jks",
    "*.keystore", "*.kdbx", "*.ppk", "*.ovpn", "id_rsa*", "id_dsa*", "id_ecdsa*", "id_ed25519*",
    "*_rsa", "*_dsa", "*_ecdsa", "*_ed25519", "rclone.conf", "*.tfstate", "*.tfstate.*", "*.tfvars",
    "*.tfvars.json", "*.agekey", "*.gpg", "*.asc", "auth.json",
)  # fmt: skip
#: A file with such a word in its name, except source code and its documentation.
_SECRET_WORDS = {
    "secret", "secrets", "password", "passwords", "passwd", "passphrase", "credential", "credentials",
    "creds", "apikey", "apikeys", "accesskey", "accesskeys", "privatekey", "privatekeys",
}  # fmt: skip
#: Likewise two consecutive words, as in ``api_keys.json``.
_SECRET_PAIRS = {
    (first, last)
    for first in ("api", "access", "private", "signing", "ssh", "encryption")
    for last in ("key", "keys")
}
#: Likewise the last word (``wandb_key``, ``hf_token.txt``) if the suffix is that of settings, or missing.
#: Only the singular: ``tokens.json`` and ``keys.json`` are data.
_SECRET_LAST_WORDS = {"key", "token", "pat", "pw", "pwd"}
_SETTINGS_SUFFIXES = {"", ".txt", ".json", ".yaml", ".yml", ".toml", ".ini", ".cfg", ".conf"}
_SOURCE_SUFFIXES = {
    ".py", ".pyi", ".pyx", ".ipynb", ".c", ".cc", ".cpp", ".cu", ".cuh", ".h", ".hpp", ".rs", ".go", ".js",
    ".ts", ".md", ".rst",
}  # fmt: skip
_WORD = re.compile(r"[a-z0-9]+")
#: The marker and the beginning of the key itself: code may search for the marker alone. In JSON the lines are
#: separated by an escape.
_PRIVATE_KEY = re.compile(
    rb"-----BEGIN (?:[A-Z0-9]+ )*PRIVATE KEY(?: BLOCK)?-----(?:\\[rn]|[\s\"'+])*[A-Za-z0-9+/=:-]{8}"
)
_SECRET_FOLDERS = {".ssh", ".aws", ".gnupg", ".kaggle", ".docker", ".azure", ".kube", ".gcloud"}
_SECRET_PATHS = ("wandb/settings", "gcloud/*")


@dataclass(frozen=True)
class Selection:
    """The files of a work tree, listed but not read."""

    root: Path
    #: The current folder, relative to ``root``; empty for the root.
    cwd: str
    #: Relative path → the file's status when it was listed.
    files: dict[str, os.stat_result] = field(default_factory=dict)
    #: Relative path → target, relative to the link; all targets are files or folders of the selection.
    links: dict[str, str] = field(default_factory=dict)
    #: Relative path → why the file is excluded from the snapshot.
    left_out: dict[str, str] = field(default_factory=dict)


def select(folder: Path, excluded: Sequence[Path]) -> Selection:
    """Find the code around ``folder``, without ``excluded`` ones. Raises UsageError if it is too much."""
    tree = work_tree_around(folder)
    root = Path(os.path.realpath(folder)) if tree is None else tree.root
    selection = Selection(root, "" if tree is None else tree.folder)
    cwd = root / selection.cwd
    absolute = [cwd / folder for folder in excluded]
    spellings = [Path(place(folder)) for folder in absolute for place in (os.path.realpath, os.path.normpath)]
    inside = {_relative(folder, root) for folder in spellings if not cwd.is_relative_to(folder)}
    outside = sorted(name for name in inside if name)
    files = _walked(root, outside) if tree is None else listed_files(root, outside)
    selected = [path for path in files if not _is_below(path, outside)]
    marks = ("/pyvenv.cfg", "/conda-meta/history")  # of virtual environments that git does not ignore
    folders = [path.removesuffix(mark) for path in selected for mark in marks if path.endswith(mark)]
    selected = [path for path in selected if not _is_below(path, folders)] if folders else selected
    if len(selected) > MAX_FILES:
        raise _too_much(root, Counter(map(_top, selected)), len(selected), None)
    _look_at(selection, selected)
    total = sum(seen.st_size for seen in selection.files.values())
    if total > MAX_TOTAL_MB * _MB:
        sizes = Counter[str]()
        for path, seen in selection.files.items():
            sizes[path] += seen.st_size
        raise _too_much(root, sizes, len(selected), total)
    return selection


def package_files() -> dict[str, Path]:
    """Return the files of ``hpc_train`` by path in its parent, without the recipes of ``init``."""
    package = str(Path(hpc_train.__file__).parent)
    above = len(package) - len("hpc_train")
    recipes = f"{package}/cli/examples"
    files = {}
    for folder, subfolders, names in walk(package):
        subfolders[:] = [
            name for name in subfolders if name != "__pycache__" and f"{folder}/{name}" != recipes
        ]
        for path in (f"{folder}/{name}" for name in names if not name.startswith(".")):
            if os.path.isfile(path):  # noqa: PTH113
                files[path[above:]] = Path(path)
    return files


def walk(folder: str | Path) -> Iterator[tuple[str, list[str], list[str]]]:
    """Walk as ``os.walk`` does, in an eighth of ``Path.rglob``'s time. Raises OSError, unlike it."""

    def fail(error: OSError) -> NoReturn:
        raise error

    return os.walk(folder, onerror=fail)


def import_folders(selection: Selection) -> list[str]:
    """Return further folders within the tree, besides its root and ``cwd``, from which modules are imported.

    They come from PYTHONPATH and from packages installed in editable mode, as with ``src/``.
    """
    places = [Path(entry or ".") for entry in sys.path]
    for name, module in list(sys.modules.items()):
        if name.startswith("__editable__"):  # setuptools' finder; its mapping: a package's name → its folder
            places += [Path(path).parent for path in getattr(module, "MAPPING", {}).values()]
    folders = [_relative(Path(os.path.realpath(place)), selection.root) for place in places]
    names = [name for name in dict.fromkeys(folders) if name and name != selection.cwd]
    return [name for name in names if any(path.startswith(f"{name}/") for path in selection.files)]


def has_changed(selection: Selection) -> bool:
    """Return True if a file has changed since it was listed."""
    return any(
        _signature(seen) != _signature(_lstat(selection.root / path))
        for path, seen in selection.files.items()
    )


def _signature(seen: os.stat_result | None) -> tuple[int, int, int] | None:
    return None if seen is None else (seen.st_ino, seen.st_size, seen.st_mtime_ns)


def _relative(path: Path, root: Path) -> str | None:
    if not path.is_relative_to(root):
        return None
    relative = str(path.relative_to(root))
    return "" if relative == "." else relative


def _is_below(path: str, folders: Iterable[str]) -> bool:
    return any(path == folder or path.startswith(f"{folder}/") for folder in folders)


def _walked(root: Path, outside: Sequence[str]) -> Iterator[str]:
    """Yield files with ``CODE_SUFFIXES``, and small ``*.json`` beside them, without hidden folders and
    installed packages.
    """
    num_seen = 0
    for folder, subfolders, names in os.walk(root):
        if folder != str(root) and ("pyvenv.cfg" in names or "conda-meta" in subfolders):
            subfolders.clear()
            continue
        num_seen += len(subfolders) + len(names)
        if num_seen > _MAX_WALKED:
            raise UsageError(
                f"{root}: more than {_MAX_WALKED:,} files and folders are in it, too many to search; "
                "start in the folder that contains the code, or make that a git work tree"
            )
        inner = PurePosixPath(os.path.relpath(folder, root))
        inner_names = sorted(set(subfolders) - {*NO_CODE, "site-packages"})
        subfolders[:] = [name for name in inner_names if name[0] != "." and str(inner / name) not in outside]
        code = [name for name in names if name.endswith(CODE_SUFFIXES)]
        settings = [name for name in names if code and name.endswith(".json")]
        small = [name for name in settings if _size(Path(folder, name)) <= MAX_SETTINGS_MB * _MB]
        yield from (str(inner / name) for name in sorted(code + small))


def _look_at(selection: Selection, paths: Iterable[str]) -> None:
    links = []
    for path in paths:
        seen = _lstat(selection.root / path)
        if seen is None or stat.S_ISDIR(seen.st_mode):
            continue  # tracked but deleted; a submodule that is not checked out
        if is_secret(path):
            selection.left_out[path] = "may contain a secret"
        elif stat.S_ISLNK(seen.st_mode):
            links.append(path)
        elif not stat.S_ISREG(seen.st_mode):
            selection.left_out[path] = "is not a file"
        elif seen.st_size > MAX_FILE_MB * _MB:
            selection.left_out[path] = f"{seen.st_size // _MB} MB, over {MAX_FILE_MB} MB"
        else:
            selection.files[path] = seen
    _look_at_links(selection, links)


def _look_at_links(selection: Selection, paths: Iterable[str]) -> None:
    """Keep links to selected files, as relative links; no link leads out of the tree."""
    folders = {str(parent) for path in selection.files for parent in PurePosixPath(path).parents}
    for path in paths:
        target = _relative(Path(os.path.realpath(selection.root / path)), selection.root)
        if target is not None and (target in selection.files or (target or ".") in folders):
            selection.links[path] = os.path.relpath(target or ".", os.path.dirname(path) or ".")  # noqa: PTH120
        else:
            selection.left_out[path] = "leads to what is not in the snapshot"


def is_secret(path: str) -> bool:
    """Return True if the name of a file, relative to its tree, suggests that it contains a secret."""
    lowered = PurePosixPath(path.lower())
    if _SECRET_FOLDERS & set(lowered.parts) or any(lowered.match(pattern) for pattern in _SECRET_PATHS):
        return True
    if lowered.suffix == ".py":  # a module of such a name is code that would be missed
        return False
    return any(fnmatch(lowered.name, pattern) for pattern in _SECRET_NAMES) or _names_secret(lowered)


def _names_secret(path: PurePosixPath) -> bool:
    if path.suffix in _SOURCE_SUFFIXES:
        return False
    parts = _WORD.findall(path.name)
    if _SECRET_WORDS & set(parts) or _SECRET_PAIRS & set(pairwise(parts)):
        return True
    last = _WORD.findall(path.stem)[-1:]
    return path.suffix in _SETTINGS_SUFFIXES and bool(_SECRET_LAST_WORDS & set(last))


def holds_private_key(content: bytes) -> bool:
    """Return True if a file contains a private key, whatever its name."""
    return _PRIVATE_KEY.search(content) is not None


def _lstat(path: Path) -> os.stat_result | None:
    try:
        return path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return None


def _size(path: Path) -> int:
    seen = _lstat(path)
    return 0 if seen is None else seen.st_size


def _top(path: str) -> str:
    """Return the folder, at most two levels deep, that contains a file."""
    parts = PurePosixPath(path).parts
    return "/".join(parts[:2]) + "/" if len(parts) > 2 else parts[0]


def _too_much(root: Path, weights: Counter[str], num_files: int, total: int | None) -> UsageError:
    heaviest = weights.most_common(5)
    if total is None:
        named = ", ".join(f"{path} ({count:,} files)" for path, count in heaviest)
        what = f"{num_files:,} files, and a snapshot takes at most {MAX_FILES:,}; most are in {named}"
    else:
        named = ", ".join(f"{path} ({size / _MB:.1f} MB)" for path, size in heaviest)
        what = (
            f"{total / _MB:.0f} MB, and a snapshot takes at most {MAX_TOTAL_MB} MB; the largest are {named}"
        )
    return UsageError(
        f"{root}: the code here is {what}; add what is not code to .gitignore, "
        "or start in a folder that contains only the code"
    )


#: Assumed: git answers quickly except for huge work trees on slow disks.
_ASK_LIMIT_S = 5.0
_LIST_LIMIT_S = 60.0
#: Never fetch objects of a partial clone, never ask for a password.
_ENVIRONMENT = {"GIT_ALLOW_PROTOCOL": "none", "GIT_NO_LAZY_FETCH": "1", "GIT_TERMINAL_PROMPT": "0"}
#: Untracked folders that never belong in a snapshot, whether git ignores them or not.
NO_CODE = (
    "__pycache__", "node_modules", ".venv", ".tox", ".nox", ".eggs", ".cache", ".mypy_cache", ".pytest_cache",
    ".ruff_cache", ".ipynb_checkpoints", "wandb",
)  # fmt: skip


@dataclass(frozen=True)
class WorkTree:
    """A work tree, and the position of the folder in it."""

    root: Path
    #: Relative to ``root``; empty for itself.
    folder: str


def work_tree_around(folder: Path) -> WorkTree | None:
    """Return None if there is no work tree, git is missing, or git does not trust the owner."""
    output = _git(folder, "rev-parse", "--is-inside-work-tree", "--show-prefix")
    if output is None or not output.startswith(b"true\n"):
        return None
    prefix = os.fsdecode(output.removeprefix(b"true\n").removesuffix(b"\n")).strip("/")
    root = Path(os.path.realpath(folder))
    for _ in filter(None, prefix.split("/")):
        root = root.parent
    return WorkTree(root, prefix)


def listed_files(root: Path, excluded: Sequence[str]) -> Iterator[str]:
    """Yield the tracked and not-ignored files, relative to ``root``, including nested work trees.

    ``excluded``: folders relative to ``root`` that are not searched; tracked files in them are listed. Raises
    UsageError if git fails or does not finish.
    """
    patterns = [*(f"{name}/" for name in NO_CODE), *(f"/{_escaped(folder)}/" for folder in excluded)]
    arguments = [argument for pattern in patterns for argument in ("-x", pattern)]
    output = _git(root, "ls-files", "-co", "--exclude-standard", "-z", *arguments, limit_s=_LIST_LIMIT_S)
    if output is None:
        raise UsageError(
            f"{root}: git did not list the files of this work tree, or not within {_LIST_LIMIT_S:g} s; see "
            "what `git status` says there, and add what is not code to .gitignore"
        )
    for path in dict.fromkeys(os.fsdecode(name) for name in output.split(b"\0") if name):
        if (root / path / ".git").exists():  # a submodule, or a clone inside
            nested = path.rstrip("/")
            within = [path.removeprefix(f"{nested}/") for path in excluded if path.startswith(f"{nested}/")]
            yield from (f"{nested}/{file}" for file in listed_files(root / nested, within))
        elif not path.endswith("/"):
            yield path


def commit_of(folder: Path) -> dict[str, Any] | None:
    """Return the commit of the work tree around ``folder`` and whether files differ from it."""
    commit = _git(folder, "rev-parse", "-q", "--verify", "HEAD")
    if commit is None:
        return None
    # Keep `status` from running the programs that a repository's filters name.
    output = _git(folder, "config", "-z", "--name-only", "--get-regexp", r"^filter\..*\.(clean|process)$")
    names = [name for name in os.fsdecode(output or b"").split("\0") if name]
    filters = {name.rpartition(".")[0] for name in names}
    off = [*(f"{name}=" for name in names), *(f"{name}.required=false" for name in filters)]
    options = [argument for setting in off for argument in ("-c", setting)]
    changed = _git(folder, *options, "status", "--porcelain", "--untracked-files=no")
    return {"commit": commit.decode().strip(), "dirty": None if changed is None else bool(changed.strip())}


def _escaped(folder: str) -> str:
    return "".join(f"\\{char}" if char in "\\*?[! #" else char for char in folder)


def _git(folder: Path, *arguments: str, limit_s: float = _ASK_LIMIT_S) -> bytes | None:
    # A repository's settings may name programs to run: any command that reads files starts fsmonitor.
    command = ["git", "--no-optional-locks", "-c", "core.fsmonitor=false", *arguments]
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            env=os.environ | _ENVIRONMENT,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=limit_s,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
