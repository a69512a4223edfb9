"""``resume`` of completed runs with overrides: makes them longer, and refuses every other key."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import NamedTuple

from hpc_train.cli.changes import as_override, key_of, other_run_keys
from hpc_train.cli.starting import new_run_command, other_run
from hpc_train.console import say
from hpc_train.errors import BadFileError, UsageError
from hpc_train.experiment.config.schema import Experiment, Job, Program, as_training
from hpc_train.experiment.topology.batch_arithmetic import count_total_steps
from hpc_train.experiment.topology.learning_rate import OVER_SPAN
from hpc_train.launchers.lookup import statuses
from hpc_train.paths import RunPaths
from hpc_train.run.attempts import job_ids, newest_number
from hpc_train.run.checkpoints import committed, read_object
from hpc_train.run.create import effective_experiment, noted_changes
from hpc_train.run.extension import LENGTH, extend, withdraw
from hpc_train.run.find import is_run, run_name
from hpc_train.run.frozen_experiment import load_changed
from hpc_train.run.run_status import GOING_ON, RunStatus, extensions, read_status, run_facts
from hpc_train.run.trust import check_run

_SECTION = "optimization"
#: More runs of one experiment are a sweep, whose files take too long to compare. Assumed.
_MAX_SIBLINGS = 50
_LENGTH_KEYS = tuple(f"{_SECTION}.{key}" for key in LENGTH)


class _Longer(NamedTuple):
    """A completed run with a new length."""

    experiment: Experiment
    total_steps: int | None
    #: ``KEY=VALUE`` of the new length; the other key is null.
    overrides: list[str]


@contextmanager
def extending(
    runs: Sequence[RunPaths], overrides: Sequence[str]
) -> Iterator[tuple[list[RunPaths], list[str]]]:
    """Yield the runs to resume and their overrides: in place of a completed run, the longer one.

    A longer run that the block refuses to start is removed again. Raises UsageError if a completed run would
    change in another way, or would not get longer.
    """
    length = [word for word in overrides if key_of(word) in _LENGTH_KEYS]
    runs = _unextended(runs) if length else list(runs)
    states = dict(zip(runs, statuses(runs, is_fresh=True), strict=True)) if overrides else {}
    completed = {paths: status for paths, status in states.items() if status.state == "completed"}
    if completed and not length and len(completed) == len(runs):
        raise UsageError(_unchangeable(next(iter(completed)), overrides))
    if length:
        _refuse_unfinished(states, length)
    if not completed or not length:
        yield runs, list(overrides)
        return
    others = [word for word in overrides if word not in length]
    longer = {paths: _longer(paths, status, length, others) for paths, status in completed.items()}
    new, created = {}, []
    for paths, planned in longer.items():
        if planned is not None:
            known = extensions(paths)
            run = new[paths] = extend(paths, *planned)
            if run.folder.name in known:
                say(f"{run_name(paths)}: extended already by {run_name(run)}")
            else:
                created.append(run)
                _say_extension(paths, run, planned)
    try:
        yield list(dict.fromkeys(new.get(paths, paths) for paths in runs)), others
    except (BadFileError, UsageError):
        for run in created:
            if not newest_number(run) and not job_ids(run_facts(run)):
                withdraw(run)
                say(f"{run.folder.name}: removed again, since it can't start like this")
        raise


def _unextended(runs: Sequence[RunPaths]) -> list[RunPaths]:
    """Return the runs without those that others of them extend: an experiment contains both."""
    extending_runs = set(runs)
    return [
        paths
        for paths in runs
        if not any(RunPaths(paths.siblings.folder / name) in extending_runs for name in extensions(paths))
    ]


def _refuse_unfinished(states: Mapping[RunPaths, RunStatus], length: Sequence[str]) -> None:
    """Raise UsageError for a run that is not completed and has another length."""
    for paths, status in states.items():
        if status.state == "completed":
            continue
        before, after, changes = _with_length(paths, length)
        if other_run_keys(before, after):
            name = run_name(paths)
            complete = "logs -f" if status.state in GOING_ON else "resume"
            longer = shlex.join(["hpc-train", "resume", name, *length])
            head = (
                f"{key_of(length[0])}: {name} is {status.state}; only a completed run can be trained longer: "
                f"first `hpc-train {complete} {name}` to its end, then `{longer}`; or start another run"
            )
            raise UsageError(other_run(paths, head, changes))


def _with_length(
    paths: RunPaths, length: Sequence[str], others: Sequence[str] = ()
) -> tuple[Job, Job, list[str]]:
    """Return the run's experiment, the same with the changes, and the changes of the length."""
    noted = noted_changes(paths, newest_number(paths) + 1)
    before = effective_experiment(paths, newest_number(paths) + 1)
    keys = {key_of(word) for word in length}
    unset = [f"{key}=null" for key in _lengths(before) if length and key not in keys]
    after = load_changed(paths, [*noted, *unset, *length, *others], check_names=bool(others)).experiment
    return before, after, [*unset, *length]


