"""The next runs of a search: as many as are missing and may run concurrently."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from hpc_train.errors import BadFileError
from hpc_train.experiment.config.sweep_sections import SearchConfig, comparable, varied
from hpc_train.experiment.plan.sweep import rounded
from hpc_train.registry import load, refusing_exit
from hpc_train.search.base import SearchMethod, SearchRequest, Trial

#: After this many answers without a new proposal, the search space is assumed to be exhausted.
_TRIES = 10


@dataclass(frozen=True)
class Round:
    """The state of a search, and the values of the runs to start now."""

    trials: list[Trial]
    #: The values of new trials.
    proposals: list[dict[str, Any]]
    #: The trials to start again: interrupted ones before new ones are proposed. Failed trials come last,
    #: since they may fail again.
    again: list[Trial]

    @property
    def starts(self) -> list[dict[str, Any]]:
        """The values of all runs to start now."""
        return [*(dict(trial.values) for trial in self.again), *self.proposals]

    @property
    def running(self) -> int:
        """The number of trials in the queue or in training, without those to start again."""
        return sum(trial.state == "running" and not trial.is_due for trial in self.trials)

    def best(self, mode: str) -> Trial | None:
        """Return the finished trial with the best value, the first of equal ones."""
        finished = [trial for trial in self.trials if trial.value is not None]
        sign = 1 if mode == "min" else -1
        return min(finished, key=lambda trial: sign * (trial.value or 0.0), default=None)


def next_round(
    search: SearchConfig,
    trials: Sequence[Trial],
    is_excluded: Callable[[Mapping[str, Any]], bool] = lambda values: False,
) -> Round:
    """Request the values of the runs to start now from the method; the same trials have the same result.

    ``is_excluded``: whether values are excluded. Raises BadFileError if the method is unknown or returns
    values outside the search space.
    """
    planned = Round(list(trials), [], [])
    free = max(0, search.max_concurrent - planned.running)
    due = [trial for trial in trials if trial.is_due]
    planned.again.extend([trial for trial in due if trial.state == "running"][:free])
    planned.proposals.extend(_proposals(search, planned, free - len(planned.again), is_excluded))
    left = free - len(planned.again) - len(planned.proposals)
    planned.again.extend([trial for trial in due if trial.state == "failed"][:left])
    return planned


def _proposals(
    search: SearchConfig, planned: Round, free: int, is_excluded: Callable[[Mapping[str, Any]], bool]
) -> list[dict[str, Any]]:
    count = min(search.trials - len(planned.trials), free)
    proposals: list[dict[str, Any]] = []
    if count <= 0:
        return proposals
    method = cast(SearchMethod, load("search", search.method))
    request = SearchRequest(search.parameters, planned.trials, count, search.mode, 0)
    for attempt in range(_TRIES):
        text = f"{search.seed} {len(planned.trials)} {attempt}"
        seed = int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big")
        pending = [Trial(values, "running") for values in proposals]
        missing = count - len(proposals)
        asked = replace(request, trials=[*planned.trials, *pending], count=missing, seed=seed)
        with refusing_exit(f"sweep.search.method: {search.method!r}"):
            answers = method(asked)
        proposals.extend(_new(answers, search, asked.trials, is_excluded))
        if len(proposals) >= count:
            break
    return proposals[:count]


def _new(
    answers: Sequence[Mapping[str, Any]],
    search: SearchConfig,
    trials: Sequence[Trial],
    is_excluded: Callable[[Mapping[str, Any]], bool],
) -> Iterator[dict[str, Any]]:
    """Yield the new answers that are not excluded, as written into files."""
    seen = {comparable(dict(trial.values)) for trial in trials}
    for answer in answers:
        values = varied(search.parameters, _checked(answer, search))
        if comparable(values) not in seen and not is_excluded(values):
            seen.add(comparable(values))
            yield values


def _checked(answer: Mapping[str, Any], search: SearchConfig) -> dict[str, Any]:
    values = {}
    for key, distribution in search.parameters.items():
        if key not in answer:
            continue
        values[key] = answer[key]
        if distribution.is_number(answer[key]):
            values[key] = rounded(answer[key], distribution)
        if not distribution.contains(values[key]):
            raise BadFileError(
                f"sweep.search.method: {search.method} proposes {key}={values[key]!r}, which is not in "
                f"sweep.search.parameters.{key}; fix the plug-in, or write tpe"
            )
    if unknown := next((key for key in answer if key not in search.parameters), None):
        raise BadFileError(
            f"sweep.search.method: {search.method} proposes {unknown}, which is not in "
            "sweep.search.parameters; fix the plug-in, or write tpe"
        )
    return values
