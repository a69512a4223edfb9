"""The words of a program's command line: arguments rendered by their style, names in braces replaced."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hpc_train.experiment.config.program_section import ProgramConfig


def executable(name: str) -> str:
    """Return the program of that name: ``python`` and what is installed beside it come first, as torchrun."""
    if name == "python":
        return sys.executable
    if "/" in name:
        return name
    beside = Path(sys.executable).with_name(name)
    return str(beside) if os.access(beside, os.X_OK) else name


def command_of(program: ProgramConfig, values: Mapping[str, str], *, resumes: bool) -> list[str]:
    """Return the command with its arguments; ``values`` replace the names in braces."""
    command = [word.format_map(values) for word in program.command]
    command[0] = executable(command[0])
    for name, value in program.args.items():
        text = value.format_map(values) if isinstance(value, str) else value
        command += rendered(name, text, program.style)
    if resumes and program.resume is not None:
        command += [word.format_map(values) for word in program.resume.args]
    return command


def rendered(name: str, value: Any, style: str) -> list[str]:
    """Return one argument as words of a command line."""
    if style == "key=value":
        return [f"{name}={_as_hydra(value)}"]
    if value is None or value is False:
        return []
    if value is True:
        return [f"--{name}"]
    items = [_as_text(item) for item in (value if isinstance(value, list) else [value])]
    if style == "--key=value" and not isinstance(value, list):
        return [f"--{name}={items[0]}"]
    return [f"--{name}", *items]


def _as_hydra(value: Any) -> str:
    if isinstance(value, list):
        return f"[{','.join(map(_as_hydra, value))}]"
    return _as_text(value)


def _as_text(value: Any) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return str(value).lower()
        case float():
            return repr(value)
    return str(value)
