"""Wheels and sdists of hpc-train as ``make build`` makes them, and environments to install them into."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import venv
import zipfile
from collections.abc import Mapping
from pathlib import Path

from tests.waiting import HANG_LIMIT_S

REPOSITORY = Path(__file__).parents[1]


def run(words: list[str], cwd: Path, env: Mapping[str, str] | None = None) -> str:
    done = subprocess.run(
        words, capture_output=True, text=True, check=False, cwd=cwd, env=env, timeout=HANG_LIMIT_S
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def build(source: Path, out: Path, *options: str) -> None:
    """Build ``source`` in its own folder; without ``options`` an sdist, and a wheel from that."""
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out)]
    run([*command, *options, str(source)], source)


def templates(wheel: Path) -> set[str]:
    """Return the names of the batch script's templates and profiles in a wheel."""
    folder = "hpc_train/launchers/slurm/templates/"
    names = zipfile.ZipFile(wheel).namelist()
    return {name.removeprefix(folder) for name in names if name.startswith(folder)}


def report_files(wheel: Path) -> set[str]:
    """Return the names of the files that the page of ``report`` is made of in a wheel."""
    folder = "hpc_train/report/html/templates/"
    names = zipfile.ZipFile(wheel).namelist()
    return {name.removeprefix(folder) for name in names if name.startswith(folder)}


def templates_of_the_repository() -> set[str]:
    folder = REPOSITORY / "slurm_templates"
    return {str(path.relative_to(folder)) for path in folder.rglob("*.*") if path.suffix != ".md"}


def environment(folder: Path) -> Path:
    """Make an environment that finds this one's packages after its own; return its folder of programs."""
    venv.create(folder, symlinks=True)
    packages = next(folder.glob("lib/python*/site-packages"))
    paths = [sysconfig.get_path("purelib"), *(path for path in sys.path if path.endswith("site-packages"))]
    (packages / "others.pth").write_text("".join(f"{path}\n" for path in dict.fromkeys(paths)))
    return folder / "bin"


def install(wheel: Path, programs: Path) -> None:
    """Install a wheel alone, from no index; commands compile the few modules that they import."""
    pip = [sys.executable, "-m", "pip", "--python", str(programs / "python"), "--disable-pip-version-check"]
    run([*pip, "install", "--quiet", "--no-deps", "--no-index", "--no-compile", str(wheel)], programs)