def _lengths(experiment: Job) -> dict[str, int]:
    """Return the dotted key of the length, and its value; empty for a program."""
    if not isinstance(experiment, Experiment):
        return {}
    lengths = experiment.optimization.model_dump(include=set(LENGTH), exclude_none=True)
    return {f"{_SECTION}.{key}": value for key, value in lengths.items()}


def _longer(
    paths: RunPaths, status: RunStatus, length: Sequence[str], others: Sequence[str]
) -> _Longer | None:
    """Return the longer run; None if the run has that length.

    Raises UsageError if it can't be extended, UntrustedError if another user could have written its files.
    """
    *both, changes = _with_length(paths, length)
    before, experiment = map(as_training, both)
    if not other_run_keys(before, experiment):
        return None
    if others and (refused := other_run_keys(experiment, _with_length(paths, length, others)[1])):
        raise UsageError(_refusal(paths, refused, [*changes, *others]))
    check_run(paths)  # the new run would have its code and tensors
    name, checkpoints = run_name(paths), committed(paths)
    if not checkpoints:
        again = new_run_command(paths, changes)
        raise UsageError(f"{name}: has no checkpoint to continue from; train from step 0: `{again}`")
    step = checkpoints[0].step
    steps_per_epoch = (read_object(checkpoints[0].state).get("extra") or {}).get("steps_per_epoch")
    if not isinstance(steps_per_epoch, int):
        steps_per_epoch = None
    total = count_total_steps(experiment.optimization, steps_per_epoch)
    if total is not None and total <= step:
        raise UsageError(
            f"{' '.join(length)}: is not longer: {name} has completed {_length_words(before, step)}; write "
            f"more, for example {_example(before)}"
        )
    if experiment.early_stopping is not None and status.step < (status.total_steps or 0):
        command = new_run_command(paths, [*changes, "early_stopping=null", f"model.init_from={name}"])
        raise UsageError(
            f"{' '.join(length)}: would train nothing: {name} ended at step {status.step} of "
            f"{status.total_steps} ({status.reason}); train on from its weights without it: `{command}`"
        )
    return _Longer(experiment, total, changes)


def _length_words(experiment: Experiment, step: int) -> str:
    epochs = experiment.optimization.epochs
    return f"{step} steps" if epochs is None else f"{epochs} epochs, {step} steps"


def _example(experiment: Job) -> str:
    """Return ``KEY=VALUE`` of twice the length."""
    return " ".join(as_override(key, 2 * value) for key, value in _lengths(experiment).items())


def longer_command(paths: RunPaths, others: Sequence[str] = ()) -> str | None:
    """Return a command that makes a completed run longer; None if its files prevent that."""
    try:
        experiment = effective_experiment(paths, newest_number(paths) + 1)
        if not committed(paths) or not _lengths(experiment):
            return None
    except BadFileError:
        return None
    return shlex.join(["hpc-train", "resume", run_name(paths), _example(experiment), *others])


def shorter_run(paths: RunPaths, experiment: Job) -> tuple[RunPaths, str] | None:
    """Return a completed run beside ``paths`` that is a shorter ``experiment``, and the ``KEY=VALUE``
    that makes it as long; None without one.
    """
    lengths = _lengths(experiment)
    for folder in sorted(paths.siblings.folder.iterdir())[:_MAX_SIBLINGS]:
        other = RunPaths(folder)
        if other == paths or not is_run(other) or read_status(other).state != "completed":
            continue
        with suppress(BadFileError):
            before = effective_experiment(other, newest_number(other) + 1)
            shorter = [key for key, value in lengths.items() if _lengths(before).get(key, value) < value]
            if shorter and other_run_keys(before, experiment) == shorter and committed(other):
                return other, as_override(shorter[0], lengths[shorter[0]])
    return None


def _unchangeable(paths: RunPaths, overrides: Sequence[str]) -> str:
    """Return why the overrides of a completed run have no effect, and what to do instead."""
    before, after, _ = _with_length(paths, (), overrides)
    if refused := other_run_keys(before, after):
        return _refusal(paths, refused, overrides)
    longer = longer_command(paths, overrides)
    remedy = f"`{longer}` trains it longer with it" if longer else "submit the file again with --new"
    return f"{' '.join(overrides)}: changes nothing, since {run_name(paths)} has completed; {remedy}"


def _refusal(paths: RunPaths, refused: Sequence[str], overrides: Sequence[str]) -> str:
    longer = f", so it can only be trained longer ({' or '.join(_LENGTH_KEYS)})"
    if run_facts(paths).get("workload") == Program.workload:
        longer = ""
    head = f"{', '.join(refused)}: {run_name(paths)} has completed{longer}; start another run"
    return other_run(paths, head, overrides)


def _say_extension(paths: RunPaths, new: RunPaths, planned: _Longer) -> None:
    step, name = committed(paths)[0].step, planned.experiment.optimization.schedule.name
    total = "more" if planned.total_steps is None else f"step {planned.total_steps}"
    say(f"{run_name(new)}: extends {run_name(paths)} from step {step} to {total}; in {new.folder}")
    if name in OVER_SPAN:
        say(
            f"  optimization.schedule: {name} is now that of the new length, so the learning rate changes at "
            f"step {step}; the steps before it keep theirs"
        )
