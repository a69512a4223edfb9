"""A page with ``<!-- notebook -->`` runs as a notebook: its Python blocks are cells, one after the other."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hpc_train.package_path import with_package
from tests import warm
from tests.docs.pages import NOTEBOOKS, Block, blocks
from tests.waiting import HANG_LIMIT_S


@pytest.mark.slow
@pytest.mark.parametrize("page", NOTEBOOKS, ids=lambda page: page.name)
def test_a_page_runs_as_a_notebook(page: Path, tmp_path: Path) -> None:
    cells = [block for block in blocks(page) if block.language == "python"]
    assert len(cells) > 1
    outputs = run_by_jupyter(cells, tmp_path)
    assert "completed" in outputs[0] and all(outputs), outputs
    (run,) = (tmp_path / "runs").glob("*/*/run.json")
    assert run.parent.name in outputs[0]


def run_by_jupyter(cells: list[Block], folder: Path) -> list[str]:
    """Return the printed output of each cell."""
    file = folder / "page.ipynb"
    code: dict[str, Any] = {"cell_type": "code", "metadata": {}, "outputs": [], "execution_count": None}
    sources = [code | {"id": f"cell-{number}", "source": cell.text} for number, cell in enumerate(cells)]
    file.write_text(json.dumps({"cells": sources, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}))
    environment = {name: value for name, value in os.environ.items() if name != "HPC_TRAIN_RUNS"}
    words = ["jupyter", "nbconvert", "--to", "notebook", "--execute", "--inplace", file.name]
    done = subprocess.run(
        [sys.executable, "-m", *words],
        cwd=folder,
        env=with_package(
            environment | warm.for_jobs() | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        ),
        capture_output=True,
        text=True,
        timeout=HANG_LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    executed = json.loads(file.read_text())["cells"]
    return ["".join(map(text_of, cell["outputs"])) for cell in executed]


def text_of(output: dict[str, Any]) -> str:
    return "".join(output["text"]) if output.get("name") == "stdout" else ""
