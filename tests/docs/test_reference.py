"""The reference has a row for each command with its options, each part, extra and check of ``doctor``."""

from __future__ import annotations

import re
import tomllib
from typing import Any

import pytest
from typer.main import get_command

from hpc_train.cli.app import app
from hpc_train.experiment.config.keys import NOT_IDENTITY
from hpc_train.experiment.topology.learning_rate import OVER_SPAN, OVER_STEPS
from hpc_train.registry import parts
from tests.docs.pages import REPOSITORY

PROGRAM: Any = get_command(app)
COMMANDS = {name: each for name, each in PROGRAM.commands.items() if not each.hidden}
PAGE = (REPOSITORY / "docs/reference_commands.md").read_text(encoding="utf-8")
(TABLE,) = re.findall(r"^\| command \| effect \| options \|.*?\n\n", PAGE, re.DOTALL | re.MULTILINE)
ROWS = dict(re.findall(r"^\| `(\w+)[^`]*` (\|.*\|)$", TABLE, re.MULTILINE))
_OPTION = re.compile(r"(?<=`)--?[a-z-]+")


def test_the_table_has_a_row_for_each_command() -> None:
    assert ROWS.keys() == COMMANDS.keys()


@pytest.mark.parametrize("name", COMMANDS)
def test_the_row_of_a_command_lists_its_options(name: str) -> None:
    listed = set(_OPTION.findall(ROWS[name].rpartition(" | ")[2])) | set(_OPTION.findall(_head(name)))
    options = [{*each.opts, *each.secondary_opts} for each in COMMANDS[name].params if each.opts[0][0] == "-"]
    missing = [spellings for spellings in options if not spellings & listed]
    unknown = listed - set().union(*options)
    assert not missing and not unknown, f"the table of commands, {name}: missing {missing}, unknown {unknown}"


def _head(name: str) -> str:
    """Return the words of the row's first cell in code font: ``-o FILE`` is there where it is required."""
    (head,) = re.findall(rf"^\| `{name}([^`]*)` \|", TABLE, re.MULTILINE)
    return " ".join(f"`{word}" for word in head.split())


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
    (listed,) = re.findall(r"its id is a hash of the file without (.*?);", PAGE, re.DOTALL)
    assert re.findall(r"`([a-z_.]+)`", listed) == list(NOT_IDENTITY)


def test_the_table_of_extras_has_all() -> None:
    (table,) = re.findall(r"^\| extra \| for \|\n.*?\n\n", PAGE, re.DOTALL | re.MULTILINE)
    listed = {
        name for row in table.strip().splitlines() for name in re.findall(r"`(\w+)`", row.split("|")[1])
    }
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert listed == project["optional-dependencies"].keys() - {"dev", "docs"}


PACKAGE = REPOSITORY / "hpc_train"
_MODULES = {
    "launchers/slurm/cluster_checks.py": "slurm",
    "launchers/slurm/check_job.py": "slurm",
    "launchers/machine_checks.py": "machine",
    "cli/doctor.py": "",
}
_NAME = re.compile(r'"((?:slurm|machine|wandb|notify|launcher|file)\.[a-z-]+)"')
#: The helpers that put the module's own prefix before a name.
_SHORT_NAME = re.compile(r'(?:fine\(|setting\(\s*|finding\(\s*Level\.\w+,\s*)"([a-z-]+)"')


def checks() -> set[str]:
    names: set[str] = set()
    for module, prefix in _MODULES.items():
        text = (PACKAGE / module).read_text(encoding="utf-8")
        names |= set(_NAME.findall(text)) | {f"{prefix}.{name}" for name in _SHORT_NAME.findall(text)}
    return names


def test_the_table_of_checks_is_complete() -> None:
    (table,) = re.findall(r"^\| check \| finds \|.*?\n\n", PAGE, re.DOTALL | re.MULTILINE)
    rows = {
        name
        for row in table.strip().splitlines()
        for name in re.findall(r"`([a-z]+\.[a-z-]+)`", row.split("|")[1])
    }
    assert len(checks()) > 20
    assert rows == checks()
