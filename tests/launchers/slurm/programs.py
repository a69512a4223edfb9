"""Slurm's programs as scripts of a few lines: for what a real Slurm can't be brought to say."""

from __future__ import annotations

from pathlib import Path

import pytest


class Programs:
    """Scripts that come before all others on PATH, and how often each was called."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()

    def put(self, name: str, script: str) -> None:
        path = self.folder / name
        path.write_text(f'#!/bin/bash\necho "$@" >> {self.folder}/{name}.calls\n{script}\n')
        path.chmod(0o755)

    def calls(self, name: str) -> list[str]:
        path = self.folder / f"{name}.calls"
        return path.read_text().splitlines() if path.exists() else []


def put_programs_first(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Programs:
    programs = Programs(folder / "bin")
    monkeypatch.setenv("PATH", f"{programs.folder}:/usr/bin:/bin")
    monkeypatch.setenv("HPC_TRAIN_CACHE", str(folder / "cache"))
    return programs
