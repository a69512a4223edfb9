"""The ``hpc-train`` command: its subcommands and options. Each command is implemented in its own module.

Imported for ``--help`` too, so nothing heavy is imported at the top: a command's module is imported when it
runs.
"""

from __future__ import annotations

import functools
import gc
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, ParamSpec

import typer

from hpc_train import __version__
from hpc_train.console import redirect_to_devnull, say
from hpc_train.errors import ExitCode, HpcTrainError, UserError

_P = ParamSpec("_P")
#: New objects after which Python looks for garbage. Its own 700 makes `status` of thousands of runs a fifth
#: slower: they make many objects, which stay to the command's end.
_GARBAGE_THRESHOLD = 100_000

app = typer.Typer(
    name="hpc-train",
    help="Train PyTorch models from one YAML file, on a laptop or on a cluster.",
    epilog="RUN is a run's id, name/id, its folder, or an experiment's name (then all its runs).",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    add_completion=False,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)

File = Annotated[Path, typer.Argument(metavar="FILE", help="The experiment file.", show_default=False)]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="Keys of the file to override.", show_default=False),
]
Runs = Annotated[list[str], typer.Argument(metavar="RUN", help="Runs.", show_default=False)]
MaybeRuns = Annotated[
    list[str] | None, typer.Argument(metavar="RUN", help="Runs; all if none.", show_default=False)
]
Run = Annotated[str, typer.Argument(metavar="RUN", help="One run.", show_default=False)]
Json = Annotated[bool, typer.Option("--json", help="Print JSON to stdout.")]
Local = Annotated[bool, typer.Option("--local", help="On this machine instead of in the queue.")]
Devices = Annotated[
    int | None, typer.Option("--devices", min=1, help="Ranks on this machine; default: one per GPU, or one.")
]
LauncherName = Annotated[str | None, typer.Option("--launcher", help="Name of a launcher plug-in.")]


def _command(body: Callable[_P, int]) -> Callable[_P, None]:
    """Register a command whose body returns an exit code; a user error prints no traceback."""

    @functools.wraps(body)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> None:
        sys.exit(exit_code_of(lambda: body(*args, **kwargs)))

    return app.command()(run)


def exit_code_of(body: Callable[[], int]) -> int:
    """Run a command's body and return the exit code of the process; errors are printed."""
    try:
        return int(body())
    except UserError as error:
        say(str(error))
        return int(error.exit_code)
    except HpcTrainError as error:
        say(f"{type(error).__name__}: {error}")
        return int(error.exit_code)
    except KeyboardInterrupt:
        return int(ExitCode.INTERRUPTED)
    except BrokenPipeError:
        redirect_to_devnull(sys.stdout)  # the reader of our output has gone
        return int(ExitCode.IO)
    except OSError as error:
        say(f"{error.filename or 'input/output'}: {error.strerror or error}")
        return int(ExitCode.IO)
    except Exception as error:
        from hpc_train.run.tracebacks import users_traceback

        shown = users_traceback(error)
        if shown is None:
            raise
        say(f"{shown}\na plug-in of yours raised this when hpc-train loaded or called it; fix it there")
        return int(ExitCode.FAILED)
    finally:
        _flush()


def _flush() -> None:
    """Leave nothing that Python would flush, and fail on, at exit: the terminal may be gone."""
    try:
        sys.stdout.flush()
    except OSError:
        redirect_to_devnull(sys.stdout)


def _print_version(is_asked: bool) -> None:
    if is_asked:
        print(f"hpc-train {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version."),
    ] = False,
) -> None:
    """Train PyTorch models from one YAML file, on a laptop or on a cluster."""


