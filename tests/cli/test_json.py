"""What each command prints with ``--json`` is what docs/json.md says."""

from __future__ import annotations

from pathlib import Path

import pytest

from docs.json_shapes import SHAPES
from docs.make_json_page import PAGE, page
from hpc_train.cli.children import child_report
from hpc_train.launchers.following import FollowingLauncher
from hpc_train.paths import runs_root
from tests.cli.commands import hpc_train
from tests.cli.json_checks import checked
from tests.cli.launchers import QUEUE
from tests.cli.test_clean import answer
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
    assert done.code == 65 and found["name"] is None and found["codes"] == ["key.unknown"]
    assert len(found["problems"]) == 1
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


def test_report_and_logs() -> None:
    paths = made_sweep(runs_root(), 2, steps=60)[0]
    page = checked("report", hpc_train("report", "sweep", "-o", "page.html", "--json").out)
    assert page["bytes"] == Path("page.html").stat().st_size and page["metric"] == "val/accuracy"
    assert {each["id"] for each in page["runs"]} == {"0000000000", "0000000001"}
    for rank in (10, 2):
        paths.attempt(1).log(rank).write_bytes(b"a\n\xff\rb\n")
    done = hpc_train("logs", "0000000000", "--attempt", "1", "--rank", "2", "--json")
    log = checked("logs", done.out)
    assert (log["attempt"], log["rank"], log["lines"]) == (1, 2, ["a", "\ufffd\rb"])
    assert [each["rank"] for each in log["logs"]] == [2, 10] and log["logs"][0]["file"] == log["file"]
    one = hpc_train("logs", "0000000000", "--attempt", "1", "--rank", "2", "-n", "1", "--json")
    assert checked("logs", one.out)["lines"] == ["\ufffd\rb"] and one.err == ""
    both = hpc_train("logs", "0000000000", "-f", "--json")
    assert both.code == 2 and both.out == "" and "--json and --follow exclude each other" in both.err


def test_the_output_of_a_batch_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = tmp_path / "job.out"
    output.write_text("no module named x")
    made_run(runs_root())
    monkeypatch.setattr(FollowingLauncher, "output", lambda launcher, paths: output)
    log = checked("logs", hpc_train("logs", "abc", "--json").out)
    assert (log["file"], log["attempt"], log["rank"]) == (str(output), None, None)
    assert log["lines"] == ["no module named x"] and log["logs"] == []


def test_clean_and_rm(monkeypatch: pytest.MonkeyPatch) -> None:
    paths = made_run(runs_root(), state="completed")
    (paths.attempt(1).folder / "attempt.json").unlink()
    paths.cache.mkdir()
    (paths.cache / "compiled").write_bytes(b"x" * 9999)
    for command in ("clean", "rm"):
        kept = answer(monkeypatch, "n\n", command, "--json")
        found = checked(command, kept.out)
        assert found["bytes"] == 0 and not any(each.get("removed") for each in found["runs"])
        assert "nothing was removed" in kept.err and paths.cache.exists()
    cleaned = checked("clean", hpc_train("clean", "abc", "--yes", "--json").out)
    assert [each["why"] for each in cleaned["runs"][0]["removed"]] == ["cache"]
    assert cleaned["bytes"] == cleaned["runs"][0]["removed"][0]["bytes"] == 9999 and not paths.cache.exists()
    again = checked("clean", hpc_train("clean", "abc", "--yes", "--json").out)
    assert again["bytes"] == 0 and again["runs"][0]["removed"] == []
    removed = checked("rm", hpc_train("rm", "abc", "--yes", "--json").out)
    assert removed["runs"][0]["path"] == str(paths.folder) and not paths.folder.exists()
    assert removed["bytes"] == removed["runs"][0]["bytes"] > 0


def test_init() -> None:
    done = hpc_train("init", "--local", "-y", "-o", "exp.yaml", "--task", "segmentation", "--json")
    written = checked("init", done.out)
    assert written["files"] == [written["file"]] == ["exp.yaml"] and not written["for_cluster"]
    lines = Path("exp.yaml").read_text().splitlines()
    _, *to_change = [number for number, line in enumerate(lines, start=1) if "CHANGE" in line]
    assert to_change and written["lines_to_change"] == to_change, "the first one explains the word"
    recipes = checked("init --from list", hpc_train("init", "--from", "list", "--json").out)["recipes"]
    assert {"digits"} <= {each["name"] for each in recipes}


def test_children(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What code of the user's prints goes to stderr."""
    (tmp_path / "speaks.py").write_text(
        "import sys\nprint('hello')\nprint('{\"a\": 1}')\nprint('goodbye')\nsys.exit(int(sys.argv[1]))\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert child_report("speaks", "0") == (0, {"a": 1})
    assert child_report("speaks", "65") == (65, {})
    said = capsys.readouterr()
    assert said.out == "" and said.err == 'hello\ngoodbye\nhello\n{"a": 1}\ngoodbye\n'


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
    done = real.hpc_train("export", paths.folder, "-o", tmp_path / "model.safetensors", "--json", **runs)
    exported = checked("export", done.out)
    assert exported["step"] == 24 and exported["bytes"] > 1000
    output = tmp_path / "found.csv"
    done = real.hpc_train("predict", paths.folder, "-o", output, "--json", **runs)
    predicted = checked("predict", done.out)
    assert (predicted["format"], predicted["bytes"]) == ("csv", output.stat().st_size)
    assert predicted["predictions"] == len(output.read_text().splitlines()) - 1 and predicted["step"] == 24
    prepared = checked("prepare", real.hpc_train("prepare", file, "--json", **runs).out)
    assert prepared["data"][0]["train_samples"] > 0 and prepared["models"][0]["unchecked"] is None
