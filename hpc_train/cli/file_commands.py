"""The commands on an experiment file, and on this machine or cluster: names and options."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hpc_train.cli import completion
from hpc_train.cli.command_line import command
from hpc_train.cli.shared_options import Devices, File, Json, LauncherName, Local, Overrides


@command
def init(
    output: Annotated[
        Path, typer.Option("-o", "--output", metavar="FILE", help="File to write; never overwritten.")
    ] = Path("exp.yaml"),
    task: Annotated[
        str | None,
        typer.Option(
            "--task",
            help="classification, segmentation, detection, regression, causal_lm.",
            autocompletion=completion.tasks,
        ),
    ] = None,
    data: Annotated[
        str | None, typer.Option("--data", metavar="NAME", help="Data set. Default: one that fits the task.")
    ] = None,
    root: Annotated[
        str | None, typer.Option("--root", metavar="PATH", help="Folder of the data (data.root).")
    ] = None,
    model: Annotated[
        str | None, typer.Option("--model", metavar="NAME", help="Model. Default: a small one for the task.")
    ] = None,
    example: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="EXAMPLE",
            help="Start from a recipe; --from list lists them.",
            autocompletion=completion.examples,
        ),
    ] = None,
    queue: Annotated[
        str | None, typer.Option("--queue", metavar="NAME", help="Queue (partition) of the cluster.")
    ] = None,
    gpus: Annotated[
        int | None, typer.Option("--gpus", min=0, help="GPUs per node; 0: none. Default: all that are found.")
    ] = None,
    local: Annotated[
        bool, typer.Option("--local", help="For this machine, even if there is a cluster.")
    ] = False,
    launcher: LauncherName = None,
    yes: Annotated[
        bool, typer.Option("--yes", "-y", help="Ask nothing; use defaults for what is not given.")
    ] = False,
    as_json: Json = False,
) -> int:
    """Write a commented experiment file that fits this machine or cluster."""
    from hpc_train.cli.init import InitOptions, init

    options = InitOptions(
        task=task, data=data, root=root, model=model, example=example, queue=queue, gpus=gpus, local=local,
        launcher=launcher, asks=not yes, as_json=as_json,
    )  # fmt: skip
    return init(output, options)


@command
def doctor(
    file: Annotated[
        Path | None, typer.Argument(metavar="[FILE]", help="Also check this file against the cluster.")
    ] = None,
    overrides: Overrides = None,
    local: Annotated[bool, typer.Option("--local", help="Check this machine alone.")] = False,
    submit: Annotated[
        bool, typer.Option("--submit", help="Also run a job of a few seconds on a node, and check the node.")
    ] = False,
    nodes: Annotated[
        str | None,
        typer.Option(
            "--nodes",
            metavar="NAMES",
            help="The same on each of these nodes, n1,n[3-5], and the bandwidth of each pair; or a number.",
        ),
    ] = None,
    wait_min: Annotated[
        float,
        typer.Option("--wait-min", min=0, help="Minutes to wait for these jobs; then they are cancelled."),
    ] = 5.0,
    as_json: Json = False,
    launcher: LauncherName = None,
) -> int:
    """List what would make runs fail on this machine or cluster, with remedies."""
    from hpc_train.cli.doctor import DoctorOptions, doctor

    options = DoctorOptions(
        local=local, launcher=launcher, submit=submit, nodes=nodes, wait_min=wait_min, as_json=as_json
    )
    return doctor(file, overrides or [], options)


@command
def validate(file: File, overrides: Overrides = None, as_json: Json = False) -> int:
    """Check a file and report all errors."""
    from hpc_train.cli.experiment_file import validate

    return validate(file, overrides or [], as_json=as_json)


@command
def schema() -> int:
    """Print the file's JSON Schema, for editors."""
    from hpc_train.cli.experiment_file import schema

    return schema()


@command
def plan(
    file: File,
    overrides: Overrides = None,
    local: Local = False,
    devices: Devices = None,
    as_json: Json = False,
    script: Annotated[bool, typer.Option("--script", help="Also show the batch script of each job.")] = False,
    launcher: LauncherName = None,
    throughput: Annotated[
        float | None,
        typer.Option(
            "--throughput", min=1e-9, help="Samples per second of one rank; default: as earlier runs did."
        ),
    ] = None,
    memory: Annotated[
        bool | None,
        typer.Option(
            "--memory/--no-memory", help="Predict the memory of a step, which takes seconds (default)."
        ),
    ] = None,
) -> int:
    """Show what would run: ranks, batches, memory, time, cost, earliest start."""
    from hpc_train.cli.plan import PlanOptions, plan

    options = PlanOptions(
        local=local,
        devices=devices,
        launcher=launcher,
        as_json=as_json,
        script=script,
        throughput=throughput,
        memory=memory,
    )
    return plan(file, overrides or [], options)


@command
def prepare(
    file: File,
    overrides: Overrides = None,
    no_forward: Annotated[
        bool, typer.Option("--no-forward", help="Do not run the model on samples on the CPU.")
    ] = False,
    as_json: Json = False,
) -> int:
    """Download data and weights; try data, model and task.

    Run it where there is a network, before nodes without one need the files.
    """
    from hpc_train.cli.experiment_file import prepare

    return prepare(file, overrides or [], runs_forward=not no_forward, as_json=as_json)


@command
def submit(
    file: File,
    overrides: Overrides = None,
    local: Local = False,
    devices: Devices = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show the plan and the batch scripts without starting anything.")
    ] = False,
    new: Annotated[
        bool, typer.Option("--new", help="Train again in a new run, even if the run exists.")
    ] = False,
    as_json: Json = False,
    launcher: LauncherName = None,
    jobs: Annotated[
        int, typer.Option("--jobs", min=1, help="With --local: number of runs of a sweep to train at a time.")
    ] = 1,
    profile: Annotated[
        bool, typer.Option("--profile", help="Profile some steps of each run, as profile=true does.")
    ] = False,
) -> int:
    """Plan and start the runs of a file."""
    from hpc_train.cli.submit import SubmitOptions, submit

    options = SubmitOptions(
        local=local,
        devices=devices,
        launcher=launcher,
        dry_run=dry_run,
        new=new,
        as_json=as_json,
        jobs=jobs,
    )
    return submit(file, [*(overrides or []), *(["profile=true"] if profile else [])], options)


@command
def search(
    file: File,
    overrides: Overrides = None,
    rounds: Annotated[
        int | None,
        typer.Option("--rounds", min=1, help="Number of submits. Default: until all trials are done."),
    ] = None,
    local: Local = False,
    devices: Devices = None,
    launcher: LauncherName = None,
    jobs: Annotated[int, typer.Option("--jobs", min=1, help="With --local: number of runs at a time.")] = 1,
) -> int:
    """Submit a file with sweep.search whenever trials are missing, until all are done."""
    from hpc_train.cli.search import search
    from hpc_train.cli.submit import SubmitOptions

    options = SubmitOptions(local=local, devices=devices, launcher=launcher, jobs=jobs)
    return search(file, overrides or [], options, rounds)
