"""The commands' arguments and options: one class per command, whose object its function receives.

``app`` builds the command line from them. Imported for ``--help`` and completion, so nothing heavy is
imported here: the module with a command's function is imported when the command runs. For the same reason
they are not dataclasses, whose creation would take longer than all imports.
"""

from pathlib import Path
from typing import Any

from hpc_train.cli import completion
from hpc_train.cli.command_line import Options, Parameter, command
from hpc_train.errors import UsageError

_RUN = "RUN"


def argument(default: Any, text: str, metavar: str, **settings: Any) -> Any:
    """Return a positional argument; a ``default`` of ``...``: required, ``list``: any number."""
    return Parameter(default, None, {"help": text, "metavar": metavar, "show_default": False, **settings})


def option(default: Any, text: str, *names: str, **settings: Any) -> Any:
    """Return an option, called like its attribute unless ``names`` are given; default as above."""
    if default in (..., None):
        settings["show_default"] = False
    return Parameter(default, names, {"help": text, **settings})


def flag(text: str, *names: str) -> Any:
    """Return an option without a value."""
    return option(False, text, *names)


class _Json(Options):
    as_json: bool = flag("Print JSON to stdout.", "--json")


class OnRuns(_Json):
    """Options of a command on several runs."""

    runs: list[str] = argument(..., "Runs.", _RUN, autocompletion=completion.runs)


class _OnAnyRuns(Options):
    runs: list[str] = argument(list, "Runs; all if none.", _RUN, autocompletion=completion.runs)


def _overrides() -> Any:
    text = "Keys of the file to override."
    return argument(list, text, "KEY=VALUE", autocompletion=completion.overrides)


def _output(default: Any, text: str, metavar: str) -> Any:
    return option(default, text, "-o", "--output", metavar=metavar)


def _launcher() -> Any:
    return option(None, "Name of a launcher plug-in.", autocompletion=completion.launchers)


def _devices() -> Any:
    return option(None, "Ranks on this machine; default: one per GPU, or one.", min=1)


def _metric() -> Any:
    text = "Metric to compare. Default: val/accuracy, val/map or loss."
    return option(None, text, metavar="[SPLIT/]NAME")


def _yes(text: str = "Don't ask for confirmation.") -> Any:
    return flag(text, "--yes", "-y")


def _ema() -> Any:
    return option(None, "Use the EMA weights. Default: if checkpoint.best follows them.", "--ema/--no-ema")


class _OnFile(Options):
    file: Path = argument(..., "The experiment file.", "FILE")
    overrides: list[str] = _overrides()


class LauncherOptions(Options):
    """The options that select the launcher."""

    local: bool = flag("On this machine instead of in the queue.")
    here: bool = flag("On the nodes of the job in which this shell or script runs, without the queue.")
    nodes: int | None = option(None, "With --here: number of its nodes to use. Default: all.", min=1)
    devices: int | None = _devices()
    launcher: str | None = _launcher()


class CodeOptions(Options):
    """The code with which a command runs."""

    code: str | None = option(None, "new: use the current code instead of the run's snapshot.", metavar="new")


class CheckpointOptions(Options):
    """The options that select a checkpoint of a run; default: the best if there is one, else the newest."""

    best: bool = flag("Use the best checkpoint (checkpoint.best): the default if there is one.")
    last: bool = flag("Use the newest checkpoint, even if another one is the best.")
    step: int | None = option(None, "Use the checkpoint of this step.", min=0)

    @property
    def wants_best(self) -> bool | None:
        """True or False if the best or the newest checkpoint is requested, else None.

        Raises UsageError if several of the options are given.
        """
        given = [
            name
            for name, value in (("--best", self.best), ("--last", self.last), ("--step", self.step))
            if value not in (False, None)
        ]
        if len(given) > 1:
            raise UsageError(f"{' and '.join(given)} exclude each other; use one of them")
        return True if self.best else False if self.last else None


class OnOneRun(CodeOptions, _Json):
    """Options of a command on one run, with overrides."""

    runs_and_overrides: list[str] = argument(
        ...,
        "One run, and keys of data, parallel, device, … to override.",
        "RUN|KEY=VALUE",
        autocompletion=completion.runs_and_overrides,
    )


class RanksOptions(CheckpointOptions, OnOneRun):
    """The options of commands whose ranks on this machine load a checkpoint."""

    devices: int | None = _devices()


