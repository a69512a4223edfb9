"""``method: tpe``: Optuna's tree-structured Parzen estimator, without a storage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hpc_train.errors import UserError
from hpc_train.experiment.config.sweep_sections import CHOICE, Distribution, by_condition
from hpc_train.experiment.plan.sweep import rounded
from hpc_train.search.base import SearchRequest, Trial


class MissingOptunaError(UserError):
    """Optuna is not installed: it is an optional dependency."""


def propose(request: SearchRequest) -> Sequence[Mapping[str, Any]]:
    """Return Optuna's proposals after the trials so far. Raises MissingOptunaError."""
    optuna = _optuna()
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        study = optuna.create_study(
            direction="maximize" if request.mode == "max" else "minimize",
            # Running trials, and trials of this batch, are treated as bad, so that a batch spreads out.
            sampler=optuna.samplers.TPESampler(seed=request.seed, constant_liar=True),
        )
        for trial in request.trials:
            study.add_trial(_as_trial(optuna, trial, request.parameters))
        return [_asked(optuna, study.ask(), request.parameters) for _ in range(request.count)]
    finally:
        optuna.logging.set_verbosity(before)


def _optuna() -> Any:
    try:
        import optuna
    except ModuleNotFoundError as error:
        raise MissingOptunaError(
            "sweep.search.method: tpe needs Optuna, which is not installed; install it with "
            "pip install 'hpc-train[optuna]', or write the name of a plug-in"
        ) from error
    return optuna


def _distribution(optuna: Any, distribution: Distribution) -> Any:
    kinds = optuna.distributions
    if distribution.kind == CHOICE:  # positions, since Optuna accepts only numbers and text
        return kinds.CategoricalDistribution(range(len(distribution.ends)))
    low, high = distribution.bounds
    step, is_log = distribution.step, distribution.kind.startswith("log_")
    if step is not None:
        high = rounded(low + distribution.last_step * step, distribution)
    if distribution.is_whole:
        return kinds.IntDistribution(round(low), round(high), log=is_log, step=round(step or 1))
    return kinds.FloatDistribution(low, high, log=is_log, step=step)


def _as_trial(optuna: Any, trial: Trial, parameters: Mapping[str, Distribution]) -> Any:
    states = optuna.trial.TrialState
    state = {
        "finished": states.COMPLETE,
        "running": states.RUNNING,
        "diverged": states.PRUNED,  # without a value, it ranks behind all others
        "failed": states.FAIL,
    }
    chosen = {
        key: parameters[key].place_of(value) if parameters[key].kind == CHOICE else value
        for key, value in trial.values.items()
    }
    return optuna.trial.create_trial(
        state=state[trial.state],
        value=trial.value if trial.state == "finished" else None,
        params=chosen,
        distributions={key: _distribution(optuna, parameters[key]) for key in chosen},
    )


def _asked(optuna: Any, trial: Any, parameters: Mapping[str, Distribution]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key in by_condition(parameters):
        if parameters[key].applies(values):
            values[key] = _suggested(trial, key, parameters[key], _distribution(optuna, parameters[key]))
    return values


def _suggested(trial: Any, key: str, distribution: Distribution, kind: Any) -> Any:
    if distribution.kind == CHOICE:
        return distribution.ends[trial.suggest_categorical(key, kind.choices)]
    suggest = trial.suggest_int if distribution.is_whole else trial.suggest_float
    return suggest(key, kind.low, kind.high, log=kind.log, step=kind.step)
