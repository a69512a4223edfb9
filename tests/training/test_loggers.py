"""A logger plug-in that does not work costs its rows, not the run."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from hpc_train.training.build import make_logger
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


class Working:
    def __init__(self, context: object) -> None:
        pass
