"""A pip package adds one part of each kind, and a file that names them all trains."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.end_to_end.runs import hpc_train, only_run, rows, status

EXAMPLE = Path(__file__).parents[1] / "plugin_example"
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Install the package into a folder of its own; return a PYTHONPATH on which it is found."""
    tmp_path = tmp_path_factory.mktemp("plugins")
    target = tmp_path / "site"
    source = tmp_path / "source"
    subprocess.run(["cp", "-r", EXAMPLE, source], check=True)  # a build leaves files in its source
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "-q",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
    ]
    subprocess.run([*command, "--target", target, source], check=True)
    return os.pathsep.join([str(target), os.environ.get("PYTHONPATH", "")])


def test_a_file_that_names_plug_ins_of_every_kind_trains(installed: str, tmp_path: Path) -> None:
    found = {"PYTHONPATH": installed, "HPC_TRAIN_RUNS": str(tmp_path / "runs")}
    experiment = EXAMPLE / "example.yaml"
    assert hpc_train("validate", experiment, **found).code == 0
    done = hpc_train("submit", experiment, "--launcher", "torchrun", "--devices", "2", **found)
    assert done.code == 0, done.err
    paths = only_run(tmp_path)
    assert status(paths)["state"] == "completed"
    (val,) = [row for row in rows(paths, "val") if row["step"] == 30]
    assert val["accuracy"] > 0.9
    with (paths.folder / "rows.csv").open() as file:
        table = list(csv.DictReader(file))
    assert [int(row["step"]) for row in table] == [row["step"] for row in rows(paths, "val")]
    built_in = "parallel={strategy: ddp}"
    again = hpc_train("submit", experiment, built_in, "--local", "--devices", "2", **found)
    assert again.code == 0, again.err


def test_commands_of_the_login_node_know_a_plug_ins_degrees_and_number_of_samples(installed: str) -> None:
    experiment = EXAMPLE / "example.yaml"
    on_two = ("--launcher", "torchrun", "--devices", "2")
    planned = hpc_train("plan", experiment, *on_two, "--json", PYTHONPATH=installed)
    [run] = json.loads(planned.out)["runs"]
    assert run["degrees"] == {"pipeline": 1, "replicate": 2, "shard": 1, "tensor": 1}
    assert run["steps_per_epoch"] == 240 // 24
    one_rank = hpc_train("plan", experiment, "--local", "--devices", "1", PYTHONPATH=installed)
    assert "parallel.replicate: replicate 2" in one_rank.err
    overrides = ("parallel.tensor=2", "parallel.args.average=2")
    refused = hpc_train("validate", experiment, *overrides, PYTHONPATH=installed)
    assert refused.code == 65
    for said in (
        "parallel.tensor: 2",
        "parallel.args.average:",
        "strategy by_parameter; write average_in_double",
    ):
        assert said in refused.err


def test_a_search_asks_a_plug_in(installed: str) -> None:
    search = (
        "sweep.search={method: near_best, trials: 6, max_concurrent: 2, metric: accuracy, mode: max, "
        "parameters: {optimization.optimizer.lr: {log_uniform: [0.001, 0.1]}, seed: {choice: [1, 2]}}}"
    )
    on_two = ("--launcher", "torchrun", "--devices", "2", "--json")
    planned = hpc_train("plan", EXAMPLE / "example.yaml", search, *on_two, PYTHONPATH=installed)
    runs = json.loads(planned.out)["runs"]
    assert len({run["id"] for run in runs}) == 2
    assert all(0.001 <= run["values"]["optimization.optimizer.lr"] <= 0.1 for run in runs)


def test_without_the_package_its_names_are_unknown() -> None:
    done = hpc_train("validate", EXAMPLE / "example.yaml")
    assert done.code == 65
    for line in ("2:7: task:", "3:15: model.name:", "4:14: data.name:", "10:22: parallel.strategy:"):
        assert line in done.err, done.err
