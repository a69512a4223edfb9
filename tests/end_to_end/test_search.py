"""A search of two rounds with real ranks and the real Optuna."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpc_train.run.find import find_runs
from hpc_train.run.run_status import recorded_values
from tests.end_to_end.runs import EXPERIMENT, hpc_train

pytestmark = pytest.mark.slow

SEARCH = """\
sweep:
  search:
    trials: 4
    max_concurrent: 2
    metric: accuracy
    mode: max
    parameters:
      optimization.optimizer.lr: {log_uniform: [1e-4, 1e-2]}
      seed: {choice: [3, 4]}
"""


def test_a_search_trains_its_trials_round_by_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "search.yaml"
    short = EXPERIMENT.replace("steps: 30", "steps: 4").replace("warmup_steps: 20", "warmup_steps: 1")
    file.write_text(short.replace("every_steps: 20", "every_steps: 4") + SEARCH)
    found = {"HPC_TRAIN_RUNS": str(tmp_path / "runs")}
    options = ("--local", "--devices", "1", "device=cpu", "data.workers=0")
    done = hpc_train("search", file, *options, **found)
    assert done.code == 0, done.err
    assert "digits: 0 of 4 trials; next: 2" in done.err
    assert "digits: 2 of 4 trials; best accuracy 0." in done.err
    assert "digits: 4 of 4 trials; best accuracy 0." in done.err and "the search is complete" in done.err
    monkeypatch.setenv("HPC_TRAIN_RUNS", str(tmp_path / "runs"))
    rates = {recorded_values(paths)["optimization.optimizer.lr"] for paths in find_runs([])}
    assert len(rates) == 4 and all(1e-4 <= rate <= 1e-2 for rate in rates)
    again = hpc_train("submit", file, *options, **found)
    assert again.code == 0 and "the search is complete" in again.err
    assert len(find_runs([])) == 4
