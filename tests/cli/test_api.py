"""``import hpc_train``: runs, their tables, and what the commands do, as Python functions."""

from __future__ import annotations

import inspect
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

import hpc_train
from hpc_train.cli.command_line import Options
from hpc_train.cli.command_options import PlanOptions, ResumeOptions, SubmitOptions
from hpc_train.errors import BadFileError, UsageError, UserError, WaitTimeoutError
from hpc_train.experiment.plan.sweep import expand
from hpc_train.paths import RunPaths
from hpc_train.run.create import create_run
from tests.cli.commands import hpc_train as hpc_train_command
from tests.cli.commands import python
from tests.cli.launchers import COMPLETING, FAILING, QUEUE, SAVING, queued, requests
from tests.plan.files import loaded
from tests.report.made_runs import made_sweep

pandas = pytest.importorskip("pandas")


@pytest.fixture
def sweep(tmp_path: Path) -> list[RunPaths]:
    return made_sweep(tmp_path / "runs", 6, steps=200)


def test_runs_have_their_settings_and_their_best_value(sweep: list[RunPaths]) -> None:
    table = hpc_train.runs("sweep").table().set_index("run")
    assert list(table.index) == [paths.folder.name for paths in sweep]
    first = table.loc["0000000000"]
    assert (first["state"], first["step"], first["attempts"], first["ranks"]) == ("completed", 200, 2, 8)
    assert first["optimization.optimizer.lr"] == 0.01 and first["metric"] == "val/accuracy"
    assert first["best"] >= first["last"] and first["best_step"] in {50, 100, 150, 200}
    assert 0 < first["goodput"] < 1 and Path(first["path"]) == sweep[0].folder
    by_loss = hpc_train.runs(sweep[0].folder).table("train/loss")
    assert by_loss["best"].item() < 1 and len(by_loss) == 1


def test_the_last_value_of_a_run_that_diverged_at_its_end_is_nan(sweep: list[RunPaths]) -> None:
    """Rows have null for NaN."""
    with sweep[0].metrics.open("a") as file:
        file.write('{"split": "val", "step": 300, "accuracy": null, "loss": null}\n')
    first = hpc_train.runs("sweep").table("loss").set_index("run").loc["0000000000"]
    assert math.isnan(first["last"]) and first["last_step"] == 300
    assert first["best"] < 10 and first["best_step"] <= 200


def test_values_of_lists_and_draws_are_columns(tmp_path: Path) -> None:
    more = """sweep:
  list: [{optimization.optimizer.lr: 0.2}, {data.args.channels: 5}]
  random: {count: 2, parameters: {optimization.optimizer.weight_decay: {uniform: [0, 0.1]}}}
"""
    variants = expand(loaded(tmp_path, more=more))
    for variant in variants:
        paths = RunPaths(tmp_path / "runs" / "tiny" / variant.id)
        assert create_run(paths, variant.experiment, variant.id, 1, values=variant.values)
    table = hpc_train.runs().table().set_index("run")
    decays = [variant.values["optimization.optimizer.weight_decay"] for variant in variants]
    assert [table.loc[each.id]["optimization.optimizer.weight_decay"] for each in variants] == decays
    assert [table.loc[each.id]["optimization.optimizer.lr"] for each in variants] == [0.2, 0.2, 0.1, 0.1]
    assert sorted(table["data.args.channels"].dropna()) == [5, 5]


def test_metrics_are_the_rows_of_all_runs(sweep: list[RunPaths]) -> None:
    table = hpc_train.runs().metrics()
    assert len(table) == sum(len(paths.metrics.read_text().splitlines()) for paths in sweep)
    assert str(table["time"].dt.tz) == "UTC"
    evaluations = hpc_train.runs("sweep").metrics("val")
    assert set(evaluations["split"]) == {"val"} and "iou_road" in evaluations
    curves = table[table["split"] == "train"].pivot(index="step", columns="run", values="loss")
    assert curves.shape == (40, 6)


def test_attempts_have_their_causes_and_times(sweep: list[RunPaths]) -> None:
    table = hpc_train.runs("sweep").attempts()
    assert set(table["cause"]) == {"completed", "preemption", "crash"}
    assert (table["end"] > table["start"]).all() and set(table["nodes"]) == {"n1", "n2", "n3", "n4"}
    assert table["duration_s"].sum() == pytest.approx(hpc_train.runs("sweep").table()["elapsed_s"].sum())


def test_what_is_not_there_is_said(sweep: list[RunPaths]) -> None:
    with pytest.raises(UsageError, match="no run or experiment of this name"):
        hpc_train.runs("other")
    with pytest.raises(UsageError, match=r"f1 is in no run's metrics\.jsonl; there are train/"):
        hpc_train.runs("sweep").table("f1")


def test_without_pandas_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(UserError, match=r"pip install 'hpc-train\[results\]'"):
        hpc_train.runs().table()


@pytest.mark.parametrize("kind", ["file", "dict"])
def test_runs_are_submitted_from_a_file_or_a_dict(file: Path, kind: str) -> None:
    content = file if kind == "file" else yaml.safe_load(file.read_text())
    submitted = hpc_train.submit(content, "seed=3", launcher=COMPLETING)
    (run,) = submitted
    assert isinstance(submitted, hpc_train.Runs) and hpc_train.Run(run.id) == run == hpc_train.Run(run.path)
    assert run.status.state == "completed" and run.wait().step == run.status.step == 5
    assert (run.experiment, run.status.name) == ("tiny", "tiny")
    assert run.metrics("val")["accuracy"].tolist() == [0.75]
    assert requests[-1].experiment.seed == 3
    assert list(hpc_train.submit(content, "seed=3", launcher=COMPLETING)) == [run] and len(requests) == 1
    again = hpc_train.submit(content, "seed=3", launcher=COMPLETING, new=True)
    assert again[0].id == f"{run.id}-2" and set(hpc_train.runs()) == {run, again[0]}