# On an experiment file, and on this machine or cluster.


@command("init")
class InitOptions(_Json):
    """Write a commented experiment file that fits this machine or cluster."""

    output: Path = _output(Path("exp.yaml"), "File to write; never overwritten.", "FILE")
    task: str | None = option(
        None,
        "classification, segmentation, detection, regression, causal_lm. Default: that of the data.",
        autocompletion=completion.tasks,
    )
    data: str | None = option(None, "Data set. Default: one that fits root and task.", metavar="NAME")
    root: str | None = option(
        None, "Folder of the data (data.root): init looks at a sample of it.", metavar="PATH"
    )
    model: str | None = option(None, "Model. Default: a small one for the task.", metavar="NAME")
    example: str | None = option(
        None,
        "Start from a recipe; --from list lists them.",
        "--from",
        metavar="EXAMPLE",
        autocompletion=completion.examples,
    )
    script: Path | None = option(
        None,
        "Start from a training script of your own, which is read, not run.",
        "--from-script",
        metavar="FILE",
    )
    queue: str | None = option(None, "Queue (partition) of the cluster.", metavar="NAME")
    gpus: int | None = option(None, "GPUs per node; 0: none. Default: all that are found.", min=0)
    local: bool = flag("For this machine, even if there is a cluster.")
    launcher: str | None = _launcher()
    yes: bool = _yes("Ask nothing; use defaults for what is not given.")


@command("doctor")
class DoctorOptions(_Json):
    """List what would make runs fail on this machine or cluster, with remedies."""

    file: Path | None = argument(None, "Also check this file against the cluster.", "[FILE]")
    overrides: list[str] = _overrides()
    local: bool = flag("Check this machine alone.")
    submit: bool = flag("Also run a job of a few seconds on a node, and check the node.")
    nodes: str | None = option(
        None,
        "The same on each of these nodes, n1,n[3-5], and the bandwidth of each pair; or a number.",
        metavar="NAMES",
    )
    wait_min: float = option(5.0, "Minutes to wait for these jobs; then they are cancelled.", min=0)
    launcher: str | None = _launcher()

    @property
    def runs_job(self) -> bool:
        """Whether a small job is submitted; naming nodes implies it."""
        return self.submit or self.nodes is not None


@command("validate")
class ValidateOptions(_OnFile, _Json):
    """Check a file and report all errors."""


@command("schema", module="validate")
class SchemaOptions(Options):
    """Print the file's JSON Schema, for editors."""


@command("plan")
class PlanOptions(LauncherOptions, _OnFile, _Json):
    """Show what would run: ranks, batches, memory, time, cost, earliest start."""

    script: bool = flag("Also show the batch script of each job.")
    throughput: float | None = option(
        None, "Samples per second of one rank; default: as earlier runs did.", min=1e-9
    )
    memory: bool | None = option(
        None, "Predict the memory of a step, which takes seconds (default).", "--memory/--no-memory"
    )


@command("prepare", module="validate")
class PrepareOptions(_OnFile, _Json):
    """Download data and weights; try data, model and task.

    Run it where there is a network, before nodes without one need the files.
    """

    no_forward: bool = flag("Do not run the model on samples on the CPU.")


class _Start(LauncherOptions, _OnFile):
    jobs: int = option(1, "With --local: number of runs of a sweep to train at a time.", min=1)


@command("submit")
class SubmitOptions(_Start, _Json):
    """Plan and start the runs of a file."""

    dry_run: bool = flag("Show the plan and the batch scripts without starting anything.")
    new: bool = flag("Train again in a new run, even if the run exists.")
    profile: bool = flag("Profile some steps of each run, as profile=true does.")


@command("search")
class SearchOptions(_Start):
    """Submit a file with sweep.search whenever trials are missing, until all are done."""

    rounds: int | None = option(None, "Number of submits. Default: until all trials are done.", min=1)


# On runs while they exist.


@command("status")
class StatusOptions(_OnAnyRuns, _Json):
    """Show the status of runs; of one that is named, what it used and lost, too."""

    sort: str | None = option(None, "Sort by a column or a swept key.", metavar="KEY")
    failed: bool = flag("Only runs that have failed.")


