"""``sweep.search``: each submit starts the next runs, from what the run folders say."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from hpc_train.paths import ExperimentPaths, RunPaths
from hpc_train.run.attempts import claim_attempt
from hpc_train.run.find import find_runs
from hpc_train.run.run_status import RunStatus, read_status, recorded_values, write_status
from tests.cli import launchers
from tests.cli.commands import Done, hpc_train, stderr_of
from tests.cli.launchers import COMPLETING, FAILING, INTERRUPTED, PICKY, QUEUE, Queue, queued
from tests.run.runs import change_record
from tests.search import methods

SEARCH = f"""\
sweep:
  search:
    method: "{methods.COUNTING}"
    trials: 5
    max_concurrent: 2
    metric: accuracy
    mode: max
    parameters: {{seed: {{int: [0, 99]}}}}
"""


@pytest.fixture
def search(file: Path) -> Iterator[Path]:
    file.write_text(file.read_text() + SEARCH)
    methods.requests.clear()
    yield file
    methods.requests.clear()


def _local(file: Path, *overrides: str) -> Done:
    return hpc_train("submit", file, "--local", "--launcher", COMPLETING, *overrides)


def _seeds() -> list[int]:
    values = [recorded_values(paths) for paths in find_runs([])]
    return sorted(each["seed"] for each in values if each is not None)


def _finish(paths: RunPaths, accuracy: float) -> None:
    row = {"split": "val", "step": 5, "attempt": 1, "accuracy": accuracy}
    paths.metrics.write_text(json.dumps(row) + "\n")
    write_status(paths, RunStatus("completed", step=9))


def _run(seed: int) -> RunPaths:
    (found,) = [paths for paths in find_runs([]) if recorded_values(paths).get("seed") == seed]
    return found


def test_submits_go_on_until_all_trials_are_done(search: Path) -> None:
    done = _local(search)
    assert done.code == 0 and _seeds() == [0, 1]
    assert "tiny: 0 of 5 trials; next: 2" in done.err
    done = _local(search)
    assert _seeds() == [0, 1, 2, 3]
    assert f"tiny: 2 of 5 trials; best accuracy 0.75: seed=0 ({_run(0).folder.name}); next: 2" in done.err
    states = [(trial.state, trial.value, trial.values) for trial in methods.requests[-1].trials]
    assert states == [("finished", 0.75, {"seed": 0}), ("finished", 0.75, {"seed": 1})]
    _local(search)
    done = _local(search)
    assert done.code == 0 and _seeds() == [0, 1, 2, 3, 4]
    assert "tiny: 5 of 5 trials" in done.err and "the search is complete" in done.err
    _local(search, "sweep.search.trials=6")
    assert _seeds() == [0, 1, 2, 3, 4, 5]


def test_runs_without_a_parameter_whose_condition_does_not_hold_are_trials(search: Path) -> None:
    """The first choice: sgd, which has no betas; and not in the run's file either."""
    conditional = (
        f"sweep.search={{method: '{methods.STUBBORN}', trials: 3, metric: accuracy, mode: max, parameters: "
        "{optimization.optimizer.name: {choice: [sgd, adamw]}, optimization.optimizer.args.betas: "
        "{choice: [[0.9, 0.99]], when: {optimization.optimizer.name: adamw}}}}"
    )
    assert _local(search, conditional).code == 0
    assert "tiny: 1 of 3 trials; best accuracy 0.75" in _local(search, conditional).err


def test_a_submit_while_the_trials_run_starts_nothing_and_plan_shows_what_it_would(search: Path) -> None:
    planned = json.loads(hpc_train("plan", search, "--launcher", QUEUE, "--json").out)
    assert [run["values"] for run in planned["runs"]] == [{"seed": 0}, {"seed": 1}]
    hpc_train("submit", search, "--launcher", QUEUE)
    assert [run.paths.folder.name for run in queued[-1]] == [run["id"] for run in planned["runs"]]
    done = hpc_train("submit", search, "--launcher", QUEUE)
    assert done.code == 0 and len(queued) == 1
    assert "tiny: 2 of 5 trials, 2 of them running; nothing to start until one of them ends" in done.err
    _finish(_run(1), 0.5)
    hpc_train("submit", search, "--launcher", QUEUE)
    assert len(queued) == 2 and _seeds() == [0, 1, 2]
    states = [trial.state for trial in methods.requests[-1].trials]
    assert sorted(states) == ["finished", "running"]


def test_runs_that_a_killed_submit_left_are_proposed_again(search: Path) -> None:
    hpc_train("submit", search, "--launcher", QUEUE)
    (_run(1).folder / "unsubmitted").touch()
    _finish(_run(0), 0.5)
    shutil.rmtree(_run(0).folder)  # as if only the second had been created
    hpc_train("submit", search, "--launcher", QUEUE)
    assert [len(runs) for runs in queued] == [2, 2] and _seeds() == [0, 1]
    assert not (_run(1).folder / "unsubmitted").exists()


