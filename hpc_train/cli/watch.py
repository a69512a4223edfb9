"""``watch``: runs on a full screen, while they run."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from hpc_train.cli.unreadable import find_readable
from hpc_train.console import say
from hpc_train.errors import ExitCode, UsageError


def watch(words: Sequence[str], *, interval_s: float) -> ExitCode:
    """Show these runs, or all, until the user quits. Raises UsageError if there is no terminal."""
    streams = (sys.stdin, sys.stdout, sys.stderr)
    if not all(stream.isatty() for stream in streams) or os.environ.get("TERM", "dumb") == "dumb":
        raise UsageError(
            "watch: needs a terminal for input, output and errors; use `hpc-train status`, which prints the "
            "same once, or `hpc-train status --json`"
        )
    find_readable(words)  # prints skipped runs; a word that names no run is an error
    from hpc_train.report.live.live_runs import RunsReader
    from hpc_train.report.live.watch_app import WatchApp  # with textual: 0.3 s

    app = WatchApp(RunsReader(words), interval_s)
    app.run()
    for command in app.living_commands:
        say(f"{command.title}: continues in the background, process {command.pid}")
    return ExitCode(app.return_code or 0)
