"""What this machine offers a cluster: programs, ports, an environment that no other Slurm has touched."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess

from tests.slurm.configuration import NUM_PORTS
from tests.waiting import HANG_LIMIT_S

_PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun")
_ACCOUNTING_PROGRAMS = ("slurmdbd", "mariadbd", "mariadb-install-db")
#: What tells Slurm's commands what to do, or that they run within a job.
SLURM_VARIABLES = (
    "SLURM_", "SLURMD_", "SBATCH_", "SALLOC_", "SQUEUE_", "SACCT_", "SCANCEL_", "SINFO_", "SCONTROL_",
)  # fmt: skip
_COMMAND_LIMIT_S = HANG_LIMIT_S


def why_not(accounting: bool = True) -> str:
    """Return why no cluster can be started here; empty where one can."""
    wanted = _PROGRAMS + (_ACCOUNTING_PROGRAMS if accounting else ())
    missing = [name for name in wanted if shutil.which(name, path=_search_path()) is None]
    if missing:
        return f"not installed: {', '.join(missing)} (Debian: tests/slurm/install.sh installs them)"
    return "its daemons need root" if os.geteuid() else ""


def slurm_version() -> tuple[int, int]:
    """Return the version of this machine's Slurm: (24, 11)."""
    done = subprocess.run([program_path("slurmctld"), "-V"], capture_output=True, text=True, check=True)
    # ``slurm-wlm 24.11.5``, Debian's; else ``slurm 24.11.5``.
    major, minor = done.stdout.split()[-1].split(".")[:2]
    return int(major), int(minor)


def clean_environment() -> dict[str, str]:
    """Return this process's environment without what tells Slurm's commands what to do."""
    return {name: value for name, value in os.environ.items() if not name.startswith(SLURM_VARIABLES)}


def _search_path() -> str:
    return f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"


def program_path(name: str) -> str:
    found = shutil.which(name, path=_search_path())
    if found is None:
        raise RuntimeError(f"{name} is not installed")
    return found


def succeeds(*command: str, **environment: str) -> bool:
    done = subprocess.run(
        [program_path(command[0]), *command[1:]],
        env=clean_environment() | environment,
        capture_output=True,
        check=False,
        timeout=_COMMAND_LIMIT_S,
    )
    return done.returncode == 0


def claimed_ports() -> tuple[socket.socket, list[int]]:
    """Return neighbouring ports that nothing listens on, and a claim that keeps other clusters off them.

    The claim, a name among abstract sockets, ends with its process; the daemons listen by then.
    """
    for first in range(10_000, 30_000, 10):  # below the ephemeral range, where srun and gloo listen
        claim = socket.socket(socket.AF_UNIX)
        ports = list(range(first, first + NUM_PORTS))
        try:
            claim.bind(f"\0hpc-train-test-cluster-{first}")
            with contextlib.ExitStack() as stack:
                for port in ports:
                    stack.enter_context(socket.create_server(("", port)))
            return claim, ports
        except OSError:
            claim.close()
    raise RuntimeError("no free ports")
