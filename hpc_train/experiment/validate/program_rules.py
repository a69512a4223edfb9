"""Rules on ``program``: names in braces, paths, and the metrics that it writes."""

from __future__ import annotations

import re
import shlex
import string
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path, PurePosixPath
from typing import cast

from hpc_train.experiment.config import program_section
from hpc_train.experiment.config.problems import KeyPath, Problem
from hpc_train.experiment.config.program_section import PLACEHOLDERS, ProgramConfig, listed, one_word
from hpc_train.experiment.config.schema import Job, LoggingConfig, Program
from hpc_train.experiment.config.synonyms import table_of, tables
from hpc_train.experiment.validate.base import VARIABLE, rule, unexpanded
from hpc_train.experiment.validate.slurm_rules import max_nodes
from hpc_train.redaction import is_secret
from hpc_train.registry import suggestion

#: Variables of each rank, whose values a command line can't have.
_OF_RANKS = ("RANK", "LOCAL_RANK", "GROUP_RANK")
#: Commands that only a shell has.
_BUILTINS = {"cd", "source", ".", "export", "module", "set", "ulimit", "umask", "unset", "exec", "eval"}
_SHELLS = {"bash", "sh", "zsh"}
#: A home folder at the beginning of a path, also after ``--data=``.
_HOME = re.compile(r"(?:^|(?<==))~[\w.-]*(?=/|$)")
#: Programs that start the ranks of a node → options for several nodes, without which each node trains alone.
_RENDEZVOUS = {
    "--nnodes": "--nnodes={nodes}",
    "--node-rank": "--node-rank={node_rank}",
    "--master-addr": "--master-addr={master_addr}",
    "--master-port": "--master-port={master_port}",
}
_STARTERS = {
    **dict.fromkeys(("torchrun", "torch.distributed.run", "torch.distributed.launch"), _RENDEZVOUS),
    "accelerate": {
        "--num-machines": "--num_machines={nodes}",
        "--machine-rank": "--machine_rank={node_rank}",
        "--main-process-ip": "--main_process_ip={master_addr}",
        "--main-process-port": "--main_process_port={master_port}",
    },
}
#: Programs that start processes on all nodes of a job.
_OF_THE_CLUSTER = {"srun", "mpirun", "mpiexec", "sbatch"}
_COMMANDS = {"python", "python3", "torchrun", "accelerate", "bash", "sh"}


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


def _meant(field: str, text: str) -> str | None:
    """Return the remedy for another tool's name of a placeholder, or for the name of a rank's variable."""
    if field.upper() in _OF_RANKS:
        return f"take it out; the script reads its rank from the environment variable {field.upper()}"
    meant = table_of(tables()["placeholders"]).get(field.lower())
    return None if meant is None else f"write {one_word(text.replace(f'{{{field}}}', f'{{{meant}}}'))}"


@rule("program.placeholder", "program")
def names_in_braces_exist(job: Job) -> Iterator[Problem]:
    """A name in braces is one of ``PLACEHOLDERS``."""
    for path, text in _texts(_program(job)):
        try:
            parts = string.Formatter().parse(VARIABLE.sub("", text))
            fields = [field for _, field, _, _ in parts if field is not None]
        except ValueError as error:
            yield Problem(path, f"{text!r}: {error}", "write {{ and }} for braces that belong to the text")
            continue
        unknown = [field for field in fields if field not in PLACEHOLDERS]
        doubled = re.sub(r"([{}])", r"\1\1", text)
        for field in unknown[:1]:
            default = "write {{ and }} for braces that belong to the text"
            if unknown == fields and not field.isidentifier():
                default = f"write {one_word(doubled)}"
            remedy = _meant(field, text) or suggestion(field, PLACEHOLDERS, default)
            yield Problem(path, f"there is no {{{field}}}", remedy)


@rule("program.shared-job", "program", "slurm.runs_per_job")
def runs_share_a_job_by_ranks(job: Job) -> Iterator[Problem]:
    """Commands that start ranks themselves choose ports and cores without regard to the job's other runs."""
    per = _program(job).per
    if job.slurm is not None and job.slurm.runs_per_job > 1 and per != "rank":
        message = f"{per} starts its ranks itself, which runs that share a job can't (slurm.runs_per_job)"
        yield Problem(("program", "per"), message, "write rank, or take slurm.runs_per_job out")


@rule("program.verify", "program", "recovery.verify_every_steps")
def programs_are_not_verified(job: Job) -> Iterator[Problem]:
    """Only steps of hpc-train's own training loop can be repeated."""
    if job.recovery.verify_every_steps is not None:
        message = "repeats steps of hpc-train's training, and a program trains by itself"
        yield Problem(("recovery", "verify_every_steps"), message, "take it out")


@rule("program.shell", "program")
def words_need_no_shell(job: Job) -> Iterator[Problem]:
    """No word of the command is syntax of a shell, unless it is a shell's own."""
    command = _program(job).command
    if PurePosixPath(command[0]).name in _SHELLS:
        return
    for index, word in enumerate(command):
        is_builtin = index == 0 and word in _BUILTINS
        if (syntax := word if is_builtin else program_section.shell_syntax(word)) is not None:
            line = " ".join(
                part if program_section.shell_syntax(part) else shlex.quote(part) for part in command
            )
            message = f"{syntax} is for a shell, and none reads the command"
            yield Problem(("program", "command", index), message, f"write command: {listed(line)}")
            return


def _options(command: Sequence[str]) -> Iterator[tuple[KeyPath, str]]:
    """Yield the places of values, as in ``--name=value``, ``name=value`` and ``--name value``, and names."""
    for index, (word, after) in enumerate(pairwise([*command, "-"])):
        name, equals, _ = word.partition("=")
        if equals:
            yield ("program", "command", index), name
        elif word.startswith("--") and not after.startswith("-"):
            yield ("program", "command", index + 1), name