def test_divergence_is_a_result_and_a_crash_is_none(search: Path) -> None:
    hpc_train("submit", search, "--launcher", QUEUE)
    for seed, cause in enumerate(["diverged", "crash"]):
        paths = _run(seed)
        attempt = paths.attempt(claim_attempt(paths, ranks=1))
        write_status(paths, RunStatus("failed", step=3))
        change_record(attempt, end="2026-01-01T00:00:00+00:00", cause=cause)
        (paths.checkpoints / "step-3").mkdir(parents=True)
    hpc_train("submit", search, "--launcher", QUEUE)
    states = {trial.values["seed"]: trial.state for trial in methods.requests[-1].trials}
    assert states == {0: "diverged", 1: "failed"}


def test_runs_of_another_file_are_no_trials_and_those_of_a_grid_are(search: Path) -> None:
    _local(search, "sweep={}", "seed=40")
    _local(search, "sweep={grid: {seed: [41, 400]}}")
    _local(search, "sweep={}", "seed=42", "optimization.epochs=4")
    hpc_train("plan", search)
    assert sorted(trial.values["seed"] for trial in methods.requests[-1].trials) == [40, 41]


def test_a_metric_that_completed_runs_lack_is_an_error_that_names_theirs(search: Path) -> None:
    _local(search)
    done = _local(search, "sweep.search.metric=ema_accuracy")
    assert done.code == 1
    said = "sweep.search.metric: ema_accuracy is in no completed run's metrics.jsonl; there are val/accuracy"
    assert said in done.err
    assert "sweep.search.metric: f2 is not a metric of" in _local(search, "sweep.search.metric=f2").err


def test_validate_checks_the_search_space_without_asking_its_method(search: Path) -> None:
    done = hpc_train("validate", search)
    assert (done.code, methods.requests) == (0, [])
    assert "fine: 5 runs of tiny" in done.err
    done = hpc_train("validate", search, "sweep.search.method=tpee")
    assert "sweep.search.method: there is no search method 'tpee'; did you mean tpe?" in done.err


def test_search_submits_until_all_trials_are_done(search: Path) -> None:
    done = hpc_train("search", search, "--local", "--launcher", COMPLETING, "--rounds", "1")
    assert done.code == 0 and _seeds() == [0, 1]
    done = hpc_train("search", search, "--local", "--launcher", COMPLETING)
    assert done.code == 0 and _seeds() == [0, 1, 2, 3, 4]
    assert done.err.count("next: ") == 2 and "the search is complete" in done.err
    done = hpc_train("search", search, "sweep={}")
    assert done.code == 2 and "has no sweep.search; add it, or use `hpc-train submit`" in done.err


