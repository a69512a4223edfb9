"""The git work tree around a folder: files and commit, without running programs that its settings name."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpc_train.errors import UsageError

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
    """Return git's output; None if it fails, is missing or does not answer in time."""
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
