"""A training script of the user's own as the workload of a job: what is checked before it is queued.

``main`` runs ``program.check`` for ``hpc-train prepare``, as a process of its own.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from hpc_train.console import say, say_text
from hpc_train.errors import BadFileError, ExitCode, UserError
from hpc_train.experiment.config.problems import Problem
from hpc_train.experiment.config.program_section import listed
from hpc_train.experiment.config.schema import Job, Program
from hpc_train.experiment.validate.loading import load
from hpc_train.experiment.workload import Workload
from hpc_train.registry import nearest
from hpc_train.workloads.program_command import executable

#: Suffixes of a word of the command that names a file, if the file is not there.
_SCRIPTS = (".py", ".sh", ".yaml", ".yml", ".json", ".toml")

#: Enough for the first line of a script.
_HEAD_BYTES = 1 << 12


class ProgramWorkload(Workload[Program]):
    """A program of the user's: its data, weights and steps are unknown."""

    preparation = "hpc_train.workloads.program"

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


def _script_problem(file: str, *, is_started: bool = True) -> tuple[str, str] | None:
    """Return why a shell or the kernel can't read a script, and the remedy; None if it can.

    ``is_started``: by its own name, so that the kernel reads its first line.
    """
    try:
        with Path(file).expanduser().open("rb") as script:
            head = script.read(_HEAD_BYTES)
    except OSError:
        return None  # another rule names a file that is missing
    if b"\0" in head:
        return None  # a binary
    first, end, _ = head.partition(b"\n")
    if end and first.endswith(b"\r"):
        return f"{file} has line ends of Windows, which no shell reads", rf"run `sed -i 's/\r$//' {file}`"
    if is_started and not head.startswith(b"#!"):
        shell = "python" if file.endswith(".py") else "bash"
        return f"{file} does not begin with #!", f"write command: {listed(f'{shell} {file}')}"
    return None


def _missing_words(command: Sequence[str]) -> Iterator[Problem]:
    name = command[0]
    if "{" not in name and shutil.which(executable(name)) is None:
        close = nearest(name, ("python", "torchrun", "accelerate", "bash"))
        remedy = f"did you mean {close}?" if close else _executable_remedy(name)
        path = ("program", "command", 0)
        yield Problem(path, f"there is no executable {name}", remedy, code="program.executable")
    elif "/" in name and (problem := _script_problem(name)) is not None:
        yield Problem(("program", "command", 0), *problem, code="program.executable")
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
        elif word.endswith(".sh") and (problem := _script_problem(word, is_started=False)) is not None:
            yield Problem(("program", "command", index), *problem, code="program.file")
        if index == 1 and is_path:
            return  # further words may name files that the script writes


def main(arguments: Sequence[str]) -> int:
    """Run the command in the current folder; return the exit code of ``prepare``."""
    file, *overrides = (argument for argument in arguments if not argument.startswith("--"))
    try:
        job = load(Path(file), overrides).experiment
        assert isinstance(job, Program), "the workload names this module"
        _check(job)
    except UserError as error:
        say_text(str(error))
        return int(error.exit_code)
    if "--json" in arguments:
        print(json.dumps({"data": [], "models": []}), flush=True)
    return int(ExitCode.DONE)


def _check(job: Program) -> None:
    command = job.program.check
    if command is None:
        say("there is nothing to prepare: a program fetches its data; program.check names a command to try")
        return
    command = [executable(command[0]), *command[1:]]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    try:
        code = subprocess.run(command, check=False, env=environment, stdout=sys.stderr).returncode
    except OSError as error:
        raise BadFileError(
            f"program.check: {command[0]}: {error.strerror or error}; fix the command"
        ) from error
    if code:
        raise BadFileError(f"program.check: the command ended with exit code {code}; its output is above")
    say("program.check: fine")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
