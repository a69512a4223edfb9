"""Which processes belong to a test cluster: daemons, step daemons by node, and what its jobs started.

Found by looking, not by remembering, so that a cluster can be ended by somebody else than who started it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

from tests.waiting import HANG_LIMIT_S

_DAEMONS = ("munged", "slurmctld", "slurmdbd", "slurmd", "slurmstepd", "mariadbd", "mysqld")
_LIMIT_S = HANG_LIMIT_S


def daemons(folder: Path, holding: str = "") -> list[int]:
    """Return the daemons that hold files open whose paths begin with ``folder/`` and ``holding``.

    A step daemon has its node's log open, which alone tells whose it is: it wipes its environment and
    init is its parent.
    """
    return [pid for pid in _all() if _program(pid) in _DAEMONS and _holds(pid, f"{folder}/{holding}")]


def of_jobs(conf: Path, node: str | None = None) -> list[int]:
    """Return what jobs of this cluster (on this node) started, with all descendants."""
    wanted = {f"SLURM_CONF={conf}"} | ({f"SLURMD_NODENAME={node}"} if node else set())
    found = set()
    for pid in _all():
        words = _environment(pid)
        # A shell of somebody who only exported SLURM_CONF is no job.
        if wanted <= words and any(word.startswith("SLURMD_NODENAME=") for word in words):
            found.add(pid)
    return sorted(found | _descendants(found))


def kill_all(find: Callable[[], list[int]]) -> None:
    """SIGKILL all processes that ``find`` returns, as if at once, until it returns none.

    They are stopped first: srun's second process cancels the step as soon as the first one has died, which
    can't happen on a node without power.
    """
    deadline = time.monotonic() + _LIMIT_S
    while pids := find():
        for by in (signal.SIGSTOP, signal.SIGKILL):
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, by)
        if time.monotonic() > deadline:
            raise RuntimeError(f"processes {pids} live on after SIGKILL")
        time.sleep(0.02)


def _all() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def _program(pid: int) -> str:
    """Return the program's name; Debian's carry a suffix."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/exe").readlink().name.removesuffix("-wlm")
    return ""


def _holds(pid: int, prefix: str) -> bool:
    with contextlib.suppress(OSError):
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                if str(descriptor.readlink()).startswith(prefix):
                    return True
    return False


def _environment(pid: int) -> set[str]:
    with contextlib.suppress(OSError):
        return set(Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0"))
    return set()


def _descendants(pids: set[int]) -> set[int]:
    parents = {pid: _parent(pid) for pid in _all()}
    found: set[int] = set()
    grew = True
    while grew:
        more = {pid for pid, parent in parents.items() if parent in pids | found} - found
        found |= more
        grew = bool(more)
    return found


def _parent(pid: int) -> int:
    with contextlib.suppress(OSError, IndexError):
        # The second field, the name, may hold blanks and brackets.
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return 0
