"""``search``: submits a file with ``sweep.search`` repeatedly, until all its trials are done.

Also the next runs of such a file, for ``submit`` and ``plan``, and a line on the state of the search.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from hpc_train.cli.command_options import SearchOptions, SubmitOptions
from hpc_train.cli.preflight import LauncherChoice
from hpc_train.cli.starting import finish_submissions, has_saved, starts_again
from hpc_train.console import say
from hpc_train.errors import ExitCode, UsageError
from hpc_train.experiment.config.sweep_sections import SearchConfig
from hpc_train.experiment.validate.budget_rules import planned_runs, with_share
from hpc_train.experiment.validate.loading import Loaded, load
from hpc_train.paths import ExperimentPaths, RunPaths, runs_root
from hpc_train.recovery.budgets import spent_budget
from hpc_train.recovery.history import records
from hpc_train.report.changed_keys import in_words
from hpc_train.run.find import find_runs
from hpc_train.run.run_status import INTERRUPTED, RunStatus
from hpc_train.search.proposals import Round, next_round, trials_of

#: Interval between checks of trials in a queue. Assumed: trials take minutes.
_POLL_S = 30.0
#: Whether a trial, by the name of its run folder, is not started again if it has ended.
GivenUp = Callable[[str], bool]


def search(options: SearchOptions) -> ExitCode:
    """Start the next trials whenever some are missing; return the worst exit code of the runs.

    FAILED also if no trial has a value at the end. Raises UsageError if the file has no search.
    """
    from hpc_train.cli.submit import submit  # which imports this module

    rounds, loaded = options.rounds, load(options.file, options.overrides)
    section = loaded.experiment.sweep.search
    if section is None:
        raise UsageError(f"search: {options.file} has no sweep.search; add it, or use `hpc-train submit`")
    launcher, started = LauncherChoice.of(options).launcher, _Started(loaded, section)
    submitted = SubmitOptions(**{key: value for key, value in vars(options).items() if key != "rounds"})
    codes = [ExitCode.DONE]
    before: list[Mapping[str, Any]] | None = None
    while rounds is None or len(codes) <= rounds:
        round_ = search_round(loaded, section, started.contains)
        problem = started.problem(round_)
        if problem is None and not round_.starts and round_.running:
            finish_submissions(launcher, experiment_folder(loaded))
            time.sleep(_POLL_S)
            continue
        if round_.proposals and round_.proposals == before:
            problem = "the last submit started none of its trials; see its messages"
        if problem is not None:
            say(f"{loaded.experiment.name}: {problem}")
            return max(*codes, ExitCode.FAILED)
        before = list(round_.proposals)
        codes.append(submit(submitted, started.contains))
        started.note(round_)
        if codes[-1] == ExitCode.INTERRUPTED:
            break
        if not round_.starts:
            codes.append(started.end(round_))
            break
    return max(codes)


class _Started:
    """The trials that this command has started, each only once, so that the search ends."""

    def __init__(self, loaded: Loaded, section: SearchConfig) -> None:
        self._name, self._folder, self._section = loaded.experiment.name, experiment_folder(loaded), section
        #: Trials that were there before; None until the first submit.
        self._known: set[str] | None = None
        self._again: set[str] = set()

    def note(self, round_: Round) -> None:
        """Record the trials that a submit has started; ``round_``: the trials before it."""
        if self._known is None:
            self._known = {trial.run_id for trial in round_.trials}
        self._again.update(trial.run_id for trial in round_.again)

    def contains(self, run_id: str) -> bool:
        return self._is_new(run_id) or run_id in self._again

    def _is_new(self, run_id: str) -> bool:
        return self._known is not None and run_id not in self._known

    def problem(self, round_: Round) -> str | None:
        """Return why to start no more trials: a whole round of them failed before saving anything, and no new
        trial got further (without new ones: no trial of the search).
        """
        failed = [
            trial
            for trial in round_.trials
            if self.contains(trial.run_id) and trial.state == "failed" and not self._has_saved(trial.run_id)
        ]
        if len(failed) < self._section.max_concurrent:
            return None
        new = [trial for trial in round_.trials if self._is_new(trial.run_id)]
        if any(
            trial.state in {"finished", "diverged"} or self._has_saved(trial.run_id)
            for trial in new or round_.trials
        ):
            return None
        which = "the trial" if len(failed) == 1 else f"all {len(failed)} trials that have ended"
        return (
            f"{which} failed before saving anything; fix the cause and repeat the command, which also starts "
            "failed trials again"
        )

    def _has_saved(self, run_id: str) -> bool:
        return has_saved(RunPaths(self._folder.folder / run_id))

    def end(self, round_: Round) -> ExitCode:
        """Return FAILED, with a message, if the search has ended without a value."""
        if round_.best(self._section.mode) is not None:
            return ExitCode.DONE
        metric = self._section.metric
        say(f"{self._name}: no trial has a value of {metric}; see `hpc-train status {self._name}`")
        return ExitCode.FAILED


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
