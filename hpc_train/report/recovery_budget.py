"""What ``status`` shows of a run's recovery: its remaining budget, excluded nodes, silent nodes."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from hpc_train.errors import HpcTrainError
from hpc_train.launchers.lookup import launcher_of
from hpc_train.paths import AttemptPaths, RunPaths
from hpc_train.recovery import bad_nodes, budgets
from hpc_train.recovery.budgets import Left
from hpc_train.recovery.diagnosis import silent_for
from hpc_train.recovery.history import effective_recovery
from hpc_train.run.attempts import AttemptRecord, job_ids, newest_number, read_record
from hpc_train.run.files import read_json, read_text
from hpc_train.run.run_status import GOING_ON, RunStatus

if TYPE_CHECKING:
    from hpc_train.config.schema import RecoveryConfig

#: Six heartbeats: clocks of nodes and file servers may differ by some of them.
_SILENT_S = 180.0


@dataclass(frozen=True)
class Recovery:
    """``budget`` is None where nobody requeues the run, or its file can't be read."""

    budget: Left | None = None
    excluded_nodes: dict[str, str] = field(default_factory=dict)
    #: Lines to show in addition to the run's own reason.
    words: tuple[str, ...] = ()


def recovery_of(paths: RunPaths, now: RunStatus) -> Recovery:
    """Return how the run would recover. ``now``: its status."""
    newest = paths.attempt(newest_number(paths))
    silent = _silent_nodes(newest) if now.state == "running" else ()
    facts = read_json(paths.run) or {}
    if not launcher_of(paths).is_queue:
        return Recovery(words=silent)
    records = [record for each in paths.attempt_folders() if (record := read_record(each))]
    try:
        limits = _limits(paths, facts)
    except (HpcTrainError, OSError):  # the frozen file was changed: reported where it matters
        return Recovery(words=silent)
    excluded = bad_nodes.excluded(records, limits.exclude_nodes_for_h)
    words = (_left_out(newest, excluded),) if excluded and now.state in GOING_ON else ()
    return Recovery(budgets.left(_of_newest_job(records, facts), limits), excluded, (*words, *silent))


def _of_newest_job(records: list[AttemptRecord], facts: dict[str, Any]) -> list[AttemptRecord]:
    """Return the newest job's attempts: a resume starts with a full budget."""
    newest = next(reversed(job_ids(facts)), None)
    return [record for record in records if record.job == newest]


def _left_out(newest: AttemptPaths, excluded: dict[str, str]) -> str:
    words = bad_nodes.left_out(excluded)
    if newest.kept_nodes.exists():
        return f"can't exclude these nodes, since too few would be left: {words}"
    return words


def _silent_nodes(attempt: AttemptPaths) -> tuple[str, ...]:
    """Return a line for each node whose heartbeat is old; none for nodes that never had one."""
    found = []
    for path in sorted(attempt.folder.glob("heartbeat-*.json")):
        with suppress(OSError):
            age_s = time.time() - path.stat().st_mtime
            if age_s > _SILENT_S:
                node = path.stem.removeprefix("heartbeat-")
                found.append(silent_for(node, age_s))
    return tuple(found)


#: Cached by the runs' ``recovery`` sections: most are equal, and reading a whole file takes 5 ms.
_known: dict[tuple[str, ...], RecoveryConfig] = {}


def _limits(paths: RunPaths, facts: dict[str, Any]) -> RecoveryConfig:
    """Return the limits of the run's next attempt."""
    from hpc_train.run.create import noted_changes  # 0.3 s, which few runs need

    next_number = newest_number(paths) + 1
    changes = noted_changes(paths, next_number) if facts.get("changes") else []
    said = (*_section(paths), *(word for word in changes if word.startswith("recovery")))
    if said not in _known:
        _known[said] = effective_recovery(paths, next_number)
    return _known[said]


def _section(paths: RunPaths) -> list[str]:
    """Return the lines of the frozen file's ``recovery:``, which is written with one key per line."""
    lines = read_text(paths.experiment).splitlines()
    if "recovery:" not in lines:
        return []
    return list(takewhile(lambda line: line.startswith(" "), lines[lines.index("recovery:") + 1 :]))
