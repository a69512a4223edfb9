"""What ``compile:`` may not say where a run has to repeat itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpc_train.errors import BadFileError
from hpc_train.validate.loading import load
from tests.plan.files import EXPERIMENT


def load_with(folder: Path, *overrides: str) -> None:
    file = folder / "exp.yaml"
    file.write_text(EXPERIMENT)
    load(file, ["compile={dynamic: null}", *overrides])


@pytest.mark.parametrize("overrides", [["device=cpu"], ["device=auto", "deterministic=true"]])
def test_shapes_that_torch_chooses_are_refused_where_a_run_is_deterministic(
    overrides: list[str], tmp_path: Path
) -> None:
    with pytest.raises(BadFileError) as raised:
        load_with(tmp_path, *overrides)
    assert "compile.dynamic: null compiles by the order in which batch sizes come" in str(raised.value)
    assert "write dynamic: false" in str(raised.value)


@pytest.mark.parametrize(
    "overrides",
    [["device=auto"], ["deterministic=false"], ["compile={enabled: false, dynamic: null}"], ["compile=true"]],
)
def test_elsewhere_they_are_not(overrides: list[str], tmp_path: Path) -> None:
    load_with(tmp_path, *overrides)
