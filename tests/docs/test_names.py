"""The reference has a row for every built-in part that an experiment file can name."""

from __future__ import annotations

import re
import tomllib

import pytest

from hpc_train.experiment.config.keys import NOT_IDENTITY
from hpc_train.experiment.topology.learning_rate import OVER_SPAN, OVER_STEPS
from hpc_train.registry import parts
from tests.docs.pages import REPOSITORY

#: Key of the file, in a heading → the names that the table must list.
NAMES = {
    "task": parts("tasks").keys(),
    "parallel.strategy": parts("strategies").keys(),
    "optimization.schedule.name": OVER_SPAN.keys() | OVER_STEPS.keys(),
    "model.name": parts("models").keys(),
    "data.name": parts("datasets").keys(),
}


@pytest.mark.parametrize("key", NAMES)
def test_the_table_of_a_key_has_a_row_for_each_name(key: str) -> None:
    page = (REPOSITORY / "docs" / "reference_parts.md").read_text(encoding="utf-8")
    [section] = re.findall(rf"^## [^\n]*: `{re.escape(key)}`\n(.*?)^##", page, re.DOTALL | re.MULTILINE)
    cells = "\n".join(line.split("|")[1] for line in section.splitlines() if line.startswith("|"))
    missing = NAMES[key] - set(re.findall(r"`(\w+)", cells))
    assert not missing, f"reference_parts.md: the table of {key} has no row for {sorted(missing)}; add one"


def test_keys_outside_the_id_of_a_run_are_listed() -> None:
    page = (REPOSITORY / "docs" / "reference_commands.md").read_text(encoding="utf-8")
    (listed,) = re.findall(r"its id is a hash of the file without (.*?);", page, re.DOTALL)
    assert re.findall(r"`([a-z_.]+)`", listed) == list(NOT_IDENTITY)


def test_the_table_of_extras_has_all() -> None:
    page = (REPOSITORY / "docs" / "reference_commands.md").read_text(encoding="utf-8")
    (table,) = re.findall(r"^\| extra \| for \|\n.*?\n\n", page, re.DOTALL | re.MULTILINE)
    listed = {
        name for row in table.strip().splitlines() for name in re.findall(r"`(\w+)`", row.split("|")[1])
    }
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert listed == project["optional-dependencies"].keys() - {"dev", "docs"}
