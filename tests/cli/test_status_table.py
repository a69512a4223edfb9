"""The table of ``status`` for sweeps: groups, order, failed runs, swept values."""

from __future__ import annotations

import json

import pytest

from hpc_train.console import fitted
from hpc_train.paths import RunPaths, runs_root
from tests.cli.commands import hpc_train, stderr_of
from tests.report.made_runs import made_sweep
from tests.run.runs import change_facts, small_run

_RATES = (0.1, 1e-3, 0.02, 0.3, 5.0, 0.004)


@pytest.fixture
def sweep() -> list[RunPaths]:
    """Six runs over the learning rate, the last of which has failed."""
    runs = made_sweep(runs_root(), 6, steps=50)
    for paths, rate in zip(runs, _RATES, strict=True):
        change_facts(paths, values={"optimization.optimizer.lr": rate})
    return runs


def _ids(*words: str) -> list[str]:
    done = hpc_train("status", *words)
    assert done.code == 0, done.err
    return [line.split()[0] for line in done.out.splitlines()[1:] if not line.startswith("sweep:")]


@pytest.mark.usefixtures("sweep")
def test_a_sweep_has_a_line_with_its_runs_by_state_and_the_swept_values() -> None:
    small_run(runs_root())
    lines = hpc_train("status").out.splitlines()
    assert "sweep: 6 runs: 5 completed, 1 failed" in lines
    assert not any(line.startswith("small:") for line in lines), "no sweep"
    assert "lr=0.02" in next(line for line in lines if line.startswith("0000000002"))


def test_runs_are_sorted_by_a_swept_key_or_a_column(sweep: list[RunPaths]) -> None:
    by_rate = [sweep[place].folder.name for place in (1, 5, 2, 0, 3, 4)]
    assert _ids("--sort", "lr") == _ids("--sort", "optimization.optimizer.lr") == by_rate
    assert _ids("--sort", "state")[-1] == sweep[5].folder.name
    rows = json.loads(hpc_train("status", "--json", "--sort", "metric").out)["runs"]
    values = [row["last_metric"]["value"] for row in rows]
    assert values == sorted(values)
    assert rows[0]["usage"]["time"]["training"] > 0
    assert "did you mean state?" in stderr_of(2, "status", "--sort", "stat")


def test_only_failed_runs(sweep: list[RunPaths]) -> None:
    assert _ids("--failed") == [sweep[5].folder.name]
    assert hpc_train("status", "--failed", sweep[0].folder.name).err == "no run has failed\n"


def test_one_run_shows_what_it_used(sweep: list[RunPaths]) -> None:
    out = hpc_train("status", sweep[0].folder.name).out
    assert "  time lost  starts " in out and "  memory     peak 21.4 GiB on a GPU" in out


def test_values_are_cut_to_80_columns() -> None:
    heads = ["run", "experiment", "state", "step", "elapsed", "values", "last metric or reason"]
    row = ["0123456789", "imagenet", "completed", "1000/1000", "1h02m", "lr=0.1 wd=0.05 " * 4, "loss 0.75"]
    lines = fitted([heads, row], 80)
    assert max(map(len, lines)) <= 80 and "lr=0.1" in lines[1]
