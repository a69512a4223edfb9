"""A run's recovery for ``status``: its remaining budget, excluded nodes, silent nodes."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import takewhile

from hpc_train.errors import HpcTrainError
from hpc_train.launchers.lookup import launcher_in
from hpc_train.paths import AttemptPaths, RunPaths
from hpc_train.recovery import bad_nodes, budgets
from hpc_train.recovery.budgets import Left, Limits
from hpc_train.recovery.diagnosis import silent_for
from hpc_train.recovery.history import effective_recovery
from hpc_train.report.run_files import RunFiles
from hpc_train.run.attempts import job_ids
from hpc_train.run.files import read_text
from hpc_train.run.run_status import GOING_ON, RunStatus

#: Six heartbeats: clocks of nodes and file servers may differ by a few heartbeats.
_SILENT_S = 180.0


@dataclass(frozen=True)
class Recovery:
    """``budget`` is None if nothing requeues the run, or its file can't be read."""

    budget: Left | None = None
    excluded_nodes: dict[str, str] = field(default_factory=dict)
    #: Lines to show in addition to the run's own reason.
    words: tuple[str, ...] = ()


def recovery_of(run: RunFiles, now: RunStatus) -> Recovery:
    """Return how the run would recover. ``now``: its status."""
    newest = run.paths.attempt(run.newest_number)
    silent = _silent_nodes(newest) if now.state == "running" else ()
    if not launcher_in(run.paths, run.facts).is_queue:
        return Recovery(words=silent)
    records = run.records
    try:
        limits = _limits(run)
    except (HpcTrainError, OSError, ValueError):  # the frozen file was changed: other commands report it
        return Recovery(words=silent)
    excluded = bad_nodes.excluded(records, limits.exclude_nodes_for_h)
    lines = []
    if excluded and now.state in GOING_ON:
        kept = (
            "can't exclude these nodes, since too few would be left: " if newest.kept_nodes.exists() else ""
        )
        lines = [f"{kept}{bad_nodes.exclusion_words(excluded)}"]
    newest_job = next(reversed(job_ids(run.facts)), None)  # a resume starts with a full budget
    left = budgets.left([record for record in records if record.job == newest_job], limits)
    return Recovery(left, excluded, (*lines, *silent))


def _silent_nodes(attempt: AttemptPaths) -> tuple[str, ...]:
    lines = []
    for path in sorted(attempt.folder.glob("heartbeat-*.json")):
        with suppress(OSError):
            age_s = time.time() - path.stat().st_mtime
            if age_s > _SILENT_S:
                node = path.stem.removeprefix("heartbeat-")
                lines.append(silent_for(node, age_s))
    return tuple(lines)


#: Cached by the text of ``recovery`` sections: most are equal, and a resolved file takes longer to read.
_limits_by_text: dict[tuple[str, ...], Limits] = {}


def _limits(run: RunFiles) -> Limits:
    next_number = run.newest_number + 1
    text = (*_section(run.paths), *_changes(run, next_number))
    if text not in _limits_by_text:
        _limits_by_text[text] = effective_recovery(run.paths, next_number)
    return _limits_by_text[text]


def _changes(run: RunFiles, attempt: int) -> list[str]:
    if not run.facts.get("changes"):
        return []
    from hpc_train.run.create import noted_changes  # the schema: 0.2 s, which few runs need

    return [word for word in noted_changes(run.paths, attempt) if word.startswith("recovery")]


def _section(paths: RunPaths) -> list[str]:
    """Return the lines of the frozen file's ``recovery:``, which is written with one key per line."""
    text = read_text(paths.experiment)
    if "recovery:" not in text:
        return []
    lines = text.splitlines()
    if "recovery:" not in lines:
        return []
    return list(takewhile(lambda line: line.startswith(" "), lines[lines.index("recovery:") + 1 :]))
