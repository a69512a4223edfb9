"""Launchers by name, and those that have runs: what every command asks for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, cast

from hpc_train.errors import UsageError, UserError
from hpc_train.launchers.base import AttemptLauncher, Launcher
from hpc_train.launchers.following import LOCAL, FollowingLauncher
from hpc_train.paths import RunPaths
from hpc_train.registry import is_factory, load, parts, refusing_exit, suggestion, target_of
from hpc_train.run.files import read_json
from hpc_train.run.liveness import newest_record
from hpc_train.run.run_facts import run_facts
from hpc_train.run.run_status import RunStatus
from hpc_train.run.trust import is_trusted

#: Of a run that is submitted without ``--local`` and ``--launcher``.
DEFAULT = "slurm"


def load_launcher(name: str) -> Launcher:
    """Return the launcher of this name; raises UsageError where there is none."""
    if not is_factory(name) and target_of("launchers", name) is None:
        remedy = suggestion(name, sorted(parts("launchers")))
        raise UsageError(f"--launcher: nothing is called {name!r}; {remedy}")
    make = cast(Callable[[], "Launcher | AttemptLauncher"], load("launchers", name))
    with refusing_exit(f"--launcher: {name!r}: constructing it"):
        made = make()
    if isinstance(made, Launcher):
        return made
    if not hasattr(made, "launch"):
        raise UsageError(
            f"--launcher: {name!r} has neither launch() nor all of what launchers.base.Launcher asks for; "
            "see docs/plugins.md"
        )
    return FollowingLauncher(name, made)


def last_launcher(paths: RunPaths) -> str:
    """Return the name of the launcher that had the run last."""
    record = newest_record(paths)
    noted = (read_json(paths.run) or {}).get("launcher")
    return str(noted or (record and record.launcher) or LOCAL)


def launcher_of(paths: RunPaths) -> Launcher:
    """Return the launcher that has the run; one that can't be loaded leaves it to the run's folder."""
    return launcher_in(paths, run_facts(paths))


def launcher_in(paths: RunPaths, facts: Mapping[str, Any]) -> Launcher:
    """Return ``launcher_of`` the run by the content of its ``run.json``."""
    name = str(facts.get("launcher") or LOCAL)
    # Another user's run must not name the code that is imported here.
    return _following(LOCAL) if is_factory(name) and not is_trusted(paths) else _known(name)


def by_launcher(runs: Sequence[RunPaths]) -> list[tuple[Launcher, list[RunPaths]]]:
    """Return the runs of each launcher, so that a scheduler is asked once for all of its runs."""
    groups: dict[int, tuple[Launcher, list[RunPaths]]] = {}
    for paths in runs:
        launcher = launcher_of(paths)
        groups.setdefault(id(launcher), (launcher, []))[1].append(paths)
    return list(groups.values())


def statuses(runs: Sequence[RunPaths], *, is_fresh: bool = False) -> list[RunStatus]:
    """Return the status of each run; ``status.json`` is corrected where it is behind.

    ``is_fresh``: an answer of a moment ago won't do; raises NoSchedulerError where the scheduler gives none.
    """
    found: dict[RunPaths, RunStatus] = {}
    for launcher, some in by_launcher(runs):
        found |= dict(zip(some, launcher.status(some, is_fresh=is_fresh), strict=True))
    return [found[paths] for paths in runs]


@cache
def _known(name: str) -> Launcher:
    if name == LOCAL:
        return _following(name)
    try:
        return load_launcher(name)
    except UserError:
        return _following(name)


_following = cache(FollowingLauncher)
