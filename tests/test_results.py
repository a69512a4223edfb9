"""``hpc_train.results``: runs, metrics and attempts as pandas tables."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import pytest

from hpc_train import results
from hpc_train.errors import UsageError
from hpc_train.paths import RunPaths
from hpc_train.plan.sweep import expand
from hpc_train.run.create import create_run
from tests.plan.files import loaded
from tests.report.made_runs import made_sweep

pandas = pytest.importorskip("pandas")


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[RunPaths]:
    monkeypatch.setenv("HPC_TRAIN_RUNS", str(tmp_path / "runs"))
    return made_sweep(tmp_path / "runs", 6, steps=200)


def test_runs_have_their_settings_and_their_best_value(runs: list[RunPaths]) -> None:
    table = results.runs("sweep").set_index("run")
    assert list(table.index) == [paths.folder.name for paths in runs]
    first = table.loc["0000000000"]
    assert (first["state"], first["step"], first["attempts"], first["ranks"]) == ("completed", 200, 2, 8)
    assert first["optimization.optimizer.lr"] == 0.01 and first["metric"] == "val/accuracy"
    assert first["best"] >= first["last"] and first["best_step"] in {50, 100, 150, 200}
    assert 0 < first["goodput"] < 1 and Path(first["path"]) == runs[0].folder
    by_loss = results.runs(runs[0].folder, metric="train/loss")
    assert by_loss["best"].item() < 1 and len(by_loss) == 1


def test_the_last_value_of_a_run_that_diverged_at_its_end_is_nan(runs: list[RunPaths]) -> None:
    """Rows have null for NaN."""
    with runs[0].metrics.open("a") as file:
        file.write('{"split": "val", "step": 300, "accuracy": null, "loss": null}\n')
    first = results.runs("sweep", metric="loss").set_index("run").loc["0000000000"]
    assert math.isnan(first["last"]) and first["last_step"] == 300
    assert first["best"] < 10 and first["best_step"] <= 200


def test_values_of_lists_and_draws_are_columns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HPC_TRAIN_RUNS", str(tmp_path / "runs"))
    more = """sweep:
  list: [{optimization.optimizer.lr: 0.2}, {data.args.channels: 5}]
  random: {count: 2, parameters: {optimization.optimizer.weight_decay: {uniform: [0, 0.1]}}}
"""
    variants = expand(loaded(tmp_path, more=more))
    for variant in variants:
        paths = RunPaths(tmp_path / "runs" / "tiny" / variant.id)
        assert create_run(paths, variant.experiment, variant.id, 1, values=variant.values)
    table = results.runs().set_index("run")
    decays = [variant.values["optimization.optimizer.weight_decay"] for variant in variants]
    assert [table.loc[each.id]["optimization.optimizer.weight_decay"] for each in variants] == decays
    assert [table.loc[each.id]["optimization.optimizer.lr"] for each in variants] == [0.2, 0.2, 0.1, 0.1]
    assert sorted(table["data.args.channels"].dropna()) == [5, 5]


def test_metrics_are_the_rows_of_all_runs(runs: list[RunPaths]) -> None:
    table = results.metrics()
    assert len(table) == sum(len(paths.metrics.read_text().splitlines()) for paths in runs)
    assert str(table["time"].dt.tz) == "UTC"
    evaluations = results.metrics("sweep", split="val")
    assert set(evaluations["split"]) == {"val"} and "iou_road" in evaluations
    curves = table[table["split"] == "train"].pivot(index="step", columns="run", values="loss")
    assert curves.shape == (40, 6)


def test_attempts_have_their_causes_and_times(runs: list[RunPaths]) -> None:
    table = results.attempts("sweep")
    assert set(table["cause"]) == {"completed", "preemption", "crash"}
    assert (table["end"] > table["start"]).all() and set(table["nodes"]) == {"n1", "n2", "n3", "n4"}
    assert table["duration_s"].sum() == pytest.approx(results.runs("sweep")["elapsed_s"].sum())


def test_what_is_not_there_is_said(runs: list[RunPaths]) -> None:
    with pytest.raises(UsageError, match="no run or experiment of this name"):
        results.metrics("other")
    with pytest.raises(UsageError, match=r"f1 is in no run's metrics\.jsonl; there are train/"):
        results.runs("sweep", metric="f1")


def test_without_pandas_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(results.MissingPandasError, match=r"pip install 'hpc-train\[results\]'"):
        results.runs()


@pytest.mark.slow
def test_no_torch_is_imported(runs: list[RunPaths]) -> None:
    code = "import sys; from hpc_train import results; results.runs(); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[1])
