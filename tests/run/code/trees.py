"""Folders of code, with git and without."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from hpc_train.run.code import snapshot

_IDENTITY = {
    "GIT_AUTHOR_NAME": "a",
    "GIT_AUTHOR_EMAIL": "a@example.org",
    "GIT_COMMITTER_NAME": "a",
    "GIT_COMMITTER_EMAIL": "a@example.org",
    "GIT_CONFIG_GLOBAL": "/dev/null",
}


def git(folder: Path, *arguments: str) -> str:
    done = subprocess.run(
        ["git", *arguments],
        cwd=folder,
        env=os.environ | _IDENTITY,
        check=True,
        capture_output=True,
        text=True,
    )
    return done.stdout.strip()


def write(folder: Path, *files: str) -> None:
    """Write each file, with its own path in it."""
    for file in files:
        path = folder / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(os.fsencode(file))


def work_tree(folder: Path, *files: str, ignored: str = "") -> Path:
    """Make a work tree with these files committed."""
    folder.mkdir(parents=True, exist_ok=True)
    git(folder, "init", "-q")
    write(folder, *files)
    if ignored:
        (folder / ".gitignore").write_text(ignored)
    git(folder, "add", "-Af")
    git(folder, "commit", "-q", "-m", "one", "--allow-empty")
    return folder


def take(root: Path, cwd: Path) -> Path:
    """Return the snapshot of the code around ``cwd`` below ``root``; written unless it exists."""
    return snapshot.place(root, snapshot.read(cwd, []))
