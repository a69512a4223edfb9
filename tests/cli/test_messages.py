"""Commands that messages and docs tell people to run."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import typer.main

from hpc_train.cli.app import app

_COMMANDS = typer.main.get_command(app).commands  # type: ignore[attr-defined]
_REPOSITORY = Path(__file__).parents[2]
#: In backticks, a line of a code block, or a substitution in one; it ends where the shell begins another.
_COMMAND = re.compile(r"(?:`|^\$ |\$\()hpc-train ([a-z]+)((?: [^`\n&|;$]*)?)", re.MULTILINE)
_OPTION = re.compile(r"(?<= )--?[a-z][a-z-]*")


def _texts() -> Iterator[Path]:
    yield from (_REPOSITORY / "hpc_train").rglob("*.py")
    yield from (_REPOSITORY / "slurm_templates").rglob("*.j2")
    # One lists what is still missing, the other draws ``hpc-train submit ─ sbatch --hold``.
    skipped = {"reliability.md", "architecture.md"}
    yield from (page for page in (_REPOSITORY / "docs").glob("*.md") if page.name not in skipped)
    yield from _REPOSITORY.glob("*.md")


def _unknown(text: str) -> list[str]:
    """Return the commands and options in ``text`` that can't be typed."""
    found = []
    for command, rest in _COMMAND.findall(text):
        if command not in _COMMANDS:
            found.append(command)
            continue
        options = {option for each in _COMMANDS[command].params for option in each.opts} | {"--help"}
        found += [f"{command} {option}" for option in _OPTION.findall(rest) if option not in options]
    return found


def test_every_command_that_is_named_can_be_typed() -> None:
    unknown = {path.name: _unknown(path.read_text(encoding="utf-8")) for path in _texts()}
    assert {name: commands for name, commands in unknown.items() if commands} == {}


def test_a_command_or_option_that_cannot_be_typed_is_seen() -> None:
    assert _unknown("see `hpc-train begin` or `hpc-train submit FILE --fast`") == ["begin", "submit --fast"]
    assert _unknown("$ hpc-train submit exp.yaml --local -x") == ["submit -x"]
    assert _unknown('$ hpc-train logs -n 1 "$(hpc-train compare a -z | sed -n 1p)"') == ["compare -z"]
