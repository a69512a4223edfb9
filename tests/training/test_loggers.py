"""A logger plug-in that does not work costs its rows, not the run."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from hpc_train import registry
from hpc_train.config.fields import Section
from hpc_train.config.schema import LoggingConfig
from hpc_train.training.logger_threads import make_logger
from tests.loggers.wandb_files import context

CLASS = "class Broken:\n    def __init__(self, context): "


@pytest.mark.parametrize(
    "text",
    [
        "import a_package_that_is_not_there\n",
        "raise RuntimeError('broken')\n",
        "import sys\nsys.exit(0)\n",
        f"{CLASS}raise RuntimeError('broken')\n",
        f"{CLASS}raise SystemExit(0)\n",
        "",
    ],
)
def test_a_logger_that_can_not_start_is_a_warning(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "own_logger.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "own_logger", raising=False)
    assert make_logger("own_logger:Broken", context(tmp_path)) is None
    [message] = caplog.messages
    assert "own_logger:Broken can't be started" in message and "training continues" in message


def test_a_logger_that_works_is_made(tmp_path: Path) -> None:
    assert make_logger("tests.training.test_loggers:Working", context(tmp_path)) is not None


class TableConfig(Section):
    file: str = "rows.csv"


class WithTable(LoggingConfig):
    table: TableConfig | None = None


def test_a_section_of_logging_turns_on_the_logger_of_its_name() -> None:
    config = WithTable.model_validate({"table": {}, "loggers": {"own": {"color": "red"}}})
    assert config.arguments_by_logger() == {"table": {"file": "rows.csv"}, "own": {"color": "red"}}
    assert WithTable().arguments_by_logger() == {}


def test_every_section_of_logging_has_a_logger() -> None:
    """Otherwise the section of the file would do nothing except cause a warning in rank 0's log."""
    names = LoggingConfig.model_fields.keys() - {"every_steps", "loggers"}
    assert names <= registry.parts("loggers").keys()


class Working:
    def __init__(self, context: object) -> None:
        pass
