"""Runs ``program.check`` for ``hpc-train prepare``, as a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from hpc_train.console import say, say_text
from hpc_train.errors import BadFileError, ExitCode, UserError
from hpc_train.experiment.config.schema import Program
from hpc_train.experiment.validate.loading import load
from hpc_train.workloads.program_command import executable


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