@_command
def init(
    output: Annotated[
        Path, typer.Option("-o", "--output", metavar="FILE", help="File to write; never overwritten.")
    ] = Path("exp.yaml"),
    task: Annotated[
        str | None,
        typer.Option("--task", help="classification, segmentation, detection, regression, causal_lm."),
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
        typer.Option("--from", metavar="EXAMPLE", help="Start from a recipe; --from list lists them."),
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
) -> int:
    """Write a commented experiment file that fits this machine or cluster."""
    from hpc_train.cli.init import InitOptions, init

    options = InitOptions(
        task=task, data=data, root=root, model=model, example=example, queue=queue, gpus=gpus, local=local,
        launcher=launcher, asks=not yes,
    )  # fmt: skip
    return init(output, options)


@_command
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
        typer.Option("--nodes", metavar="NAMES", help="The same on each of these nodes: n1,n[3-5]."),
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


@_command
def validate(file: File, overrides: Overrides = None, as_json: Json = False) -> int:
    """Check a file and report all errors."""
    from hpc_train.cli.experiment_file import validate

    return validate(file, overrides or [], as_json=as_json)


@_command
def schema() -> int:
    """Print the file's JSON Schema, for editors."""
    from hpc_train.cli.experiment_file import schema

    return schema()


@_command
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


@_command
def prepare(
    file: File,
    overrides: Overrides = None,
    no_forward: Annotated[
        bool, typer.Option("--no-forward", help="Do not run the model on samples on the CPU.")
    ] = False,
) -> int:
    """Download data and weights; try data, model and task.

    Run it where there is a network, before nodes without one need the files.
    """
    from hpc_train.cli.experiment_file import prepare

    return prepare(file, overrides or [], runs_forward=not no_forward)


@_command
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


@_command
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


@_command
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


@_command
def watch(
    runs: MaybeRuns = None,
    interval: Annotated[
        float, typer.Option("--interval", min=1.0, metavar="SECONDS", help="Time between two readings.")
    ] = 5.0,
) -> int:
    """Watch runs on a full screen: progress, losses, logs; cancel or resume by key."""
    from hpc_train.cli.watch import watch

    return watch(runs or [], interval_s=interval)


@_command
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
) -> int:
    """Print a rank's log."""
    from hpc_train.cli.logs import logs

    return logs(run, follow=follow, rank=rank, attempt=attempt, lines=0 if print_all else lines, last=last)


@_command
def resume(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN|KEY=VALUE",
            help="Runs, and keys to override that are not part of a run's id.",
            show_default=False,
        ),
    ],
    local: Local = False,
    devices: Devices = None,
    as_json: Json = False,
    launcher: LauncherName = None,
    code: Annotated[
        str | None,
        typer.Option(
            "--code", metavar="new", help="new: use the current code instead of the run's snapshot."
        ),
    ] = None,
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


@_command
def cancel(runs: Runs, as_json: Json = False) -> int:
    """Cancel runs for good; what they saved is kept."""
    from hpc_train.cli.cancel import cancel

    return cancel(runs, as_json=as_json)


@_command
def export(
    run: Run,
    output: Annotated[
        Path,
        typer.Option(
            "-o",
            "--output",
            metavar="FILE",
            help="File to write: .safetensors (weights), .onnx or .pt2 (torch.export).",
            show_default=False,
        ),
    ],
    form: Annotated[
        str | None,
        typer.Option(
            "--format",
            metavar="FORMAT",
            help="safetensors, onnx or torch-export, whatever the suffix of FILE.",
        ),
    ] = None,
    ema: Annotated[bool, typer.Option("--ema", help="Export the EMA weights instead.")] = False,
    best: Annotated[
        bool, typer.Option("--best", help="Export the best checkpoint (checkpoint.best), not the newest.")
    ] = False,
    step: Annotated[
        int | None, typer.Option("--step", min=0, help="Export the checkpoint of this step.")
    ] = None,
    code: Annotated[
        str | None,
        typer.Option(
            "--code", metavar="new", help="new: use the current code instead of the run's snapshot."
        ),
    ] = None,
) -> int:
    """Export a run's full weights as one safetensors file, or its model to ONNX or torch.export."""
    from hpc_train.cli.checkpoint_commands import export
    from hpc_train.cli.evaluate import Checkpoint

    return export(run, output, form=form, checkpoint=Checkpoint(best, step, code), ema=ema)


@_command
def evaluate(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN|KEY=VALUE", help="One run, and keys to override, of data.", show_default=False
        ),
    ],
    best: Annotated[
        bool, typer.Option("--best", help="Evaluate the best checkpoint (checkpoint.best), not the newest.")
    ] = False,
    step: Annotated[
        int | None, typer.Option("--step", min=0, help="Evaluate the checkpoint of this step.")
    ] = None,
    devices: Devices = None,
    code: Annotated[
        str | None,
        typer.Option(
            "--code", metavar="new", help="new: use the current code instead of the run's snapshot."
        ),
    ] = None,
    as_json: Json = False,
) -> int:
    """Evaluate a run's checkpoint on this machine."""
    from hpc_train.cli.evaluate import Checkpoint, evaluate

    return evaluate(words, checkpoint=Checkpoint(best, step, code), devices=devices, as_json=as_json)


