"""The next runs of a file with ``sweep.search``, and the state of the search in words."""

from __future__ import annotations

from typing import Any

from hpc_train.config.sweep_sections import SearchConfig
from hpc_train.console import say
from hpc_train.errors import UsageError
from hpc_train.paths import runs_root
from hpc_train.report.changed_keys import in_words
from hpc_train.run.find import find_runs
from hpc_train.search.proposals import Round, next_round
from hpc_train.search.trials import trials_of
from hpc_train.validate.loading import Loaded


def next_trials(loaded: Loaded) -> list[dict[str, Any]] | None:
    """Return the values of the runs to start now, after a line on the search; None without a search."""
    search = loaded.experiment.sweep.search
    if search is None:
        return None
    made = search_round(loaded, search)
    say(_state(loaded.experiment.name, made, search))
    return made.proposals


def search_round(loaded: Loaded, search: SearchConfig) -> Round:
    """Return the trials of the file's search so far, and what it proposes now."""
    folder = runs_root() / loaded.experiment.name
    try:
        runs = find_runs([str(folder)]) if folder.is_dir() else []
    except UsageError:  # it has no run yet
        runs = []
    return next_round(search, trials_of(loaded, search, runs), loaded.experiment.sweep.is_excluded)


def _state(name: str, made: Round, search: SearchConfig) -> str:
    """Return ``cifar: 12 of 50 trials, 4 of them running; best accuracy 0.97: lr=0.01 (ab12); next: 4``."""
    parts = [f"{name}: {len(made.trials)} of {search.trials} trials"]
    if made.running:
        parts[0] += f", {made.running} of them running"
    if best := made.best(search.mode):
        parts.append(f"best {search.metric} {best.value:.6g}: {in_words(best.values)} ({best.run_id})")
    parts.append(_next(made, search))
    return "; ".join(parts)


def _next(made: Round, search: SearchConfig) -> str:
    if made.proposals:
        return f"next: {len(made.proposals)}"
    if len(made.trials) >= search.trials:
        return "the search is complete" if not made.running else "the last trials are running"
    if made.running >= search.max_concurrent:
        return "nothing to start until one of them ends"
    return "all values of the search space have been tried"
