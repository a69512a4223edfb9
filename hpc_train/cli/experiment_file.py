"""``validate``, ``schema`` and ``prepare``: the commands on a file alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hpc_train.cli.children import child_report, run_child
from hpc_train.cli.found_sizes import say_layouts, with_found_sizes
from hpc_train.cli.plan import LauncherOptions, lacking_parts, say_remarks, submit_problems
from hpc_train.console import JSON_VERSION, put_json, say
from hpc_train.errors import BadFileError, ExitCode, counted
from hpc_train.plan.planning import Plan, make_plan
from hpc_train.validate.child_process import one_child
from hpc_train.validate.loading import Loaded, load


@one_child()
def validate(file: Path, overrides: Sequence[str], *, as_json: bool = False) -> ExitCode:
    """Report that the file is valid; raises BadFileError with all problems, or prints them as JSON."""
    if not as_json:
        loaded, plan, count = _checked(file, overrides)
        say(f"{file}: fine: {counted(count, 'run')} of {plan.name}")
        say_layouts(plan.runs)
        say_remarks(loaded)
        return ExitCode.DONE
    answer: dict[str, Any] = {"version": JSON_VERSION, "file": str(file), "name": None, "runs": None}
    try:
        loaded, plan, count = _checked(file, overrides)
    except BadFileError as error:
        codes = [getattr(line, "code", "other") for line in error.problems]
        put_json(answer | {"problems": error.problems, "codes": codes})
        return error.exit_code
    put_json(answer | {"name": plan.name, "runs": count, "problems": [], "codes": []})
    say_remarks(loaded)
    return ExitCode.DONE


def _checked(file: Path, overrides: Sequence[str]) -> tuple[Loaded, Plan, int]:
    """Return a file that ``submit`` would accept, its plan, and its number of runs.

    Raises BadFileError with all problems.
    """
    loaded, options = load(file, overrides), LauncherOptions()
    launcher = options.load()
    plan = with_found_sizes(options.plan(launcher, loaded, None))
    if problems := submit_problems(launcher, loaded, plan):
        raise BadFileError(problems)
    search = loaded.experiment.sweep.search
    return loaded, plan, search.trials if search else len(plan.runs)


def schema() -> ExitCode:
    """Print the JSON Schema of the file."""
    from hpc_train.config.json_schema import json_schema

    put_json(json_schema())
    return ExitCode.DONE


def prepare(file: Path, overrides: Sequence[str], *, runs_forward: bool = True, as_json: bool = False) -> int:
    """Download and try the file's parts in a child process, which imports torch."""
    loaded = load(file, overrides)
    if problems := lacking_parts(loaded, make_plan(loaded)):
        raise BadFileError(problems)
    options = [*([] if runs_forward else ["--no-forward"]), *(["--json"] if as_json else [])]
    request = ("hpc_train.training.prepare", str(file), *options, *overrides)
    if not as_json:
        return run_child(*request)
    code, report = child_report(*request)
    if code == ExitCode.DONE:
        put_json({"version": JSON_VERSION} | report)
    return code