@_command
def predict(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN|KEY=VALUE", help="One run, and keys to override, of data.", show_default=False
        ),
    ],
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
    code: Annotated[
        str | None,
        typer.Option(
            "--code", metavar="new", help="new: use the current code instead of the run's snapshot."
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace FILE if it exists.")] = False,
) -> int:
    """Write a run's predictions to a file.

    For images, or for the run's validation data.
    """
    from hpc_train.cli.evaluate import Checkpoint
    from hpc_train.cli.predict import predict

    checkpoint = Checkpoint(best, step, code)
    return predict(words, output, data=data, checkpoint=checkpoint, devices=devices, ema=ema, force=force)


@_command
def verify(runs: Runs, as_json: Json = False) -> int:
    """Check by hashes which checkpoints would load."""
    from hpc_train.cli.checkpoint_commands import verify

    return verify(runs, as_json=as_json)


@_command
def clean(
    runs: Runs, yes: Annotated[bool, typer.Option("--yes", "-y", help="Don't ask for confirmation.")] = False
) -> int:
    """Remove old checkpoints, caches and unused code."""
    from hpc_train.cli.clean import clean

    return clean(runs, yes=yes)


@_command
def compare(
    runs: Runs,
    metric: Annotated[
        str | None,
        typer.Option(
            "--metric",
            metavar="[SPLIT/]NAME",
            help="Metric to compare. Default: val/accuracy, or loss.",
            show_default=False,
        ),
    ] = None,
    over: Annotated[
        list[str] | None,
        typer.Option("--over", metavar="KEY", help="Average runs that differ in this key only, like seed."),
    ] = None,
    group_by: Annotated[
        list[str] | None,
        typer.Option("--group-by", metavar="KEY", help="Average runs that have this key's value in common."),
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


@_command
def report(
    runs: Runs,
    output: Annotated[
        Path, typer.Option("-o", "--output", metavar="FILE.html", help="File to write.", show_default=False)
    ],
    metric: Annotated[
        str | None,
        typer.Option(
            "--metric",
            metavar="[SPLIT/]NAME",
            help="Metric to compare. Default: val/accuracy, or loss.",
            show_default=False,
        ),
    ] = None,
) -> int:
    """Write runs to one HTML file to look at and share: curves, attempts, goodput, evaluations, files."""
    from hpc_train.cli.report import report

    return report(runs, output, metric=metric)


@_command
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


@_command
def notify() -> int:
    """Send a test message to the webhook that your runs report to."""
    from hpc_train.cli.notify import notify

    return notify()


@_command
def rm(
    runs: Runs, yes: Annotated[bool, typer.Option("--yes", "-y", help="Don't ask for confirmation.")] = False
) -> int:
    """Remove runs that have ended, and unused code."""
    from hpc_train.cli.remove import remove

    return remove(runs, yes=yes)


@_command
def completion(
    shell: Annotated[str, typer.Argument(metavar="SHELL", help="bash, zsh or fish.", show_default=False)],
) -> int:
    """Print the script with which a shell completes commands, files, runs and keys."""
    from hpc_train.cli.completion import completion

    return completion(shell)


@app.command(hidden=True)
def complete(line: str, breaks: Annotated[str, typer.Option("--breaks")] = "") -> None:
    """Print candidates for the last word of a line; called by the script of ``completion``."""
    from typer.main import get_command

    from hpc_train.cli.completion import complete

    sys.exit(exit_code_of(lambda: complete(line, breaks, get_command(app))))


def _open_closed_streams() -> None:
    """Redirect closed standard streams (``hpc-train status >&-``) to the null device.

    Otherwise the next file that is opened, here or in a rank, gets the number of the stream, and is printed
    into.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != number:
                os.dup2(opened, number)
                os.close(opened)
            os.set_inheritable(number, True)
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "w" if number else "r", closefd=False))  # noqa: SIM115


def main() -> None:
    """Run the command line and exit."""
    # Files that others may write are not executed (run.trust), so no process here may create such files.
    os.umask(os.umask(0o077) | 0o022)
    _open_closed_streams()
    gc.set_threshold(_GARBAGE_THRESHOLD)
    try:
        app()
    except KeyboardInterrupt:  # while modules were being imported
        sys.exit(ExitCode.INTERRUPTED)
