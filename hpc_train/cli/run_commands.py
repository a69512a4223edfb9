"""The commands on runs while they exist: names and options."""

from __future__ import annotations

from typing import Annotated

import typer

from hpc_train.cli import completion
from hpc_train.cli.command_line import command
from hpc_train.cli.shared_options import Code, Devices, Json, LauncherName, Local, MaybeRuns, Run, Runs, Yes


@command
def status(
    runs: MaybeRuns = None,
    as_json: Json = False,
    sort: Annotated[
        str | None, typer.Option("--sort", metavar="KEY", help="Sort by a column or a swept key.")
    ] = None,
    failed: Annotated[bool, typer.Option("--failed", help="Only runs that have failed.")] = False,
) -> int:
    """Show the status of runs; of one that is named, what it used and lost, too."""
    from hpc_train.cli.status import StatusOptions, status

    return status(runs or [], StatusOptions(as_json=as_json, sort=sort, failed=failed))


@command
def watch(
    runs: MaybeRuns = None,
    interval: Annotated[
        float, typer.Option("--interval", min=1.0, metavar="SECONDS", help="Time between two readings.")
    ] = 5.0,
) -> int:
    """Watch runs on a full screen: progress, losses, logs; cancel or resume by key."""
    from hpc_train.cli.watch import watch

    return watch(runs or [], interval_s=interval)


@command
def logs(
    run: Run,
    follow: Annotated[
        bool, typer.Option("-f", "--follow", help="Follow the log until the run ends.")
    ] = False,
    rank: Annotated[int, typer.Option("--rank", min=0, help="Rank whose log to print.")] = 0,
    attempt: Annotated[
        int | None, typer.Option("--attempt", min=1, help="Attempt. Default: the newest.")
    ] = None,
    lines: Annotated[
        int | None,
        typer.Option("-n", "--lines", min=0, help="Number of last lines; 0: all. Default: all, 20 with -f."),
    ] = None,
    print_all: Annotated[bool, typer.Option("--all", help="Print the whole log, also with -f.")] = False,
    last: Annotated[
        bool, typer.Option("--last", help="Of several runs, use the one that started last.")
    ] = False,
    as_json: Json = False,
) -> int:
    """Print a rank's log."""
    from hpc_train.cli.logs import logs

    lines = 0 if print_all else lines
    return logs(run, follow=follow, rank=rank, attempt=attempt, lines=lines, last=last, as_json=as_json)


@command
def resume(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN|KEY=VALUE",
            help="Runs, and keys to override that are not part of a run's id.",
            show_default=False,
            autocompletion=completion.runs_and_overrides,
        ),
    ],
    local: Local = False,
    devices: Devices = None,
    as_json: Json = False,
    launcher: LauncherName = None,
    code: Code = None,
    take_over: Annotated[
        bool,
        typer.Option("--take-over", help="Also resume a run whose machine or container is gone."),
    ] = False,
    strict_env: Annotated[
        bool, typer.Option("--strict-env", help="Refuse to resume with other versions than the run had.")
    ] = False,
) -> int:
    """Resume unfinished runs from their newest valid checkpoint."""
    from hpc_train.cli.resume import resume

    return resume(
        words,
        local=local,
        devices=devices,
        as_json=as_json,
        launcher=launcher,
        code=code,
        strict_env=strict_env,
        take_over=take_over,
    )


@command
def cancel(runs: Runs, as_json: Json = False) -> int:
    """Cancel runs for good; what they saved is kept."""
    from hpc_train.cli.cancel import cancel

    return cancel(runs, as_json=as_json)


@command
def clean(runs: Runs, yes: Yes = False, as_json: Json = False) -> int:
    """Remove old checkpoints, caches and unused code."""
    from hpc_train.cli.clean import clean

    return clean(runs, yes=yes, as_json=as_json)


@command
def rm(runs: Runs, yes: Yes = False, as_json: Json = False) -> int:
    """Remove runs that have ended, and unused code."""
    from hpc_train.cli.remove import remove

    return remove(runs, yes=yes, as_json=as_json)


@command
def notify() -> int:
    """Send a test message to the webhook that your runs report to."""
    from hpc_train.cli.notify import notify

    return notify()
