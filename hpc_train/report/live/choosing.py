"""Selection and order of the runs that the screen lists."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from hpc_train.report.live.live_runs import LiveRun
from hpc_train.run.run_status import STATES

#: In order of interest: states that need attention come first.
_BY_STATE = ("failed", "unknown", "running", "requeued", "pending", "interrupted", "cancelled", "completed")


def _loss(run: LiveRun) -> float:
    loss = run.losses[-1] if run.losses else math.inf
    return loss if math.isfinite(loss) else math.inf


#: Name of an order → its key; runs with equal keys are ordered by experiment and name.
SORTS: dict[str, Callable[[LiveRun], Any]] = {
    "name": lambda run: 0,
    "state": lambda run: _BY_STATE.index(run.state),
    "progress": lambda run: -run.share,
    "ETA": lambda run: math.inf if run.eta_s is None else run.eta_s,
    "loss": _loss,
}


def chosen(runs: Sequence[LiveRun], words: str, sort: str) -> list[LiveRun]:
    """Return the runs that match all words, in the order ``sort``.

    A word that is a state matches that state; any other matches a part of a run's name, experiment, job,
    nodes or reason, ignoring case.
    """
    wanted = words.lower().split()
    found = [run for run in runs if all(_matches(run, word) for word in wanted)]
    return sorted(found, key=lambda run: (SORTS[sort](run), run.experiment, run.name))


def _matches(run: LiveRun, word: str) -> bool:
    if word in STATES:
        return run.state == word
    texts = (run.name, run.experiment, run.state, run.job or "", *run.nodes, run.status.reason or "")
    return any(word in text.lower() for text in texts)


def next_sort(sort: str) -> str:
    """Return the order after this one."""
    names = list(SORTS)
    return names[(names.index(sort) + 1) % len(names)]


def counts(runs: Sequence[LiveRun]) -> str:
    """Return ``3 runs: 1 failed, 2 running``."""
    by_state = {state: sum(run.state == state for run in runs) for state in _BY_STATE}
    listed = ", ".join(f"{count} {state}" for state, count in by_state.items() if count)
    return f"{len(runs)} run{'' if len(runs) == 1 else 's'}{': ' if listed else ''}{listed}"
