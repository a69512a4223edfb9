"""A C++ compiler that keeps what it made, so that tests compile each kernel of ``torch.compile`` once.

Every run of a test has an empty cache of its own, and a kernel takes seconds of CPU time. ``make`` writes a
``g++`` that runs this file: the same options and texts give a copy of what the real compiler made before.
Within one session alone, as the headers that a text includes are not compared.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path


def make(folder: Path) -> Path | None:
    """Return a ``g++`` for the variable CXX that keeps its outputs in ``folder``; None where there is none.

    Workers of pytest-xdist may call it at once.
    """
    real = shutil.which("g++")
    if real is None:
        return None
    (folder / "kept").mkdir(parents=True, exist_ok=True)
    own = folder / f"g++-{os.getpid()}"
    own.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S {__file__} {folder / "kept"} {real} "$@"\n')
    own.chmod(0o755)
    return own.rename(folder / "g++")


def main(kept: Path, real: str, arguments: Sequence[str]) -> int:
    """Do what ``real`` does with these arguments; return its exit code."""
    if "-o" not in arguments:
        return subprocess.run([real, *arguments], check=False).returncode
    place = arguments.index("-o") + 1
    output = Path(arguments[place])
    known = kept / _key([*arguments[:place], *arguments[place + 1 :]])
    if not known.exists():
        made = kept / f"{known.name}-{os.getpid()}"
        command = [real, *arguments[:place], str(made), *arguments[place + 1 :]]
        if code := subprocess.run(command, check=False).returncode:
            return code
        made.rename(known)
    output.unlink(missing_ok=True)
    shutil.copy(known, output)
    return 0


def _key(arguments: Sequence[str]) -> str:
    """Return a hash of options and of what is in the files that they name, wherever those are."""
    hashed = hashlib.sha256()
    for argument in arguments:
        file = Path(argument)
        hashed.update(file.read_bytes() if file.is_file() else argument.encode())
        hashed.update(b"\0")
    return hashed.hexdigest()


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2], sys.argv[3:]))
