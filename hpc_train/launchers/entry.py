"""What a launcher starts on a node: the one way from a launcher to ``worker``."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

from hpc_train.errors import ExitCode, UsageError, UserError
from hpc_train.paths import RunPaths
from hpc_train.runtime import signals

#: Which attempt a rank belongs to; set by the launcher.
ATTEMPT_VARIABLE = "HPC_TRAIN_ATTEMPT"
#: Tells this attempt's rendezvous from an older one; set by the launcher.
TOKEN_VARIABLE = "HPC_TRAIN_TOKEN"


@dataclass(frozen=True)
class Entry:
    """Picklable; being called is being one rank."""

    folder: Path

    def __call__(self) -> ExitCode:
        signals.block()  # until the worker can note them; a launcher has done so already where it could
        from hpc_train import worker  # here alone: it imports torch

        return worker.run(RunPaths(self.folder), attempt_number(os.environ.get(ATTEMPT_VARIABLE)))


def attempt_number(text: str | None) -> int:
    if text is None or not text.isdecimal():
        raise UsageError(
            f"{ATTEMPT_VARIABLE}: {text!r} is no attempt's number; start ranks with hpc-train submit"
        )
    return int(text)


def main() -> None:
    """Be one rank, and end without Python's tear-down: gloo's threads sometimes abort in it."""
    try:
        code = int(Entry(Path(sys.argv[1]))())
    except UserError as error:
        print(error, file=sys.stderr)
        code = int(error.exit_code)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
