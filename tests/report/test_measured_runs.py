"""What earlier runs tell of the time of a new one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hpc_train.cli import plan_cost as measured_module
from hpc_train.cli.plan_cost import measured, measured_runs, same_work
from hpc_train.experiment.config.schema import Experiment
from hpc_train.paths import RunPaths
from hpc_train.report.usage import evaluation_seconds
from hpc_train.run.attempts import newest_number
from hpc_train.run.create import note_change
from hpc_train.run.files import read_json, write_json
from hpc_train.run.find import run_name
from hpc_train.run.frozen_experiment import read
from tests.report.made_runs import STEP_S, made_sweep
from tests.run.runs import change_facts, change_record, write_rows


def test_the_newest_attempts_of_runs_with_the_same_work_count(tmp_path: Path) -> None:
    runs = made_sweep(tmp_path, 3, steps=100)
    experiment = read(runs[0])
    found = measured_runs(tmp_path, experiment)
    assert len(found) == 3
    for each in found:
        assert each.step_s == pytest.approx(1.05 * STEP_S, rel=0.05)
        assert each.evaluation_s == pytest.approx(6.0, abs=1.5)
        assert (each.start_s, each.stop_s) == (pytest.approx(26, abs=1), pytest.approx(8, abs=1))
        assert each.save_s > 0


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> RunPaths:
    """A run that tests only read."""
    return made_sweep(tmp_path_factory.mktemp("finished"), 1, steps=100)[0]


def _root(run: RunPaths) -> Path:
    return run.folder.parents[1]


def test_other_work_per_sample_does_not_count(finished: RunPaths) -> None:
    experiment = read(finished)
    other_size = experiment.optimization.model_copy(update={"global_batch_size": 8, "steps": 7})
    assert measured_runs(_root(finished), experiment.model_copy(update={"optimization": other_size}))
    assert not measured_runs(_root(finished), experiment.model_copy(update={"precision": "bf16"}))
    renamed = experiment.model_copy(update={"name": "another"})
    assert measured_runs(_root(finished), renamed), "runs of other experiments with the same model"


#: Keys that change the time of a step, and keys that do not.
OTHER_WORK: list[dict[str, Any]] = [
    {"activation_checkpointing": "blocks"},
    {"deterministic": True},
    {"model": {"channels_last": True}},
    {"optimization": {"ema": {"decay": 0.9}}},
    {"optimization": {"optimizer": {"args": {"foreach": False}}}},
    {"optimization": {"clip_grad_norm": 1.0}},
    {"data": {"augment": {"hflip": 0.5}}},
    {"data": {"workers": 4}},
    {"data": {"root": "/data/other"}},
    {"data": {"stage": True}},
]
SAME_WORK: list[dict[str, Any]] = [
    {"seed": 7},
    {"data": {"args": {"num_samples": 100}}},
    {"data": {"normalize": {"mean": [0.5], "std": [0.5]}}},
    {"model": {"init_from": "/runs/other/abc"}},
    {"optimization": {"optimizer": {"lr": 0.5, "weight_decay": 0.1}}},
    {"optimization": {"schedule": {"name": "cosine", "warmup_steps": 3}}},
    {"optimization": {"steps": None, "epochs": 3}},
    {"checkpoint": {"every_steps": 7}, "evaluation": {"every_steps": 7}, "logging": {"every_steps": 1}},
    {"recovery": {"max_crashes": 1}, "early_stopping": {"metric": "loss", "mode": "min", "patience": 3}},
]


@pytest.mark.parametrize(
    ("change", "is_same"), [(key, False) for key in OTHER_WORK] + [(key, True) for key in SAME_WORK]
)
def test_which_keys_change_step_time(finished: RunPaths, change: dict[str, Any], is_same: bool) -> None:
    changed = _changed(finished, change)
    assert bool(measured_runs(_root(finished), changed)) is is_same
    assert (same_work(changed) == same_work(read(finished))) is is_same


def test_fractions_count_by_whether_they_are_zero(finished: RunPaths) -> None:
    def work_with(value: float) -> Any:
        optimization = {"ema": {"decay": value}, "clip_grad_norm": value, "mixup": value}
        change = {"optimization": optimization, "data": {"augment": {"hflip": value}}}
        return same_work(_changed(finished, change))

    assert work_with(0.5) == work_with(0.75) != same_work(read(finished))


def test_keys_that_an_earlier_version_did_not_have_are_those_of_the_schema(tmp_path: Path) -> None:
    (run,) = made_sweep(tmp_path, 1, steps=100)
    experiment, resolved = read(run), read_json(run.resolved)
    assert resolved is not None
    del resolved["activation_checkpointing"], resolved["model"]["channels_last"]
    write_json(run.resolved, resolved)
    assert measured_runs(tmp_path, experiment)
    assert not measured_runs(tmp_path, experiment.model_copy(update={"activation_checkpointing": "blocks"}))


def test_a_run_is_compared_with_the_changes_of_its_resumes(tmp_path: Path) -> None:
    (run,) = made_sweep(tmp_path, 1, steps=100)
    experiment = read(run)
    note_change(run, newest_number(run), ["activation_checkpointing=blocks"])
    assert not measured_runs(tmp_path, experiment)
    assert measured_runs(tmp_path, experiment.model_copy(update={"activation_checkpointing": "blocks"}))


def test_each_section_of_the_file_is_part_of_the_work_or_not() -> None:
    """A new one needs a decision: whether it changes the time of a step."""
    others = {
        "name", "seed", "evaluation", "early_stopping", "checkpoint", "recovery", "slurm", "environment",
        "sweep", "logging", "profile", "stages",
    }  # fmt: skip
    assert {*measured_module._SECTIONS} | others == set(Experiment.model_fields)
    assert not others & {*measured_module._SECTIONS}


def _changed(run: RunPaths, change: dict[str, Any]) -> Experiment:
    return Experiment.model_validate(_merged(read(run).model_dump(mode="json"), change))


def _merged(values: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
    """Return ``values`` with the keys of ``change``."""
    merged = values | change
    for key, value in change.items():
        if isinstance(value, dict) and isinstance(values.get(key), dict):
            merged[key] = _merged(values[key], value)
    return merged


def test_runs_of_another_launcher_do_not_count(tmp_path: Path) -> None:
    (run,) = made_sweep(tmp_path, 1, steps=100)
    change_record(run.attempt(newest_number(run)), launcher="local")
    experiment = read(run)
    assert measured_runs(tmp_path, experiment, "local")
    assert not measured_runs(tmp_path, experiment, "slurm")


def test_a_run_that_cannot_be_read_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = made_sweep(tmp_path, 2, steps=100)

    def read_or_refuse(path: Path) -> Any:
        if path == second.resolved:
            raise PermissionError(13, "Permission denied", str(path))
        return read_json(path)

    monkeypatch.setattr("hpc_train.cli.plan_cost.read_json", read_or_refuse)
    rows = [json.loads(line) for line in first.metrics.read_text().splitlines()]
    found = measured_runs(tmp_path, read(first))
    assert [each.name for each in found] == [run_name(first)]
    huge = rows[-1] | {"split": "val", "step": 10**400}
    write_rows(first, [*rows, huge])
    assert evaluation_seconds([*rows, huge]) == evaluation_seconds(rows)
    measured_runs(tmp_path, read(first))


def test_a_run_without_times_or_with_damaged_files_tells_nothing(tmp_path: Path) -> None:
    first, second, third = made_sweep(tmp_path, 3, steps=100)
    experiment = read(first)
    rows = [json.loads(line) for line in first.metrics.read_text().splitlines()]
    write_rows(first, (row | {"step_s": "x"} for row in rows))
    second.resolved.write_text("{")
    change_facts(third, ranks=None, step=3)
    for attempt in third.attempt_folders():
        attempt.record.write_text("[]")
    assert measured_runs(tmp_path, experiment) == []
    assert measured_runs(tmp_path / "nowhere", experiment) == []


@pytest.mark.parametrize(("began", "saves"), [((), 200), (("step-00040000", "step-00050000"), 100)])
def test_saves_are_counted_from_the_first_step(tmp_path: Path, began: tuple[str, ...], saves: int) -> None:
    """Its rows are longer than the end of the file that is read."""
    (run,) = made_sweep(tmp_path, 1, steps=100)
    attempt = run.attempt(newest_number(run))
    attempt.events.unlink(missing_ok=True)
    change_record(attempt, checkpoints=list(began), checkpoint_stall_s=2.0 * saves)
    row = {"time": 1.0, "attempt": attempt.number, "split": "train", "loss": 0.123456, "step_s": 0.1}
    write_rows(run, (row | {"step": step} for step in range(99_000, 100_001)))
    resolved = read_json(run.resolved)
    assert resolved is not None
    found = measured(run, resolved | {"checkpoint": {"every_steps": 500}})
    assert found is not None and found.save_s == pytest.approx(2.0)
