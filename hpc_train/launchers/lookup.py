"""Finds launchers by name, and the launcher of a run. Used by every command."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, cast

from hpc_train.errors import UsageError, UserError
from hpc_train.launchers.base import AttemptLauncher, Launcher
from hpc_train.launchers.following import LOCAL, FollowingLauncher
from hpc_train.paths import RunPaths
from hpc_train.registry import is_factory, load, parts, refusing_exit, suggestion, target_of
from hpc_train.run import evaluation_jobs
from hpc_train.run.files import read_json
from hpc_train.run.liveness import newest_record
from hpc_train.run.run_status import RunStatus, run_facts
from hpc_train.run.trust import is_trusted

#: The launcher of a run submitted without ``--local`` and ``--launcher``.
DEFAULT = "slurm"
#: The launcher of a run submitted with ``--here``.
ALLOCATION = "allocation"


def load_launcher(name: str) -> Launcher:
    """Return the launcher of this name; raises UsageError if there is none."""
    if not is_factory(name) and target_of("launchers", name) is None:
        remedy = suggestion(name, sorted(parts("launchers")))
        raise UsageError(f"--launcher: nothing is called {name!r}; {remedy}")
    make = cast(Callable[[], "Launcher | AttemptLauncher"], load("launchers", name))
    with refusing_exit(f"--launcher: {name!r}: constructing it"):
        launcher = make()
    if isinstance(launcher, Launcher):
        return launcher
    if not hasattr(launcher, "launch"):
        raise UsageError(
            f"--launcher: {name!r} has neither launch() nor all of what launchers.base.Launcher asks for; "
            "see docs/plugins.md"
        )
    return FollowingLauncher(name, launcher)


def last_launcher(paths: RunPaths) -> str:
    """Return the name of the launcher that had the run last."""
    record = newest_record(paths)
    noted = (read_json(paths.run) or {}).get("launcher")
    return str(noted or (record and record.launcher) or LOCAL)


def next_launcher(paths: RunPaths) -> str:
    """Return the launcher of a resume without options: the last one; after an allocation, the queue."""
    name = last_launcher(paths)
    return DEFAULT if name == ALLOCATION else name


def launcher_of(paths: RunPaths) -> Launcher:
    """Return the run's launcher; if it can't be loaded, one that reads the run's folder."""
    return launcher_in(paths, run_facts(paths))


def launcher_in(paths: RunPaths, facts: Mapping[str, Any]) -> Launcher:
    """Return ``launcher_of`` the run by the content of its ``run.json``."""
    name = str(facts.get("launcher") or LOCAL)
    # Another user's run must not name the code that is imported here.
    return _following(LOCAL) if is_factory(name) and not is_trusted(paths) else _known(name)


def by_launcher(runs: Sequence[RunPaths]) -> list[tuple[Launcher, list[RunPaths]]]:
    """Return the runs of each launcher, so that a scheduler is queried once for all of its runs."""
    groups: dict[int, tuple[Launcher, list[RunPaths]]] = {}
    for paths in runs:
        launcher = launcher_of(paths)
        groups.setdefault(id(launcher), (launcher, []))[1].append(paths)
    return list(groups.values())


def statuses(runs: Sequence[RunPaths], *, is_fresh: bool = False) -> list[RunStatus]:
    """Return the status of each run; ``status.json`` is corrected if it is out of date.

    ``is_fresh``: accept no cached answer; raises NoSchedulerError if the scheduler does not answer.
    """
    by_run: dict[RunPaths, RunStatus] = {}
    for launcher, group in by_launcher(runs):
        by_run |= dict(zip(group, launcher.status(group, is_fresh=is_fresh), strict=True))
    return [evaluation_jobs.with_best(paths, by_run[paths]) for paths in runs]


@cache
def _known(name: str) -> Launcher:
    if name == LOCAL:
        return _following(name)
    try:
        return load_launcher(name)
    except UserError:
        return _following(name)


_following = cache(FollowingLauncher)
