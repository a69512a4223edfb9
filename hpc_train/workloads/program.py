"""A training script of the user's own as the workload of a job: what is checked before it is queued."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from hpc_train.experiment.config.problems import Problem
from hpc_train.experiment.config.program_section import listed
from hpc_train.experiment.config.schema import Job, Program
from hpc_train.experiment.workload import Workload
from hpc_train.registry import nearest
from hpc_train.workloads.program_command import executable

#: Suffixes of a word of the command that names a file, if the file is not there.
_SCRIPTS = (".py", ".sh", ".yaml", ".yml", ".json", ".toml")


class ProgramWorkload(Workload[Program]):
    """A program of the user's: its data, weights and steps are unknown."""

    preparation = "hpc_train.workloads.program_check"

    def missing_code(self, jobs: Sequence[Program], code_root: Callable[[], Path | None]) -> list[Problem]:
        """Return the problems of an executable, or a script of the command, that is missing here."""
        commands = dict.fromkeys(tuple(job.program.command) for job in jobs if _has_this_environment(job))
        return [problem for command in commands for problem in _missing_words(command)]


def _has_this_environment(job: Job) -> bool:
    """Return True if ranks have this command's search path for programs."""
    environment = job.environment
    return not (environment.python or environment.container or environment.modules)


def _executable_remedy(name: str) -> str:
    variable, equals, value = name.partition("=")
    if equals and variable.isidentifier():
        return f"write program.env: {{{variable}: '{value}'}}, and take it out of the command"
    if Path(name).suffix in {".py", ".sh"} and "/" in name and not Path(name).exists():
        return "write the path of a file that exists"
    if " " in name.strip() or Path(name).suffix in {".py", ".sh"}:
        shell = {".py": "python ", ".sh": "bash "}.get(Path(name).suffix, "") if Path(name).is_file() else ""
        return f"write command: {listed(shell + name)}"
    return "install it, or write the path of an executable file"


def _missing_words(command: Sequence[str]) -> Iterator[Problem]:
    name = command[0]
    if "{" not in name and shutil.which(executable(name)) is None:
        close = nearest(name, ("python", "torchrun", "accelerate", "bash"))
        remedy = f"did you mean {close}?" if close else _executable_remedy(name)
        path = ("program", "command", 0)
        yield Problem(path, f"there is no executable {name}", remedy, code="program.executable")
    for index, word in enumerate(command[1:], start=1):
        if word == "-m":  # further words are those of the module
            return
        is_path = word.endswith(_SCRIPTS) and not word.startswith("-") and "{" not in word and "=" not in word
        if is_path and not Path(word).expanduser().is_file():
            names = [file.name for file in Path(word).parent.glob("*")] if Path(word).parent.is_dir() else []
            close = nearest(Path(word).name, names)
            remedy = (
                f"did you mean {Path(word).with_name(close)}?"
                if close
                else "write the path of a file that exists"
            )
            message = f"there is no file {word} below this folder"
            yield Problem(("program", "command", index), message, remedy, code="program.file")
        if index == 1 and is_path:
            return  # further words may name files that the script writes