@rule("program.secret", "program")
def secrets_are_in_the_environment(job: Job) -> Iterator[Problem]:
    """No text has a key, a token or a password: each run folder has a copy of the file."""
    program = _program(job)
    named = dict(_options(program.command))
    for path, text in _texts(program):
        is_env = path[1] == "env"
        name = named.get(path, "") if path[1] == "command" else str(path[2])
        value = text.partition("=")[2] if text.startswith(f"{name}=") else text
        if is_secret(name, value, least=8 if is_env else 16):
            variable = name if is_env else "a variable that the script reads"
            message = "is a secret, and each run folder has a copy of this file"
            yield Problem(path, message, f"take it out, and export {variable} before `hpc-train submit`")


@rule("program.expanded", "program")
def values_need_no_shell(job: Job) -> Iterator[Problem]:
    """No text that the program receives begins a path with ``~`` or names a variable: no shell expands it.

    ``program.shell`` has a remedy for variables in the words of the command.
    """
    command = _program(job).command
    for path, text in _texts(_program(job)):
        is_command = path[:2] == ("program", "command")
        if is_command and PurePosixPath(command[0]).name in _SHELLS:
            continue
        if match := _HOME.search(text):
            whole = _HOME.sub(_home, text)
            remedy = f"write {one_word(whole)}" if whole != text else "write the path in full"
            yield Problem(path, f"{match[0]} is for a shell, and none reads it", remedy)
        elif not is_command and (problem := unexpanded(path, text)):
            yield problem


@rule("program.starter", "program", "slurm.nodes")
def starters_of_ranks_start_once_per_node(job: Job) -> Iterator[Problem]:
    """A command that starts ranks itself is started once per node, and knows the nodes."""
    program, path = _program(job), ("program", "command", 0)
    name = PurePosixPath(program.command[0]).name
    if name in _OF_THE_CLUSTER:
        if program.per == "rank":
            message = f"{name} would start its processes once per rank: hpc-train starts the ranks itself"
            rest = list(_without_options(program.command[1:]))
            remedy = f"write command: {listed(shlex.join(rest))}" if rest else "write program.per: job"
            yield Problem(path, message, remedy)
        return
    starter = next((word for word in program.command[:3] if PurePosixPath(word).name in _STARTERS), None)
    if starter is None:
        return
    options = {word.partition("=")[0].replace("_", "-") for word in program.command}
    if program.per == "rank":
        message = f"{starter} starts the ranks of a node itself, and per: rank starts it once per rank"
        yield Problem(path, message, "write program.per: node")
    elif program.per == "node" and job.slurm is not None and max_nodes(job.slurm) > 1:
        needed = _STARTERS[PurePosixPath(starter).name]
        if "--standalone" in options or not any(option in options for option in needed):
            index = program.command.index("launch" if "launch" in program.command else starter)
            command = [word for word in program.command if word != "--standalone"]
            line = listed(shlex.join([*command[: index + 1], *needed.values(), *command[index + 1 :]]))
            message = f"without --nnodes the ranks of {job.slurm.nodes} nodes train separately"
            yield Problem(path, message.replace("--nnodes", next(iter(needed))), f"write command: {line}")


def _home(match: re.Match[str]) -> str:
    """Return the home folder for ``~`` or ``~user``; the text itself for an unknown user."""
    try:
        return str(Path(match[0]).expanduser())
    except RuntimeError:
        return match[0]


def _without_options(arguments: Sequence[str]) -> Iterator[str]:
    start = next(
        (n for n, word in enumerate(arguments) if word in _COMMANDS or word.endswith((".py", ".sh"))), None
    )
    yield from arguments[start:] if start is not None else ()


@rule("program.argument", "program")
def arguments_can_be_rendered(job: Job) -> Iterator[Problem]:
    """A value is plain or a list; only the style of Hydra has lists within lists."""
    program = _program(job)
    for name, value in program.args.items():
        path: KeyPath = ("program", "args", name)
        if isinstance(value, dict):
            inner = next(iter(value), "key")
            remedy = f"write the key {name}.{inner}: value"
            yield Problem(path, "is a mapping, which no command line has", remedy)
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
        message = "needs the groups (?P<step>…) and at least one metric"
        yield Problem((*path, "regex"), message, f"write one like {example}")


@rule("program.auto-interval", "program", "checkpoint.every")
def intervals_are_numbers(job: Job) -> Iterator[Problem]:
    """``checkpoint.every: auto`` measures the saves of hpc-train's own training."""
    if job.checkpoint.every is not None:
        message = "auto needs measured saves, and those of a program are not measured"
        yield Problem(("checkpoint", "every"), message, "write every_min: 10, or every_steps")


@rule("program.ignored-key", "program", "logging.every_steps", "checkpoint")
def keys_have_an_effect(job: Job) -> Iterator[Problem]:
    """No key is given that has no effect on a program."""
    if job.logging.every_steps != LoggingConfig().every_steps:
        message = "has no effect on a program, which decides itself when it logs"
        yield Problem(("logging", "every_steps"), message, "take it out")
    if job.checkpoint.keep_every is not None:
        message = "has no effect on a program, whose checkpoints can't be replayed"
        yield Problem(("checkpoint", "keep_every"), message, "take it out, or raise checkpoint.keep")
    digests = {"digests": job.checkpoint.digests or "off", "parts_every": job.checkpoint.parts_every or "off"}
    for key, value in digests.items():
        if value != "off":
            message = "has no effect on a program, whose steps can't be replayed"
            yield Problem(("checkpoint", key), message, "take it out")


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
