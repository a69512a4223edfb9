"""Programs of the system that a test replaces: Python scripts in a folder that alone is on PATH."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

import pytest


def put_program(folder: Path, name: str, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    program = folder / name
    program.write_text(f"#!{sys.executable}\n{script}")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))


def answering(answers: Mapping[str, str]) -> str:
    """Return a script that prints the answer whose key is in its arguments, and fails without one."""
    return f"""
import sys
words = " ".join(sys.argv[1:])
for key, answer in {dict(answers)!r}.items():
    if key in words:
        print(answer)
        sys.exit()
sys.exit(2)
"""
