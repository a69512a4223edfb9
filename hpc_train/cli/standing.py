"""Where runs stand, asked of whoever has them: their folders, or a scheduler, once for all its runs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import cache

from hpc_train.errors import UserError
from hpc_train.launchers.base import QueueingLauncher
from hpc_train.paths import RunPaths
from hpc_train.registry import is_factory, load, refusing_exit
from hpc_train.run_folder.files import read_json
from hpc_train.run_folder.status import RunStatus, current_status
from hpc_train.run_folder.trust import is_trusted

_LOCAL = "local"


def standing(paths: RunPaths, *, is_fresh: bool = False) -> RunStatus:
    """Return where one run stands."""
    return standings([paths], is_fresh=is_fresh)[0]


def standings(runs: Sequence[RunPaths], *, is_fresh: bool = False) -> list[RunStatus]:
    """Return where each run stands; ``status.json`` is corrected where it is behind.

    ``is_fresh``: an answer of a moment ago won't do; raises NoSlurmError where the scheduler gives none.
    """
    found: dict[RunPaths, RunStatus] = {}
    for launcher, queued in by_launcher(runs):
        if launcher is None:
            found |= {paths: current_status(paths) for paths in queued}
        else:
            found |= dict(zip(queued, launcher.standings(queued, is_fresh=is_fresh), strict=True))
    return [found[paths] for paths in runs]


def by_launcher(runs: Sequence[RunPaths]) -> list[tuple[QueueingLauncher | None, list[RunPaths]]]:
    """Return the runs of each launcher with a queue, and under None those that no queue has."""
    groups: dict[str | None, list[RunPaths]] = defaultdict(list)
    for paths in runs:
        name = _queue(paths)
        groups[name if name and _launcher(name) else None].append(paths)
    return [(_launcher(name) if name else None, queued) for name, queued in groups.items()]


def _queue(paths: RunPaths) -> str | None:
    """Return the name of the launcher that has the run; None for this machine's."""
    name = str((read_json(paths.run) or {}).get("launcher") or _LOCAL)
    # Somebody else's run must not name the code that we import.
    return None if name == _LOCAL or (is_factory(name) and not is_trusted(paths)) else name


@cache
def _launcher(name: str) -> QueueingLauncher | None:
    """Return the launcher if it has a queue; None also where it can't be had: the folder counts."""
    try:
        factory = load("launchers", name)
        with refusing_exit(name):
            launcher = factory() if callable(factory) else None
    except UserError:
        return None
    return launcher if isinstance(launcher, QueueingLauncher) else None
