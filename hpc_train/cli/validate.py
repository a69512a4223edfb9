"""``validate``, ``schema`` and ``prepare``: the commands on a file alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TypedDict

from hpc_train.cli.children import child_report, run_child
from hpc_train.cli.command_options import LauncherOptions, PrepareOptions, SchemaOptions, ValidateOptions
from hpc_train.cli.offline import impossible_downloads
from hpc_train.cli.plan import say_layouts
from hpc_train.cli.preflight import LauncherChoice, lacking_parts, say_remarks, submittable
from hpc_train.console import JSON_VERSION, put_json, say
from hpc_train.errors import BadFileError, ExitCode, counted
from hpc_train.experiment.plan.planning import Plan, make_plan
from hpc_train.experiment.validate.child_process import one_child
from hpc_train.experiment.validate.loading import Loaded, load


class Validation(TypedDict):
    """Whether a file is valid: it is if there are no problems."""

    version: int
    file: str
    #: The experiment's name; null if the file is not valid.
    name: str | None
    #: How many runs it plans; null if it is not valid.
    runs: int | None
    #: As printed without ``--json``: position, key, rule and remedy.
    problems: list[str]
    #: The code of each problem, like ``batch.undivided``: it stays if the wording changes. ``other``: none.
    codes: list[str]


class PreparedData(TypedDict):
    """Data that is complete here."""

    name: str
    root: str | None
    train_samples: int
    val_samples: int
    classes: int
    #: Samples, of those that were tried, that another one will replace.
    bad_samples: list[str]
    #: Files that are not read, and conversions that lose information.
    notices: list[str]


class PreparedModel(TypedDict):
    """A model whose weights are here, tried on samples of the data of that name."""

    name: str
    task: str
    data: str
    #: Null if the model was not built.
    parameters: int | None
    trained_parameters: int | None
    weights: str | None
    #: Why it was not built, or not run on samples; null if it was.
    unchecked: str | None


class Preparation(TypedDict):
    """What the runs of a file need, each once."""

    version: int
    data: list[PreparedData]
    models: list[PreparedModel]


@one_child()
def validate(options: ValidateOptions) -> ExitCode:
    """Report that the file is valid; raises BadFileError with all problems, or prints them as JSON."""
    file, overrides = options.file, options.overrides
    if not options.as_json:
        loaded, plan, count = _checked(file, overrides)
        say(f"{file}: fine: {counted(count, 'run')} of {plan.name}")
        say_layouts(plan.runs)
        say_remarks(loaded)
        return ExitCode.DONE
    answer = Validation(version=JSON_VERSION, file=str(file), name=None, runs=None, problems=[], codes=[])
    try:
        loaded, plan, count = _checked(file, overrides)
    except BadFileError as error:
        codes = [getattr(line, "code", "other") for line in error.problems]
        put_json(answer | {"problems": error.problems, "codes": codes})
        return error.exit_code
    put_json(answer | {"name": plan.name, "runs": count})
    say_remarks(loaded)
    return ExitCode.DONE


def _checked(file: Path, overrides: Sequence[str]) -> tuple[Loaded, Plan, int]:
    """Return a file that ``submit`` would accept, its plan, and its number of runs.

    Raises BadFileError with all problems.
    """
    loaded = load(file, overrides)
    plan = submittable(LauncherChoice.of(LauncherOptions()), loaded)
    search = loaded.experiment.sweep.search
    return loaded, plan, search.trials if search else len(plan.runs)


def schema(options: SchemaOptions) -> ExitCode:
    """Print the JSON Schema of the file."""
    from hpc_train.experiment.config.json_schema import json_schema

    put_json(json_schema())
    return ExitCode.DONE


def prepare(options: PrepareOptions) -> int:
    """Download and try the file's parts in a child process, which imports torch."""
    loaded = load(options.file, options.overrides)
    plan = make_plan(loaded)
    if problems := lacking_parts(loaded, plan) or impossible_downloads(loaded, plan):
        raise BadFileError(problems)
    flags = [*(["--no-forward"] if options.no_forward else []), *(["--json"] if options.as_json else [])]
    request = ("hpc_train.training.prepare", str(options.file), *flags, *options.overrides)
    if not options.as_json:
        return run_child(*request)
    code, report = child_report(*request)
    if code == ExitCode.DONE:
        put_json({"version": JSON_VERSION} | report)
    return code
