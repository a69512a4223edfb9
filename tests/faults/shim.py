"""The disk's own faults: a library before libc's, which strikes at a rank's n-th touch of its files."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from enum import IntFlag
from pathlib import Path

SOURCE = Path(__file__).with_name("shim.c")
#: For ever, as a full disk is.
ALWAYS = 1_000_000


class Touch(IntFlag):
    """What a rank does to files, as the shim tells it apart."""

    WRITE = 1
    SYNC = 2
    CREATE = 4
    RENAME = 8
    REMOVE = 16


EVERY_TOUCH = Touch(31)
#: Where a full disk and a quota are met.
TAKES_ROOM = Touch.WRITE | Touch.CREATE


@dataclass(frozen=True)
class Shim:
    """What ranks find in their environment, and the folder in which they look for orders."""

    folder: Path
    #: Parts of the paths of the files that it strikes at.
    under: tuple[str, ...] = ("/checkpoints/",)

    def environment(self) -> dict[str, str]:
        return {
            "LD_PRELOAD": str(library()),
            "FAULTS_FOLDER": str(self.folder),
            "FAULTS_UNDER": ":".join(self.under),
        }

    def order(self, rank: int, number: int, error: int, times: int, touches: Touch) -> None:
        """From a rank's next touch on count ``touches``; fail from the ``number``-th on, ``times`` times.

        ``error`` 0 kills instead.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        whole = self.folder / f".rank-{rank}"
        whole.write_text(f"{number} {error} {times} {int(touches)}\n")
        whole.rename(self._order(rank))

    def has_struck(self, rank: int) -> bool:
        return self._order(rank).with_suffix(".struck").exists()

    def clear(self) -> None:
        """Take back what has not struck, forget what has."""
        for path in self.folder.glob("rank-*"):
            path.unlink(missing_ok=True)

    def _order(self, rank: int) -> Path:
        return self.folder / f"rank-{rank}"


def why_not() -> str:
    """Return why there can be no shim here; empty where there can."""
    return "" if shutil.which("cc") else "no C compiler: cc is not installed (Debian: gcc libc6-dev)"


def library() -> Path:
    """Return the library, built at first use and kept for this version of its source."""
    content = hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:16]
    built = Path(tempfile.gettempdir()) / f"hpc-train-faults-{os.geteuid()}" / f"shim-{content}.so"
    if not built.exists():
        built.parent.mkdir(mode=0o700, exist_ok=True)
        assert built.parent.stat().st_uid == os.geteuid(), f"{built.parent} is somebody else's"
        with tempfile.TemporaryDirectory(dir=built.parent) as folder:
            made = Path(folder) / built.name
            command = ["cc", "-shared", "-fPIC", "-O1", "-Wall", "-Werror", "-o", str(made), str(SOURCE)]
            subprocess.run([*command, "-ldl", "-lpthread"], check=True)
            made.rename(built)
    return built
