"""The next runs of a file with ``sweep.search``, and a line on the state of the search."""

from __future__ import annotations

from collections.abc import Callable

from hpc_train.cli.starting import starts_again
from hpc_train.console import say
from hpc_train.errors import UsageError
from hpc_train.experiment.config.sweep_sections import SearchConfig
from hpc_train.experiment.plan.planning import planned_runs, with_share
from hpc_train.experiment.validate.loading import Loaded
from hpc_train.launchers.base import Launcher
from hpc_train.paths import ExperimentPaths, RunPaths, runs_root
from hpc_train.recovery.budgets import spent_budget
from hpc_train.recovery.history import records
from hpc_train.report.changed_keys import in_words
from hpc_train.run.find import find_runs
from hpc_train.run.run_status import INTERRUPTED, RunStatus
from hpc_train.search.proposals import Round, next_round, trials_of

#: Whether a trial, by the name of its run folder, is not started again if it has ended.
GivenUp = Callable[[str], bool]


def next_trials(loaded: Loaded, given_up: GivenUp = lambda run_id: False) -> Round | None:
    """Print a line on the state of the file's search and return it; None without a search."""
    search = loaded.experiment.sweep.search
    if search is None:
        return None
    round_ = search_round(loaded, search, given_up)
    say(_state(loaded.experiment.name, round_, search))
    return round_


def search_round(loaded: Loaded, search: SearchConfig, given_up: GivenUp) -> Round:
    """Return the trials of the file's search so far, and the trials to start now.

    Interrupted trials are resumed; trials that failed before they saved anything are started again.
    """
    share = with_share(loaded.experiment, planned_runs(loaded.experiment, search.trials))

    def is_due(paths: RunPaths, status: RunStatus) -> bool:
        if given_up(paths.folder.name) or not (status.state == INTERRUPTED or starts_again(paths, status)):
            return False
        return spent_budget(share, records(paths)) is None

    folder = experiment_folder(loaded).folder
    try:
        runs = find_runs([str(folder)]) if folder.is_dir() else []
    except UsageError:  # it has no run yet
        runs = []
    return next_round(search, trials_of(loaded, search, runs, is_due), loaded.experiment.sweep.is_excluded)


def finish_submissions(launcher: Launcher, loaded: Loaded) -> None:
    """Finish the incomplete submission of a command that died: such trials count as running."""
    folder = experiment_folder(loaded)
    if launcher.is_queue and folder.folder.is_dir():
        with launcher.submitting(folder):
            pass


def experiment_folder(loaded: Loaded) -> ExperimentPaths:
    """Return the folder of the file's runs."""
    return ExperimentPaths(runs_root() / loaded.experiment.name)


def _state(name: str, round_: Round, search: SearchConfig) -> str:
    """Return ``cifar: 12 of 50 trials, 4 of them running; best accuracy 0.97: lr=0.01 (ab12); next: 4``."""
    parts = [f"{name}: {len(round_.trials)} of {search.trials} trials"]
    counts = {
        "running": round_.running,
        "failed": sum(trial.state == "failed" and not trial.is_due for trial in round_.trials),
        "to start again": sum(trial.is_due for trial in round_.trials),
    }
    states = [f"{count} of them {what}" for what, count in counts.items() if count]
    parts[0] = ", ".join([parts[0], *states])
    if best := round_.best(search.mode):
        parts.append(f"best {search.metric} {best.value:.6g}: {in_words(best.values)} ({best.run_id})")
    parts.append(_next(round_, search))
    return "; ".join(parts)


def _next(round_: Round, search: SearchConfig) -> str:
    if round_.starts:
        return f"next: {len(round_.starts)}"
    if len(round_.trials) >= search.trials:
        return "the search is complete" if not round_.running else "the last trials are running"
    if round_.running >= search.max_concurrent:
        return "nothing to start until one of them ends"
    return "all values of the search space have been tried"
