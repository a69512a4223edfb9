"""The reference's table of commands has a row for each command, with all of its options and no others."""

from __future__ import annotations

import re
from typing import Any

import pytest
from typer.main import get_command

from hpc_train.cli.app import app
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
