"""``tests/slurm/prefix.sh`` runs a command with the Slurm of a prefix, and never with parts of two."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "slurm" / "prefix.sh"
PROGRAMS = (
    "bin/sacct", "bin/sacctmgr", "bin/sbatch", "bin/scancel", "bin/scontrol", "bin/sinfo", "bin/squeue",
    "bin/srun", "sbin/slurmctld", "sbin/slurmd", "sbin/slurmdbd",
)  # fmt: skip
PLUGIN = "lib/slurm/accounting_storage_mysql.so"


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    for program in PROGRAMS:
        path = tmp_path / "slurm" / program
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("#!/bin/sh\necho slurm 26.05.3\n")
        path.chmod(0o755)
    plugin = tmp_path / "slurm" / PLUGIN
    plugin.parent.mkdir(parents=True)
    plugin.touch()
    return tmp_path / "slurm"


def run(prefix: str | Path, *command: str, folder: Path) -> tuple[int, str, str]:
    done = subprocess.run(
        [SCRIPT, str(prefix), *command], cwd=folder, capture_output=True, text=True, check=False
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("relative", [False, True])
def test_the_programs_of_the_prefix_come_first(relative: bool, prefix: Path, tmp_path: Path) -> None:
    named = prefix.name if relative else prefix
    code, said, version = run(named, "bash", "-c", "cd /; type -p squeue slurmctld", folder=tmp_path)
    assert (code, version) == (0, "slurm 26.05.3\n")
    assert said.split() == [str(prefix / "bin/squeue"), str(prefix / "sbin/slurmctld")]


@pytest.mark.parametrize("missing", [*PROGRAMS, PLUGIN])
def test_a_prefix_without_a_part_of_slurm_is_refused(missing: str, prefix: Path, tmp_path: Path) -> None:
    (prefix / missing).unlink()
    code, said, error = run(prefix, "echo", "ran", folder=tmp_path)
    assert (code, said) == (2, "")
    assert f"{prefix} has no {Path(missing).name if missing == PLUGIN else missing}" in error


@pytest.mark.parametrize(("named", "why"), [("", "not set"), ("nowhere", "nowhere is not a folder")])
def test_a_prefix_that_is_no_folder_is_refused(named: str, why: str, tmp_path: Path) -> None:
    code, _, error = run(named, "true", folder=tmp_path)
    assert (code, why in error) == (2, True)


def test_without_a_command_it_says_how_it_is_called(tmp_path: Path) -> None:
    code, _, error = run("/usr", folder=tmp_path)
    assert code == 2 and "prefix.sh PREFIX COMMAND" in error
