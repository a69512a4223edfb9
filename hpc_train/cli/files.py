"""``validate``, ``schema`` and ``prepare``: what is about a file alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hpc_train.cli.children import run_child
from hpc_train.cli.micro_batch import say_layouts, with_found_sizes
from hpc_train.cli.plan import submit_problems
from hpc_train.cli.printing import put_json, say
from hpc_train.config.loading import load
from hpc_train.errors import BadFileError, ExitCode
from hpc_train.plan.planning import make_plan


def validate(file: Path, overrides: Sequence[str]) -> ExitCode:
    """Say that the file is fine; raises BadFileError with every problem."""
    loaded = load(file, overrides)
    plan = with_found_sizes(make_plan(loaded))
    if problems := submit_problems(loaded, plan):
        raise BadFileError(problems)
    runs = "1 run" if len(plan.runs) == 1 else f"{len(plan.runs)} runs"
    say(f"{file}: fine: {runs} of {plan.name}")
    say_layouts(plan.runs)
    return ExitCode.DONE


def schema() -> ExitCode:
    """Print the JSON Schema of the file."""
    from hpc_train.config.json_schema import json_schema

    put_json(json_schema())
    return ExitCode.DONE


def prepare(file: Path, overrides: Sequence[str]) -> int:
    """Fetch what the file names; a child does, which imports torch."""
    make_plan(load(file, overrides))
    return run_child("hpc_train.engine.prepare", str(file), *overrides)