def test_search_waits_for_trials_in_a_queue(search: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []

    def finish_one(seconds: float) -> None:
        waits.append(seconds)
        running = [paths for paths in find_runs([]) if read_status(paths).state == "pending"]
        _finish(running[0], 0.5)

    monkeypatch.setattr("hpc_train.cli.search.time", SimpleNamespace(sleep=finish_one))
    done = hpc_train("search", search, "--launcher", QUEUE)
    assert done.code == 0 and _seeds() == [0, 1, 2, 3, 4]
    assert len(waits) == 5 and [len(runs) for runs in queued] == [2, 1, 1, 1]


def test_search_ends_if_a_submit_starts_nothing(search: Path) -> None:
    options = ("--local", "--launcher", COMPLETING, f"sweep.search.method={methods.COUNTING}")
    _local(search)
    for paths in find_runs([]):
        paths.resolved.write_text("{")  # no trials any more, but their ids are taken
    done = hpc_train("search", search, *options)
    assert done.code != 0 and "the last submit started none of its trials" in done.err


def _search(file: Path, launcher: str, *options: str) -> Done:
    return hpc_train("search", file, "--local", "--launcher", launcher, *options)


def _ids() -> dict[int, str]:
    values = {paths.folder.name: recorded_values(paths) for paths in find_runs([])}
    return {each["seed"]: name for name, each in values.items()}


def _attempts() -> list[tuple[str, int]]:
    """Return each attempt that a launcher was asked for: its run, and its number."""
    return [(request.paths.folder.name, request.attempt) for request in launchers.requests]


def test_search_ends_once_a_whole_round_fails_and_starts_it_again_after_the_fix(search: Path) -> None:
    done = _search(search, FAILING)
    assert done.code == 1 and _seeds() == [0, 1], "two more would fail of the same error"
    assert "tiny: all 2 trials that have ended failed before saving anything; fix the cause" in done.err
    assert "the search is complete" not in done.err
    failed = _ids()
    launchers.requests.clear()
    done = _search(search, COMPLETING)
    assert done.code == 0 and _seeds() == [0, 1, 2, 3, 4]
    assert "tiny: 2 of 5 trials, 2 of them to start again; next: 2" in done.err
    again = [attempt for attempt in _attempts() if attempt[1] == 2]
    assert sorted(again) == sorted((failed[seed], 2) for seed in (0, 1))
    assert {read_status(paths).state for paths in find_runs([])} == {"completed"}


def test_an_error_that_stays_ends_each_search_and_loses_no_trial(search: Path) -> None:
    for seeds in ([0, 1], [0, 1, 2, 3], [0, 1, 2, 3, 4], [0, 1, 2, 3, 4]):
        launchers.requests.clear()
        done = _search(search, FAILING)
        assert done.code == 1 and _seeds() == seeds and len(_attempts()) == 2
        assert "fix the cause and repeat the command" in done.err
    assert _search(search, COMPLETING).code == 0
    assert {read_status(paths).state for paths in find_runs([])} == {"completed"}


def test_values_that_fail_do_not_end_a_search_in_which_others_train(search: Path) -> None:
    """Such as those that need too much memory: each is tried once per command."""
    done = _search(search, PICKY)
    assert done.code == 1 and _seeds() == [0, 1, 2, 3, 4]
    assert "tiny: 5 of 5 trials, 3 of them failed; best accuracy 0.75" in done.err
    launchers.requests.clear()
    done = _search(search, PICKY)
    assert done.code == 1 and "tiny: 5 of 5 trials, 3 of them failed; best accuracy 0.75" in done.err
    assert sorted(_attempts()) == sorted((_ids()[seed], 2) for seed in (0, 2, 4))


def test_an_interrupted_search_continues_with_the_same_command(search: Path) -> None:
    _search(search, COMPLETING, "--rounds", "2")
    assert _search(search, INTERRUPTED).code == 130 and _seeds() == [0, 1, 2, 3, 4]
    (last,) = [paths for paths in find_runs([]) if read_status(paths).state == "interrupted"]
    (last.checkpoints / "step-5").mkdir(parents=True)
    launchers.requests.clear()
    done = _search(search, COMPLETING)
    assert done.code == 0 and "tiny: 5 of 5 trials, 1 of them to start again; best" in done.err
    assert "5 of 5 trials; best accuracy" in done.err
    assert _attempts() == [(last.folder.name, 2)] and read_status(last).state == "completed"


def test_a_plain_submit_leaves_an_interrupted_run_with_a_checkpoint_to_resume(search: Path) -> None:
    options = ("submit", search, "--local", "sweep={}")
    hpc_train(*options, "--launcher", INTERRUPTED)
    (paths,) = find_runs([])
    (paths.checkpoints / "step-5").mkdir(parents=True)
    done = hpc_train(*options, "--launcher", COMPLETING)
    assert done.code == 1 and "nothing started" in done.err and len(_attempts()) == 1


def test_a_trial_that_failed_after_a_checkpoint_stays_failed(search: Path) -> None:
    _search(search, FAILING)
    for paths in find_runs([]):
        (paths.checkpoints / "step-5").mkdir(parents=True)
    done = _search(search, COMPLETING, "sweep.search.trials=2")
    assert done.code == 1 and "tiny: 2 of 2 trials, 2 of them failed; the search is complete" in done.err
    assert "tiny: no trial has a value of accuracy; see `hpc-train status tiny`" in done.err
    done = _search(search, COMPLETING)
    assert "tiny: 2 of 5 trials, 2 of them failed; next: 2" in done.err and _seeds() == [0, 1, 2, 3, 4]
    states = {trial.values["seed"]: trial.state for trial in methods.requests[-1].trials}
    assert states == {0: "failed", 1: "failed", 2: "finished", 3: "finished"}


def test_the_newest_run_of_a_trial_is_the_one_that_starts_again(search: Path) -> None:
    _local(search)
    first = _ids()[0]
    hpc_train("submit", search, "--local", "--launcher", FAILING, "--new", "sweep={}", "seed=0")
    launchers.requests.clear()
    _local(search, "sweep.search.trials=2")
    assert _attempts() == [(f"{first}-2", 2)]


def _submissions(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Return where the queue is asked to finish half-done submissions, as Slurm's launcher does."""
    finished: list[Path] = []

    @contextmanager
    def submitting(self: Queue, folder: ExperimentPaths) -> Iterator[None]:
        finished.append(folder.folder)
        yield

    monkeypatch.setattr(Queue, "submitting", submitting)
    return finished


def test_a_complete_submit_finishes_old_submissions(search: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hpc_train("submit", search, "--launcher", QUEUE)
    finished = _submissions(monkeypatch)
    hpc_train("submit", search, "--launcher", QUEUE, "--dry-run")
    assert finished == []
    assert "nothing to start until one of them ends" in stderr_of(0, "submit", search, "--launcher", QUEUE)
    assert finished == [_run(0).folder.parent]


def test_search_finishes_old_submissions_first(search: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hpc_train("submit", search, "--launcher", QUEUE)
    finished = _submissions(monkeypatch)

    def sleep(seconds: float) -> None:
        assert finished == [_run(0).folder.parent]
        raise KeyboardInterrupt

    monkeypatch.setattr("hpc_train.cli.search.time", SimpleNamespace(sleep=sleep))
    assert hpc_train("search", search, "--launcher", QUEUE).code == 130


def test_a_trial_that_always_fails_does_not_keep_submits_from_others(search: Path) -> None:
    for seeds in ([0], [0, 1], [0, 1, 2]):
        _search(search, PICKY, "sweep.search.max_concurrent=1", "--rounds", "1")
        assert _seeds() == seeds
