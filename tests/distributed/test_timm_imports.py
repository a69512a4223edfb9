"""A rank that imports timm does not import wandb."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hpc_train.training import models
from tests.cli.commands import REPOSITORY
from tests.waiting import HANG_LIMIT_S


def run_python(script: str, folder: Path) -> str:
    """Run a script beside a stand-in for wandb and one for timm; return what it prints."""
    (folder / "wandb.py").write_text("")
    summary = folder / "timm" / "utils" / "summary.py"
    summary.parent.mkdir(parents=True)
    (folder / "timm" / "__init__.py").write_text("import timm.utils")
    (folder / "timm" / "utils" / "__init__.py").write_text("import timm.utils.summary")
    summary.write_text("try:\n    import wandb\nexcept ImportError:\n    pass\n")
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(folder)!r})\n{script}"]
    return subprocess.run(command, capture_output=True, text=True, timeout=HANG_LIMIT_S, check=True).stdout


def test_timm_does_without_wandb_and_the_users_own_code_has_it(tmp_path: Path) -> None:
    script = """
import hpc_train.training.models
import timm
print("wandb" in sys.modules)
import wandb
print(wandb.__name__)
"""
    assert run_python(script, tmp_path).split() == ["False", "wandb"]


def test_without_it_timm_imports_wandb(tmp_path: Path) -> None:
    """What the test above relies on."""
    assert run_python("import timm; print('wandb' in sys.modules)", tmp_path).split() == ["True"]


@pytest.mark.slow
def test_nobody_who_looks_for_models_imports_wandb(tmp_path: Path) -> None:
    """The children of commands too: they may be killed, and wandb's folders in $TMPDIR would stay.

    The module ``names`` prints one JSON object.
    """
    script = """
import runpy, sys
import hpc_train.training.models.timm
runpy.run_module("hpc_train.training.models.names", run_name="__main__")
import timm.utils.summary
print("wandb" in sys.modules)
"""
    command = [sys.executable, "-c", script]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=HANG_LIMIT_S, check=True,
        env=os.environ | {"TMPDIR": str(tmp_path), "PYTHONPATH": str(REPOSITORY)},
    )  # fmt: skip
    printed, has_wandb = done.stdout.strip().rsplit("\n", 1)
    assert has_wandb == "False"
    assert not list(tmp_path.glob("*wandb*"))
    names = json.loads(printed)
    keys = {"timm", "torchvision", "smp", "smp_encoders", "datasets", "timm_optimizers"}
    arguments = {name for name in names if name.startswith("timm_optimizers/")}
    assert names.keys() - arguments == keys
    assert "betas" in names["timm_optimizers/lion"] and "momentum" not in names["timm_optimizers/lion"]


@pytest.mark.slow
def test_a_rank_does_it_before_it_can_import_timm(tmp_path: Path) -> None:
    script = """
import sys
import hpc_train.training.main
print("timm" in sys.modules, any("NoWandb" in type(finder).__name__ for finder in sys.meta_path))
"""
    assert run_python(script, tmp_path).split() == ["False", "True"]
    assert models._IMPORTER == "timm.utils.summary"
