"""An ordinary user of this machine who may submit, with a home and a Python of its own."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

NAME = "hpctrain-test"


@dataclass(frozen=True)
class OrdinaryUser:
    name: str
    home: Path
    #: Runs hpc-train with this checkout's packages; absent where there is none that this user may execute.
    python: Path | None

    @property
    def environment(self) -> dict[str, str]:
        """What a login of this user sets."""
        return {"HOME": str(self.home), "USER": self.name, "LOGNAME": self.name}


def make(home: Path) -> OrdinaryUser:
    """Make the user, who stays on this machine, unless there is one, and a home in ``home``."""
    if not _exists():
        words = [
            "useradd",
            "--system",
            "--no-create-home",
            "--home-dir=/nonexistent",
            "--shell=/bin/sh",
            NAME,
        ]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        if not _exists():  # another worker may have been quicker
            raise RuntimeError(f"useradd: {done.stderr}")
    home.chmod(0o700)
    shutil.chown(home, NAME)
    return OrdinaryUser(NAME, home, _python(home))


def _exists() -> bool:
    return any(entry.pw_name == NAME for entry in pwd.getpwall())


def _python(home: Path) -> Path | None:
    """Return a Python that the user may execute: this one often lies in somebody's home."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    for found in (sys.executable, shutil.which(version, path="/usr/bin:/usr/local/bin")):
        if found and _as_user([found, "-I", "-S", "-c", ""]):
            packages = next(Path(sys.prefix).glob("lib/python*/site-packages"))
            environment = home / "venv"
            if not _as_user([found, "-m", "venv", "--without-pip", str(environment)]):
                continue
            place = next(environment.glob("lib/python*/site-packages")) / "checkout.pth"
            # addsitedir, not the path alone, for hpc-train is installed there by a .pth too.
            place.write_text(f"import site; site.addsitedir({str(packages)!r})\n")
            python = environment / "bin" / "python"
            return python if _as_user([str(python), "-c", "import hpc_train"]) else None
    return None


def _as_user(words: list[str]) -> bool:
    group = pwd.getpwnam(NAME).pw_gid
    try:
        done = subprocess.run(
            words,
            user=NAME,
            group=group,
            extra_groups=[],
            cwd="/",
            env={"PATH": os.defpath},
            capture_output=True,
            check=False,
        )
    except PermissionError:
        return False
    return done.returncode == 0