def test_a_sweep_of_a_dict_becomes_several_runs(file: Path) -> None:
    content = yaml.safe_load(file.read_text()) | {"sweep": {"grid": {"seed": (0, 1)}}}
    submitted = hpc_train.submit(content, launcher=QUEUE)
    assert len(submitted) == len(queued[0]) == 2 and submitted[:1][0] == submitted[0]
    assert sorted(submitted.table()["seed"]) == [0, 1]


def test_problems_of_a_dict_are_named_by_key(file: Path) -> None:
    content = yaml.safe_load(file.read_text()) | {"sed": 3}
    with pytest.raises(BadFileError, match=r"^sed: unknown key"):
        hpc_train.submit(content, launcher=COMPLETING)
    with pytest.raises(BadFileError, match=r"experiment: .*Path is not JSON serializable; use dicts"):
        hpc_train.submit(content | {"name": file}, launcher=COMPLETING)
    with pytest.raises(BadFileError, match="command line: seed"):
        hpc_train.submit(file, "seed=x", launcher=COMPLETING)


def test_the_plan_is_that_of_the_command(file: Path) -> None:
    planned = hpc_train.plan(file, local=True)
    assert planned == json.loads(hpc_train_command("plan", file, "--local", "--json").out)
    with pytest.raises(BadFileError, match="unknown key"):
        hpc_train.plan({"nam": "x"}, local=True)
    with pytest.raises(BadFileError, match=r"model\.name: .*nosuch"):
        hpc_train.plan(file, "model.name=nosuch:build", local=True)


@pytest.mark.parametrize(
    ("function", "command", "options", "left_out"),
    [
        # ``plan`` is the dry run.
        (hpc_train.submit, "submit_runs", SubmitOptions, {"as_json", "dry_run"}),
        # It prints the scripts.
        (hpc_train.plan, "make_full_plan", PlanOptions, {"as_json", "script"}),
        (hpc_train.Run.resume, "resume_runs", ResumeOptions, {"as_json", "runs_and_overrides"}),
    ],
)
def test_the_options_are_those_of_the_command(
    function: Callable[..., object],
    command: str,
    options: type[Options],
    left_out: set[str],
    sweep: list[RunPaths],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    keywords = {
        name: parameter.default
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.kind == parameter.KEYWORD_ONLY
    }
    expected = {
        name: parameter.default
        for name, parameter in options.parameters().items()
        if name not in left_out | {"file", "overrides"}
    }
    # None: the command predicts, which takes seconds.
    assert keywords == expected | ({"memory": False} if "memory" in expected else {})
    received: list[object] = []

    def stop(*arguments: object) -> None:
        received.append(arguments[-1])
        raise KeyboardInterrupt

    monkeypatch.setattr(f"hpc_train.api.{command}", stop)
    values = {name: object() for name in keywords}
    with pytest.raises(KeyboardInterrupt):
        function(hpc_train.Run(sweep[0]) if "code" in keywords else "exp.yaml", **values)
    assert {name: getattr(received[0], name) for name in keywords} == values


def test_ctrl_c_is_an_exception_and_the_run_resumes(file: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        hpc_train.submit(file, launcher=SAVING)
    (run,) = hpc_train.runs("tiny")
    assert run.status.state == "interrupted"
    assert [checkpoint.step for checkpoint in run.checkpoints] == [6] == [run.checkpoint().step]
    with pytest.raises(UsageError, match="has no best checkpoint"):
        run.checkpoint(best=True)
    assert run.resume(launcher=COMPLETING).state == "completed"
    assert run.attempts()["attempt"].tolist() == [1, 2]
    with pytest.raises(UsageError, match="no run or experiment"):
        hpc_train.Run("nosuch")


def test_a_queued_run_is_waited_for_and_cancelled(file: Path) -> None:
    (run,) = hpc_train.submit(file, launcher=QUEUE)
    with pytest.raises(WaitTimeoutError, match=r"is pending after 0 s"):
        run.wait(0)
    with pytest.raises(UserError, match=r"is pending on a queue.*; nothing started"):
        run.resume()
    with pytest.raises(UsageError, match="has not started yet"):
        run.logs()


def test_logs_are_text(sweep: list[RunPaths]) -> None:
    run = hpc_train.Run(sweep[0].folder)
    log = sweep[0].attempt(2).log(0)
    log.write_text("one\ntwo\nthree\n")
    assert run.logs() == "one\ntwo\nthree" and run.logs(lines=2, attempt=2, rank=0) == "two\nthree"


def test_a_run_of_this_machine_is_cancelled(file: Path) -> None:
    (run,) = hpc_train.submit(file, launcher=FAILING)
    assert run.cancel().state == "failed"


@pytest.mark.slow
def test_the_package_and_its_functions_import_no_torch(file: Path) -> None:
    """The package itself imports nothing; ``plan`` stays the function."""
    code = (
        "import sys, hpc_train; print(sum(name.startswith('hpc_train.') for name in sys.modules))\n"
        "import hpc_train.experiment.plan.planning\n"
        "hpc_train.plan(sys.argv[1], local=True); hpc_train.runs()\n"
        "assert 'torch' not in sys.modules"
    )
    done = python("-c", code, file)
    assert (done.code, done.out.split()) == (0, ["0"]), done.err
