"""``search``: submits a file with ``sweep.search`` repeatedly, until all its trials are done."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from hpc_train.cli.command_options import SearchOptions, SubmitOptions
from hpc_train.cli.preflight import LauncherChoice
from hpc_train.cli.searching import experiment_folder, finish_submissions, search_round
from hpc_train.cli.starting import has_saved
from hpc_train.cli.submit import submit
from hpc_train.console import say
from hpc_train.errors import ExitCode, UsageError
from hpc_train.experiment.config.sweep_sections import SearchConfig
from hpc_train.experiment.validate.loading import Loaded, load
from hpc_train.paths import RunPaths
from hpc_train.search.proposals import Round

#: Interval between checks of trials in a queue. Assumed: trials take minutes.
_POLL_S = 30.0


def search(options: SearchOptions) -> ExitCode:
    """Start the next trials whenever some are missing; return the worst exit code of the runs.

    FAILED also if no trial has a value at the end. Raises UsageError if the file has no search.
    """
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
            finish_submissions(launcher, loaded)
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
