from __future__ import annotations

import json
from pathlib import Path

import pytest

from hpc_train.cli import validate as validate_module
from tests.cli.commands import hpc_train, succeeded
from tests.end_to_end import runs


def test_a_fine_file_is_said_to_be_fine_on_stderr(file: Path) -> None:
    done = hpc_train("validate", file, "sweep.grid={seed: [1, 2]}")
    assert (done.code, done.out) == (0, "")
    layout = "32 samples per step: 4 micro-batches of 8, 4 per rank, 1 rank, fp32"
    assert done.err == f"{file}: fine: 2 runs of tiny\n  {layout}\n"


@pytest.mark.parametrize("command", [["validate"], ["validate", "--json"], ["plan"], ["plan", "--json"]])
def test_what_is_probably_not_meant_is_said_of_a_fine_file(file: Path, command: list[str]) -> None:
    best = "checkpoint.best={metric: accuracy, mode: min}"
    done = succeeded(command[0], file, *command[1:], best)
    remark = "min takes a lower accuracy for the better one; write max, unless that is what you want"
    assert f"command line: checkpoint.best.mode: {remark}\n" in done.err


def test_every_problem_is_a_line_and_exits_65(file: Path) -> None:
    done = hpc_train("validate", file, "seed=-1", "precision=fp7", "optimization.optimiser=sgd")
    assert (done.code, done.out) == (65, "")
    assert len(done.err.splitlines()) == 3
    assert "did you mean optimizer?" in done.err


def test_a_batch_larger_than_the_data_is_a_problem_of_the_file(file: Path) -> None:
    assert hpc_train("validate", file, "data.args.num_samples=31").code == 65


@pytest.mark.parametrize(
    ("override", "start"),
    [
        ("optimization.loss=mse", ["--local", "--devices", "1"]),
        ("data.root=nowhere", ["--local", "--devices", "1"]),
        ("slurm={profile: nowhere}", []),
        ("slurm={ranks_per_node: 3}", ["parallel={strategy: tensor, tensor: 2}"]),
    ],
)
def test_submit_and_validate_report_the_same_problems(file: Path, override: str, start: list[str]) -> None:
    more = [word for word in start if "=" in word]
    submitted, validated = (
        hpc_train("submit", file, override, *start),
        hpc_train("validate", file, override, *more),
    )
    assert submitted.code == validated.code == 65
    assert validated.err == submitted.err != ""


def test_what_depends_on_ranks_or_nodes_is_valid(file: Path) -> None:
    succeeded("validate", file, "parallel.strategy=hsdp", "parallel.replicate=2")
    succeeded("validate", file, "slurm={}", "data.root=/nowhere")


def test_the_schema_is_json_with_every_section() -> None:
    done = succeeded("schema")
    assert {"name", "optimization", "slurm", "sweep"} <= json.loads(done.out)["properties"].keys()


def test_prepare_refuses_a_bad_file_before_it_starts_anything(file: Path) -> None:
    assert hpc_train("prepare", file, "seed=-1").code == 65


def test_prepare_passes_its_option_to_the_child(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[tuple[str, ...]] = []

    def run_child(*command: str) -> int:
        started.append(command)
        return 0

    monkeypatch.setattr(validate_module, "run_child", run_child)
    assert hpc_train("prepare", file, "seed=3").code == 0
    assert hpc_train("prepare", file, "--no-forward", "seed=3").code == 0
    module = "hpc_train.training.prepare"
    assert started == [(module, str(file), "seed=3"), (module, str(file), "--no-forward", "seed=3")]


@pytest.mark.slow
def test_prepare_builds_data_and_model(file: Path) -> None:
    done = runs.hpc_train("prepare", file, "model.name=timm/test_resnet", "data.name=digits", "data.args={}")
    assert done.code == 0, done.err
    assert "data digits: 1438 training and 359 validation samples, 10 classes" in done.err
    assert "model timm/test_resnet" in done.err


@pytest.mark.slow
def test_prepare_passes_the_exit_code_of_what_it_found_on(file: Path) -> None:
    done = runs.hpc_train("prepare", file, "model.name=math:net")  # only an import can tell
    assert done.code == 65
    assert "module 'math' has no 'net'" in done.err
    assert "Traceback" not in done.err


@pytest.mark.parametrize("command", ["validate", "plan", "submit", "prepare"])
def test_a_factory_that_is_not_there_is_reported_before_anything_starts(command: str, file: Path) -> None:
    done = hpc_train(command, file, "model.name=tests.end_to_end.parts:nett", "slurm={}")
    assert "parts.py defines no 'nett'; did you mean net?" in done.err
    assert command == "plan" or done.code == 65
