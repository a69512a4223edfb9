"""Arguments and options that several commands have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hpc_train.cli import completion

File = Annotated[Path, typer.Argument(metavar="FILE", help="The experiment file.", show_default=False)]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="KEY=VALUE",
        help="Keys of the file to override.",
        show_default=False,
        autocompletion=completion.overrides,
    ),
]
Runs = Annotated[
    list[str],
    typer.Argument(metavar="RUN", help="Runs.", show_default=False, autocompletion=completion.runs),
]
MaybeRuns = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="RUN", help="Runs; all if none.", show_default=False, autocompletion=completion.runs
    ),
]
Run = Annotated[
    str, typer.Argument(metavar="RUN", help="One run.", show_default=False, autocompletion=completion.runs)
]
RunAndData = Annotated[
    list[str],
    typer.Argument(
        metavar="RUN|KEY=VALUE",
        help="One run, and keys of data, parallel, device, … to override.",
        show_default=False,
        autocompletion=completion.runs_and_overrides,
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON to stdout.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Don't ask for confirmation.")]
Local = Annotated[bool, typer.Option("--local", help="On this machine instead of in the queue.")]
Devices = Annotated[
    int | None, typer.Option("--devices", min=1, help="Ranks on this machine; default: one per GPU, or one.")
]
Code = Annotated[
    str | None,
    typer.Option("--code", metavar="new", help="new: use the current code instead of the run's snapshot."),
]
LauncherName = Annotated[
    str | None,
    typer.Option("--launcher", help="Name of a launcher plug-in.", autocompletion=completion.launchers),
]
