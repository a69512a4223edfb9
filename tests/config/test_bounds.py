"""Values that pass no check later either: bounds of the file and of the environment."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpc_train.errors import BadFileError, UsageError
from hpc_train.experiment.plan.planning import make_plan
from hpc_train.experiment.validate.loading import load
from hpc_train.paths import expanded, runs_root
from tests.config.files import GOOD


def test_more_samples_than_can_be_indexed_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "exp.yaml"
    path.write_text(GOOD)
    loaded = load(path, ["data.name=synthetic", f"data.args.num_samples={10**44}"])
    with pytest.raises(BadFileError, match=r"data\.args\.num_samples: has 1e\+44 training samples"):
        make_plan(loaded)


def test_a_home_folder_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HPC_TRAIN_RUNS", "~no-such-user/x")
    with pytest.raises(
        UsageError, match=r"HPC_TRAIN_RUNS: '~no-such-user/x' .* write the folder's full path"
    ):
        runs_root()
    assert expanded("~no-such-user/x") == Path("~no-such-user/x")