@command("watch", module="status")
class WatchOptions(_OnAnyRuns):
    """Watch runs on a full screen: progress, losses, logs; cancel or resume by key."""

    interval: float = option(5.0, "Time between two readings.", min=1.0, metavar="SECONDS")


@command("logs")
class LogsOptions(_Json):
    """Print a rank's log."""

    run: str = argument(..., "One run.", _RUN, autocompletion=completion.runs)
    follow: bool = flag("Follow the log until the run ends.", "-f", "--follow")
    rank: int = option(0, "Rank whose log to print.", min=0)
    attempt: int | None = option(None, "Attempt. Default: the newest.", min=1)
    lines: int | None = option(
        None, "Number of last lines; 0: all. Default: all, 20 with -f.", "-n", "--lines", min=0
    )
    print_all: bool = flag("Print the whole log, also with -f.", "--all")
    last: bool = flag("Of several runs, use the one that started last.")


@command("resume")
class ResumeOptions(LauncherOptions, CodeOptions, _Json):
    """Resume unfinished runs from their newest valid checkpoint; train completed runs longer."""

    runs_and_overrides: list[str] = argument(
        ...,
        "Runs, and keys to override that are not part of a run's id; for completed runs, a longer length.",
        "RUN|KEY=VALUE",
        autocompletion=completion.runs_and_overrides,
    )
    take_over: bool = flag("Also resume a run whose machine or container is gone.")
    strict_env: bool = flag("Refuse to resume with other versions than the run had.")


@command("cancel")
class CancelOptions(OnRuns):
    """Cancel runs for good; what they saved is kept."""


@command("clean")
class CleanOptions(OnRuns):
    """Remove old checkpoints, caches and unused code."""

    yes: bool = _yes()


@command("rm", module="clean")
class RemoveOptions(OnRuns):
    """Remove runs that have ended, and unused code."""

    yes: bool = _yes()


@command("notify", module="doctor")
class NotifyOptions(Options):
    """Send a test message to the webhook that your runs report to."""


# On results of runs.


@command("export", module="evaluate")
class ExportOptions(CheckpointOptions, _Json):
    """Export a run's full weights as one file, or its model as an ONNX or torch.export program."""

    run: str = argument(..., "One run.", _RUN, autocompletion=completion.runs)
    output: Path = _output(..., "File to write: .safetensors, .onnx or .pt2.", "FILE")
    ema: bool | None = _ema()


@command("evaluate")
class EvaluateOptions(RanksOptions):
    """Evaluate a run's checkpoint on this machine."""


@command("predict", module="evaluate")
class PredictOptions(RanksOptions):
    """Write a run's predictions to a file.

    For images, or for the run's validation data.
    """

    output: Path = _output(..., "File to write: .jsonl or .csv.", "FILE")
    data: str | None = option(
        None, "An image, or a folder with images. Default: validation data.", metavar="PATH"
    )
    ema: bool | None = _ema()
    force: bool = flag("Replace FILE if it exists.")


@command("compare")
class CompareOptions(OnRuns):
    """Compare runs: changed keys, last and best metrics.

    The best run comes first.
    """

    metric: str | None = _metric()
    over: list[str] = option(
        list,
        "Average runs that differ in this key only, like seed.",
        metavar="KEY",
        autocompletion=completion.keys,
    )
    group_by: list[str] = option(
        list,
        "Average runs that have this key's value in common.",
        metavar="KEY",
        autocompletion=completion.keys,
    )
    diff: bool = flag("Of two runs, show keys, versions and code that differ.")
    as_csv: bool = flag("Print CSV to stdout.", "--csv")


@command("report")
class ReportOptions(OnRuns):
    """Write runs to one HTML file to look at and share: curves, attempts, goodput, evaluations, files."""

    output: Path = _output(..., "File to write.", "FILE.html")
    metric: str | None = _metric()


@command("sync")
class SyncOptions(OnRuns):
    """Send to wandb, MLflow or TensorBoard what runs logged without a network."""

    to: list[str] = option(
        list, "wandb, mlflow or tensorboard. Default: those of the file's logging.", metavar="WHERE"
    )
    project: str | None = option(
        None,
        "Project of wandb, or experiment of MLflow. Default: the file's, or the experiment's name.",
        metavar="NAME",
    )
    output: Path | None = _output(
        None, "Write TensorBoard's event files to DIR/<run id>. Default: the run folder.", "DIR"
    )
