"""The commands on results of runs: names and options."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hpc_train.cli import completion
from hpc_train.cli.command_line import command
from hpc_train.cli.shared_options import Code, Devices, Json, Run, RunAndData, Runs

_Metric = Annotated[
    str | None,
    typer.Option(
        "--metric",
        metavar="[SPLIT/]NAME",
        help="Metric to compare. Default: val/accuracy, val/map or loss.",
        show_default=False,
    ),
]


@command
def export(
    run: Run,
    output: Annotated[
        Path,
        typer.Option(
            "-o",
            "--output",
            metavar="FILE",
            help="File to write: .safetensors.",
            show_default=False,
        ),
    ],
    ema: Annotated[bool, typer.Option("--ema", help="Export the EMA weights instead.")] = False,
    best: Annotated[
        bool, typer.Option("--best", help="Export the best checkpoint (checkpoint.best), not the newest.")
    ] = False,
    step: Annotated[
        int | None, typer.Option("--step", min=0, help="Export the checkpoint of this step.")
    ] = None,
    as_json: Json = False,
) -> int:
    """Export a run's full weights as one safetensors file."""
    from hpc_train.cli.checkpoint_commands import export
    from hpc_train.cli.evaluate import Checkpoint

    return export(run, output, checkpoint=Checkpoint(best, step), ema=ema, as_json=as_json)


@command
def evaluate(
    words: RunAndData,
    best: Annotated[
        bool, typer.Option("--best", help="Evaluate the best checkpoint (checkpoint.best), not the newest.")
    ] = False,
    step: Annotated[
        int | None, typer.Option("--step", min=0, help="Evaluate the checkpoint of this step.")
    ] = None,
    devices: Devices = None,
    code: Code = None,
    as_json: Json = False,
) -> int:
    """Evaluate a run's checkpoint on this machine."""
    from hpc_train.cli.evaluate import Checkpoint, evaluate

    return evaluate(words, checkpoint=Checkpoint(best, step, code), devices=devices, as_json=as_json)


@command
def predict(
    words: RunAndData,
    output: Annotated[
        Path,
        typer.Option(
            "-o", "--output", metavar="FILE", help="File to write: .jsonl or .csv.", show_default=False
        ),
    ],
    data: Annotated[
        str | None,
        typer.Option(
            "--data",
            metavar="PATH",
            help="An image, or a folder with images. Default: validation data.",
            show_default=False,
        ),
    ] = None,
    best: Annotated[
        bool, typer.Option("--best", help="Use the best checkpoint (checkpoint.best), not the newest.")
    ] = False,
    step: Annotated[
        int | None, typer.Option("--step", min=0, help="Use the checkpoint of this step.")
    ] = None,
    ema: Annotated[bool, typer.Option("--ema", help="Use the EMA weights.")] = False,
    devices: Devices = None,
    code: Code = None,
    force: Annotated[bool, typer.Option("--force", help="Replace FILE if it exists.")] = False,
    as_json: Json = False,
) -> int:
    """Write a run's predictions to a file.

    For images, or for the run's validation data.
    """
    from hpc_train.cli.evaluate import Checkpoint
    from hpc_train.cli.predict import predict

    checkpoint = Checkpoint(best, step, code)
    return predict(
        words,
        output,
        data=data,
        checkpoint=checkpoint,
        devices=devices,
        ema=ema,
        force=force,
        as_json=as_json,
    )


@command
def verify(runs: Runs, as_json: Json = False) -> int:
    """Check by hashes which checkpoints would load."""
    from hpc_train.cli.checkpoint_commands import verify

    return verify(runs, as_json=as_json)


@command
def compare(
    runs: Runs,
    metric: _Metric = None,
    over: Annotated[
        list[str] | None,
        typer.Option(
            "--over",
            metavar="KEY",
            help="Average runs that differ in this key only, like seed.",
            autocompletion=completion.keys,
        ),
    ] = None,
    group_by: Annotated[
        list[str] | None,
        typer.Option(
            "--group-by",
            metavar="KEY",
            help="Average runs that have this key's value in common.",
            autocompletion=completion.keys,
        ),
    ] = None,
    diff: Annotated[
        bool, typer.Option("--diff", help="Of two runs, show keys, versions and code that differ.")
    ] = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print CSV to stdout.")] = False,
    as_json: Json = False,
) -> int:
    """Compare runs: changed keys, last and best metrics.

    The best run comes first.
    """
    from hpc_train.cli.compare import CompareOptions, compare

    options = CompareOptions(
        metric=metric, over=over or (), group_by=group_by or (), diff=diff, as_csv=as_csv, as_json=as_json
    )
    return compare(runs, options)


@command
def report(
    runs: Runs,
    output: Annotated[
        Path, typer.Option("-o", "--output", metavar="FILE.html", help="File to write.", show_default=False)
    ],
    metric: _Metric = None,
    as_json: Json = False,
) -> int:
    """Write runs to one HTML file to look at and share: curves, attempts, goodput, evaluations, files."""
    from hpc_train.cli.report import report

    return report(runs, output, metric=metric, as_json=as_json)


@command
def sync(
    runs: Runs,
    to: Annotated[
        list[str] | None,
        typer.Option(
            "--to",
            metavar="WHERE",
            help="wandb, mlflow or tensorboard. Default: those of the file's logging.",
            show_default=False,
        ),
    ] = None,
    project: Annotated[
        str | None,
        typer.Option(
            "--project",
            metavar="NAME",
            help="Project of wandb, or experiment of MLflow. Default: the file's, or the experiment's name.",
            show_default=False,
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--output",
            metavar="DIR",
            help="Write TensorBoard's event files to DIR/<run id>. Default: the run folder.",
            show_default=False,
        ),
    ] = None,
    as_json: Json = False,
) -> int:
    """Send to wandb, MLflow or TensorBoard what runs logged without a network."""
    from hpc_train.cli.sync import SyncOptions, sync

    return sync(runs, SyncOptions(to=to or (), project=project, output=output, as_json=as_json))
