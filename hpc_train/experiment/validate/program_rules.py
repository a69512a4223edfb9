"""Rules on ``program``: names in braces, paths, and the metrics that it writes."""

from __future__ import annotations

import re
import shlex
import string
from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import cast

from hpc_train.experiment.config.problems import KeyPath, Problem
from hpc_train.experiment.config.program_section import PLACEHOLDERS, ProgramConfig, listed, shell_syntax
from hpc_train.experiment.config.schema import Job, LoggingConfig, Program
from hpc_train.experiment.validate.base import rule
from hpc_train.registry import suggestion


def _program(job: Job) -> ProgramConfig:
    return cast("Program", job).program


def _texts(program: ProgramConfig) -> Iterator[tuple[KeyPath, str]]:
    """Yield the texts in which names in braces are replaced, with their places."""
    for index, word in enumerate(program.command):
        yield ("program", "command", index), word
    for name, value in program.args.items():
        if isinstance(value, str):
            yield ("program", "args", name), value
    for name, value in program.env.items():
        yield ("program", "env", name), value
    for index, word in enumerate(program.resume.args if program.resume else []):
        yield ("program", "resume", "args", index), word


@rule("program.placeholder", "program")
def names_in_braces_exist(job: Job) -> Iterator[Problem]:
    """A name in braces is one of ``PLACEHOLDERS``."""
    for path, text in _texts(_program(job)):
        try:
            fields = [field for _, field, _, _ in string.Formatter().parse(text) if field is not None]
        except ValueError as error:
            yield Problem(path, f"{text!r}: {error}", "write {{ and }} for braces that belong to the text")
            continue
        for field in fields:
            if field not in PLACEHOLDERS:
                remedy = suggestion(field, PLACEHOLDERS, "write {{ and }} for braces that belong to the text")
                yield Problem(path, f"there is no {{{field}}}", remedy)


@rule("program.shared-job", "program", "slurm.runs_per_job")
def runs_share_a_job_by_ranks(job: Job) -> Iterator[Problem]:
    """Commands that start ranks themselves choose ports and cores without regard to the job's other runs."""
    per = _program(job).per
    if job.slurm is not None and job.slurm.runs_per_job > 1 and per != "rank":
        message = f"{per} starts its ranks itself, which runs that share a job can't (slurm.runs_per_job)"
        yield Problem(("program", "per"), message, "write rank, or take slurm.runs_per_job out")


@rule("program.shell", "program")
def words_need_no_shell(job: Job) -> Iterator[Problem]:
    """No word of the command is syntax of a shell, unless it is a shell's own."""
    command = _program(job).command
    if PurePosixPath(command[0]).name in {"bash", "sh", "zsh", "srun"}:
        return
    for index, word in enumerate(command):
        if (syntax := shell_syntax(word)) is not None:
            line = " ".join(part if shell_syntax(part) else shlex.quote(part) for part in command)
            message = f"{syntax} is for a shell, and none reads the command"
            yield Problem(("program", "command", index), message, f"write command: {listed(line)}")
            return


@rule("program.argument", "program")
def arguments_can_be_rendered(job: Job) -> Iterator[Problem]:
    """A value is plain or a list; only the style of Hydra has lists within lists."""
    program = _program(job)
    for name, value in program.args.items():
        path: KeyPath = ("program", "args", name)
        if isinstance(value, dict):
            inner = next(iter(value), "key")
            yield Problem(
                path, "is a mapping, which no command line has", f"write the key {name}.{inner}: value"
            )
        elif isinstance(value, list):
            deep = (dict, list) if program.style != "key=value" else (dict,)
            if any(isinstance(item, deep) for item in value):
                yield Problem(path, "has lists or mappings in a list", "write values, or text in quotes")


@rule("program.path", "program")
def paths_are_below_the_working_folder(job: Job) -> Iterator[Problem]:
    """No path leads out of the working folder."""
    program = _program(job)
    paths: list[tuple[KeyPath, str]] = [
        (("program", "outputs", index), path) for index, path in enumerate(program.outputs)
    ]
    if program.resume:
        paths.append((("program", "resume", "if_exists"), program.resume.if_exists))
    if program.metrics and program.metrics.jsonl:
        paths.append((("program", "metrics", "jsonl"), program.metrics.jsonl))
    for path, text in paths:
        if ".." in PurePosixPath(text).parts:
            yield Problem(path, f"{text} leads out of the working folder", "write a path below it, like out")
        elif not PurePosixPath(text).parts:
            yield Problem(path, f"{text} is the working folder itself", "write a path below it, like out")


@rule("program.metrics", "program")
def metrics_have_one_source(job: Job) -> Iterator[Problem]:
    """Exactly one of ``regex`` and ``jsonl``; the regular expression has a group for the step."""
    metrics = _program(job).metrics
    path: KeyPath = ("program", "metrics")
    if metrics is None:
        return
    if (metrics.regex is None) == (metrics.jsonl is None):
        yield Problem(path, "needs one of regex and jsonl", "write jsonl: out/metrics.jsonl or a regex")
    if metrics.regex is None:
        return
    try:
        groups = re.compile(metrics.regex).groupindex.keys()
    except re.error as error:
        yield Problem((*path, "regex"), f"is not a regular expression: {error}", "fix it")
        return
    if "step" not in groups or len(groups) < 2:
        example = r"'step (?P<step>\d+).*loss (?P<loss>[-+.\deE]+|nan|inf)'"
        yield Problem(
            (*path, "regex"),
            "needs the groups (?P<step>…) and at least one metric",
            f"write one like {example}",
        )


@rule("program.auto-interval", "program", "checkpoint.every")
def intervals_are_numbers(job: Job) -> Iterator[Problem]:
    """``checkpoint.every: auto`` measures the saves of hpc-train's own training."""
    if job.checkpoint.every is not None:
        message = "auto needs measured saves, and those of a program are not measured"
        yield Problem(("checkpoint", "every"), message, "write every_min: 10, or every_steps")


@rule("program.ignored-key", "program", "logging.every_steps")
def keys_have_an_effect(job: Job) -> Iterator[Problem]:
    """No key is given that has no effect on a program."""
    if job.logging.every_steps != LoggingConfig().every_steps:
        message = "has no effect on a program, which decides itself when it logs"
        yield Problem(("logging", "every_steps"), message, "take it out")


@rule("program.unread-metric", "program.metrics", "checkpoint.best", "early_stopping")
def decisions_are_on_metrics_of_the_session(job: Job) -> Iterator[Problem]:
    """``checkpoint.best`` and ``early_stopping`` need a script that calls ``session.metric``."""
    if _program(job).metrics is None:
        return
    sections = {("checkpoint", "best"): job.checkpoint.best, ("early_stopping",): job.early_stopping}
    for path, section in sections.items():
        if section is not None:
            message = "reads session.metric, not program.metrics: all ranks of the script must stop and save"
            call = f"session.metric(step, {section.metric}=…)"
            yield Problem(path, message, f"call {call} in the script and take program.metrics out")
