"""The shell says where rows go and whether, never which run they belong to."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hpc_train.loggers import process_logger
from hpc_train.loggers.base import LoggerOffError
from hpc_train.loggers.process_logger import WandbLogger
from hpc_train.loggers.tracker_environment import (
    RULES,
    Tracker,
    effective_mode,
    in_a_line,
    invalid_mode,
    passed_on,
    rule_for,
)
from tests.loggers.attempts import Attempt
from tests.loggers.wandb_files import context
from tests.loggers.wandb_server import WandbServer

DOCS = Path(__file__).parents[2] / "docs" / "logging.md"
#: What a sweep's agent, a launch job and a parent run leave in a shell.
LEFT_BEHIND = {
    "WANDB_SWEEP_ID": "sweep1",
    "WANDB_LAUNCH": "true",
    "WANDB_RUN_ID": "foreign1",
    "WANDB_run_id": "foreign2",
    "WANDB_PROJECT": "foreign-project",
    "WANDB_RESUME": "must",
    "WANDB_RESUME_FROM": "foreign1?_step=3",
    "WANDB_FORK_FROM": "foreign1?_step=3",
    "WANDB_NAME": "foreign-name",
    "WANDB_RUN_GROUP": "foreign-group",
    "WANDB_SERVICE": "3-0-tcp-localhost-1",
    "WANDB_OF_NEXT_YEAR": "1",
    "MLFLOW_RUN_ID": "f" * 32,
    "MLFLOW_EXPERIMENT_ID": "7",
    "MLFLOW_EXPERIMENT_NAME": "foreign",
}


def wandb_names() -> set[str]:
    """Return the variables that the installed wandb reads."""
    from wandb import env
    from wandb.sdk.wandb_settings import Settings

    names = {value for value in vars(env).values() if isinstance(value, str)}
    names = {name for name in names if name.startswith(("WANDB_", "_WANDB_"))}
    for field in Settings.model_fields:
        names.add(f"WANDB_{field.upper()}")
        if field.startswith("x_"):
            names.add(f"WANDB__{field.removeprefix('x_').upper()}")
    return names


def test_the_table_decides_about_each_variable_of_the_installed_wandb() -> None:
    assert len(wandb_names()) > 100
    without_rule = sorted(name for name in wandb_names() if rule_for("wandb", name) is None)
    assert not without_rule, "does it say where and whether rows go, or which run they belong to?"


def test_no_variable_that_identifies_a_run_is_obeyed() -> None:
    from mlflow import environment_variables

    names = [*wandb_names(), *(name for name in vars(environment_variables) if name.startswith("MLFLOW_"))]
    about_a_run = re.compile(r"RUN|SWEEP|LAUNCH|RESUME|FORK|PROJECT|GROUP|EXPERIMENT|_NAME$|DEBUG|LOG_LEVEL")
    for name in filter(about_a_run.search, names):
        rule = rule_for("wandb" if name.startswith(("WANDB", "_WANDB")) else "mlflow", name)
        assert (rule is not None and not rule.is_obeyed) or name == "MLFLOW_TRACKING_USERNAME", name


@pytest.mark.parametrize("tracker", ["wandb", "mlflow"])
def test_what_is_left_behind_reaches_no_tracker(tracker: Tracker) -> None:
    where = {"WANDB_BASE_URL": "https://w.example.org", "MLFLOW_TRACKING_URI": "https://m.example.org"}
    environment = LEFT_BEHIND | where | {"PATH": "/bin"}
    others = {name: environment[name] for name in environment if not name.startswith(tracker.upper())}
    kept = {name: where[name] for name in where if name.startswith(tracker.upper())}
    assert passed_on(tracker, environment) == others | kept


def test_what_is_obeyed_and_ignored_is_one_line() -> None:
    environment = {
        "WANDB_BASE_URL": "https://w.example.org",
        "WANDB_API_KEY": "0123456789",
        "WANDB_RUN_ID": "x",
        "WANDB_OF_NEXT_YEAR": "1",
        "WANDB_SILENT": "1",
    }
    uses = "wandb: uses WANDB_API_KEY, WANDB_BASE_URL=https://w.example.org"
    assert in_a_line("wandb", environment) == f"{uses}; ignores WANDB_OF_NEXT_YEAR, WANDB_RUN_ID"
    assert in_a_line("mlflow", environment) is None


def test_the_page_has_the_table() -> None:
    rows = [row.split("|") for row in DOCS.read_text().splitlines() if row.startswith("| `")]
    shown = {
        name: (cells[2].strip(), cells[3].strip())
        for cells in rows
        for name in re.findall(r"`(_?[A-Z][A-Z0-9_*]+)`", cells[1])
    }
    in_code = {
        pattern: ("obeyed" if rule.is_obeyed else "ignored", rule.why)
        for rules in RULES.values()
        for rule in rules
        for pattern in rule.patterns
    }
    assert shown == in_code


@pytest.mark.parametrize(
    ("variables", "mode"),
    [
        ({}, "offline"),
        ({"WANDB_API_KEY": "0" * 40}, "online"),
        ({"WANDB_API_KEY": "0" * 40, "WANDB_MODE": "offline"}, "offline"),
        ({"WANDB_API_KEY": "0" * 40, "WANDB_MODE": "dryrun"}, "offline"),
        ({"WANDB_API_KEY": "0" * 40, "WANDB_MODE": "disabled"}, "disabled"),
        ({"WANDB_API_KEY": "0" * 40, "WANDB_DISABLED": "true"}, "disabled"),
        ({"WANDB_API_KEY": "0" * 40, "WANDB_DISABLED": "false"}, "online"),
        ({"WANDB_MODE": "online"}, "online"),
        ({"WANDB_MODE": "on-line"}, "offline"),
    ],
)
def test_the_shell_says_whether_rows_go_if_the_file_leaves_it_open(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], mode: str
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert effective_mode("auto") == mode
    assert effective_mode("online") == "online"
    assert invalid_mode() == (variables["WANDB_MODE"] if "on-line" in variables.values() else None)


def test_a_disabled_wandb_starts_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "disabled")
    with pytest.raises(LoggerOffError, match="WANDB_MODE"):
        WandbLogger(context(tmp_path))


@pytest.mark.slow
@pytest.mark.usefixtures("patient_close")
@pytest.mark.parametrize("source", ["environment", "settings file"])
def test_rows_go_to_the_runs_own_wandb_run(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    server: WandbServer,
    source: str,
) -> None:
    for name, value in server.environment().items():
        monkeypatch.setenv(name, value)
    if source == "environment":
        for name, value in LEFT_BEHIND.items():
            monkeypatch.setenv(name, value)
    else:
        (tmp_path / "here" / "wandb").mkdir(parents=True)
        (tmp_path / "here" / "wandb" / "settings").write_text(
            "[default]\nsweep_id = sweep1\nrun_id = foreign1\nproject = foreign-project\n"
            "run_group = foreign-group\nbase_url = http://127.0.0.1:9\n"
        )
        monkeypatch.chdir(tmp_path / "here")
    (tmp_path / "run").mkdir()
    paths = context(tmp_path / "run").paths
    attempt = Attempt(paths, 1, 0, lambda number: WandbLogger(context(paths.folder, number, "online")))
    attempt.train(1, 2, 3, saved=3)
    attempt.end("completed")
    assert server.projects == {"p"}
    (run_id,) = server.runs
    assert run_id == "wid123" and len(server.runs[run_id].history) == 4
    assert server.runs[run_id].name == "run1"
    told = capfd.readouterr()
    assert told.err == ""
    assert ("ignores" in told.out and "WANDB_SWEEP_ID" in told.out) == (source == "environment")


def test_the_processes_get_the_filtered_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in LEFT_BEHIND.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("WANDB_MODE", "offline")
    for tracker in ("wandb", "mlflow"):
        environment = getattr(process_logger, f"{tracker}_environment")()
        left_behind = {name for name in LEFT_BEHIND if name.startswith(tracker.upper())}
        assert "PATH" in environment and not left_behind & environment.keys()
    assert "WANDB_MODE" not in process_logger.wandb_environment()
