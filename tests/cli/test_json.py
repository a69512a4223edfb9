"""What each command prints with ``--json`` is what docs/json.md says."""

from __future__ import annotations

from pathlib import Path

import pytest

from docs.make_json_page import PAGE, page
from hpc_train.cli.json_shapes import SHAPES
from hpc_train.paths import runs_root
from tests.cli.commands import hpc_train
from tests.cli.json_checks import checked
from tests.cli.launchers import QUEUE
from tests.end_to_end import runs as real
from tests.end_to_end.runs import EXPERIMENT, found_runs, write_experiment
from tests.report.live.runs import made_run
from tests.report.made_runs import made_sweep


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run python -m docs.make_json_page"


def test_a_missing_an_unknown_and_a_wrong_field_are_found() -> None:
    good = '{"version": 1, "id": "a", "path": "b", "row": {"loss": 1}}'
    checked("evaluate", good)
    for bad in (good.replace(', "path": "b"', ""), good.replace('"id"', '"ID"'), good.replace('"a"', "7")):
        with pytest.raises(AssertionError):
            checked("evaluate", bad)


def test_every_command_with_json_has_a_type() -> None:
    from typer.main import get_command

    from hpc_train.cli.app import app

    commands = getattr(get_command(app), "commands")  # noqa: B009  (typer's own type hides it)
    with_json = {name for name, each in commands.items() if any(p.name == "as_json" for p in each.params)}
    assert with_json == {name.partition(" ")[0] for name in SHAPES}


def test_plan_validate_and_submit(file: Path) -> None:
    swept = "sweep.grid={seed: [1, 2]}"
    assert len(checked("plan", hpc_train("plan", file, swept, "--json").out)["runs"]) == 2
    assert checked("validate", hpc_train("validate", file, swept, "--json").out)["runs"] == 2
    done = hpc_train("validate", file, "sed=1", "--json")
    found = checked("validate", done.out)
    assert done.code == 65 and found["name"] is None and "unknown key" in found["problems"][0]
    done = hpc_train("submit", file, swept, "--launcher", QUEUE, "--json")
    assert done.code == 0 and len(checked("submit", done.out)["runs"]) == 2


def test_commands_on_finished_runs(tmp_path: Path) -> None:
    made_sweep(runs_root(), 6, steps=60)
    rows = checked("status", hpc_train("status", "--json").out)["runs"]
    assert {row["state"] for row in rows} == {"completed", "failed"}
    assert len(checked("compare", hpc_train("compare", "sweep", "--json").out)["runs"]) == 6
    over = hpc_train("compare", "sweep", "--over", "seed", "--json").out
    assert len(checked("compare --over", over)["groups"]) == 6
    grouped = hpc_train("compare", "sweep", "--group-by", "seed", "--json").out
    assert checked("compare --group-by", grouped)["groups"]
    first, second = (row["path"] for row in rows[:2])
    assert checked("compare --diff", hpc_train("compare", first, second, "--diff", "--json").out)["settings"]
    sent = hpc_train("sync", first, "--to", "tensorboard", "-o", str(tmp_path / "events"), "--json").out
    assert checked("sync", sent)["synced"][0]["to"] == "tensorboard"
    verified = checked("verify", hpc_train("verify", "sweep", "--json").out)["runs"]
    assert verified[0]["checkpoints"][0]["problems"], "they are empty folders"


def test_cancel(tmp_path: Path) -> None:
    made_run(runs_root(), state="completed")
    (row,) = checked("cancel", hpc_train("cancel", "abc", "--json").out)["runs"]
    assert row["state"] == "completed"


@pytest.mark.slow
def test_doctor() -> None:
    assert checked("doctor", hpc_train("doctor", "--local", "--json").out)["findings"]


@pytest.mark.slow
def test_commands_that_start_ranks(tmp_path: Path) -> None:
    file = write_experiment(tmp_path, EXPERIMENT)
    runs = {"HPC_TRAIN_RUNS": str(tmp_path / "runs")}
    short = ("optimization.steps=24", "device=cpu", "--local", "--json")
    (row,) = checked("submit", real.hpc_train("submit", file, *short, **runs).out)["runs"]
    (paths,) = found_runs(tmp_path)
    assert row["state"] == "completed" and row["last_metric"]["split"] == "val"
    (again,) = checked("resume", hpc_train("resume", paths.folder, "--json").out)["runs"]
    assert again["state"] == "completed"
    assert (
        "loss" in checked("evaluate", real.hpc_train("evaluate", paths.folder, "--json", **runs).out)["row"]
    )
    (found,) = checked("verify", hpc_train("verify", paths.folder, "--json").out)["runs"]
    assert found["checkpoints"][0]["loads"] and found["checkpoints"][0]["problems"] == []
