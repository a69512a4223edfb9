"""The section ``program``: a training script of the user's own, in place of our trainer."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from hpc_train.experiment.config.fields import PositiveFloat, Section, pattern
from hpc_train.experiment.config.scalars import resolve_scalar
from hpc_train.redaction import without_credentials

#: Names that ``{…}`` may have in ``command``, ``args`` and ``env`` → their meaning.
PLACEHOLDERS = {
    "run": "the run's folder",
    "name": "the experiment's name",
    "seed": "the file's seed",
    "attempt": "the number of the attempt, from 1",
    "nodes": "the number of nodes",
    "node_rank": "the node's number, from 0",
    "ranks": "the number of all ranks",
    "ranks_per_node": "the ranks of this node",
    "master_addr": "the host of rank 0",
    "master_port": "a free port there",
}

#: Text that YAML would not read as text in a list.
_NEEDS_QUOTES = re.compile(
    r"[^A-Za-z0-9_./=+-]|^[^A-Za-z_./-]|^-$|^-[^-A-Za-z]|^(true|false|null|yes|no|on|off|y|n)$", re.I
)
#: Words that are operators of the shell, and variables.
_SHELL_SYNTAX = re.compile(
    r"^(\||\|\||&|&&|;|<|\d?>&\d|&>>?)$|^\d?>>?(?=[\w./~-]*$)|`[^`]+`|\$(\w+|\{\w+\}|\()"
)
_SHELL_LINE = re.compile(
    r"^\w+=\S*\s|(^|\s)([|&;<>]|\d?>)|;(\s|$)|[$`*]|^(cd|source|\.|export|module|set|ulimit|umask|unset)\s"
)
_IS_NUMBER = re.compile(r"-[\d.][\d.e+-]*")
#: In a command, braces are those of our own names.
_BRACED_VARIABLE = re.compile(r"\$\{(\w+)\}")
_Word = Annotated[str, Field(min_length=1, max_length=4096)]
_RelativePath = Annotated[
    str,
    pattern(
        r"[^/~\x00-\x1f\x7f][^\x00-\x1f\x7f]{0,1023}",
        "a path relative to the program's working folder, like out/ckpt.pt",
    ),
]
_Variable = Annotated[
    str, pattern(r"[A-Za-z_][A-Za-z0-9_]{0,127}", "the name of an environment variable, like WANDB_PROJECT")
]
_Argument = Annotated[
    str,
    pattern(r"[A-Za-z_][A-Za-z0-9_.+/@-]{0,255}", "the name of an argument, without leading dashes, like lr"),
]


def _as_words(value: object) -> object:
    if isinstance(value, str):
        raise ValueError(f"needs a list, since no shell reads it; write command: {listed(value)}")
    if isinstance(value, list) and any(isinstance(word, list) for word in value):
        flat = [part for word in value for part in (word if isinstance(word, list) else [word])]
        raise ValueError(f"needs one list of words; write command: {listed(shlex.join(map(str, flat)))}")
    if isinstance(value, dict) or value == []:
        texts = [text for text in as_items(value) if isinstance(text, str)]
        line = " && ".join(texts) or "python train.py"
        raise ValueError(f"needs a list of words; write command: {listed(line)}")
    return value


def as_items(value: object) -> list[object]:
    """Return the values of a mapping or the items of a list."""
    return list(value.values() if isinstance(value, dict) else value if isinstance(value, list) else ())


def _as_arguments(value: object) -> object:
    """Refuse options as of a command line, with the mapping to write."""
    pairs: dict[str, object] = {}
    if isinstance(value, dict):
        names = [name for name in value if isinstance(name, str)]
        if not any(name.startswith("-") and name.strip("-") for name in names):
            return value
        pairs = {str(name).lstrip("-"): item for name, item in value.items()}
        raise ValueError(f"needs names without dashes; write args: {_in_flow(pairs)}")
    if not isinstance(value, str | list):
        return value
    options = value.split() if isinstance(value, str) else [str(word) for word in value]
    name = ""
    for word in options:
        if word.startswith("-") and not _IS_NUMBER.fullmatch(word):
            name, equals, text = word.lstrip("-").partition("=")
            pairs[name] = resolve_scalar(text) if equals else True
        elif name and pairs[name] is True:
            pairs[name] = resolve_scalar(word)
        else:
            raise ValueError("needs a mapping; append the words to program.command, and take args out")
    raise ValueError(f"needs a mapping; write args: {_in_flow(pairs)}")


def _as_variables(value: object) -> object:
    """Refuse ``[A=1]``, with the mapping to write."""
    if not isinstance(value, list) or not all(isinstance(word, str) and "=" in word for word in value):
        return value
    pairs = {name: text for name, _, text in (word.partition("=") for word in value)}
    raise ValueError(f"needs a mapping; write env: {_in_flow(pairs)}")


def _as_outputs(value: object) -> object:
    paths: Any = [value] if isinstance(value, str) else value
    for path in paths if isinstance(paths, list) else ():
        if isinstance(path, str) and path.startswith(("/", "~")) and PurePosixPath(path).name.isprintable():
            texts = [text for text in paths if isinstance(text, str)]
            inner = [PurePosixPath(text).name if text[:1] in {"/", "~"} else text for text in texts]
            listed_paths = ", ".join(map(one_word, inner))
            raise ValueError(
                f"{path} is not below the folder in which the program starts, where each run has its own "
                f"files; write outputs: [{listed_paths}]"
            )
    return paths


def _as_resume(value: object) -> object:
    if not isinstance(value, str) or not value or value.startswith(("/", "~")):
        return value
    raise ValueError(f"needs a mapping; write resume: {{if_exists: {json.dumps(value)}, args: [--resume]}}")


def _as_metrics(value: object) -> object:
    if not isinstance(value, str | list) or not value:
        return value
    file = value if isinstance(value, str) and value.endswith((".jsonl", ".json")) else "out/metrics.jsonl"
    if isinstance(value, str) and "(?P<" in value:
        raise ValueError(f"needs a mapping; write metrics: {{regex: {json.dumps(value)}}}")
    raise ValueError(f"needs a mapping; write metrics: {{jsonl: {json.dumps(file)}}}")


def _in_flow(pairs: Mapping[str, object]) -> str:
    """Return a mapping of YAML on one line; text that YAML would read otherwise is quoted."""
    items = (f"{name}: {json.dumps(item, default=str)}" for name, item in pairs.items())
    return without_credentials(f"{{{', '.join(items)}}}")


def shell_syntax(word: str) -> str | None:
    """Return the part of a word that only a shell understands, an operator or a variable; else None."""
    match = _SHELL_SYNTAX.search(word)
    return match[0] if match else None


def as_section(value: object) -> object:
    """Refuse a command in place of the section, with the section to write."""
    if not isinstance(value, str | list):
        return value
    command = listed(value if isinstance(value, str) else shlex.join(map(str, value)))
    raise ValueError(f"needs a section; write program: {{command: {command}}}")


def one_word(text: str) -> str:
    """Return text as a value of YAML, in quotes if it needs them."""
    return json.dumps(text) if _NEEDS_QUOTES.search(text) else text


def listed(text: str) -> str:
    """Return a command line as a list of YAML; one with syntax of the shell as a command of bash."""
    lines = text.replace("\\\n", " ").strip().splitlines()
    text = " && ".join(line.strip() for line in lines if line.strip())
    if _SHELL_LINE.search(text):
        line = _BRACED_VARIABLE.sub(r"$\1", text)
        return f"[bash, -c, {json.dumps(line)}]"
    try:
        words = shlex.split(text)
    except ValueError:  # a quote that is not closed
        words = text.split()
    if words[:1] and words[0].endswith((".py", ".sh")) and "/" not in words[0]:
        words = ["python" if words[0].endswith(".py") else "bash", *words]
    return f"[{', '.join(map(one_word, words))}]"


class ProgramConfig(Section):
    """A training script of your own, which takes the place of ``task``, ``model``, ``data`` and
    ``optimization``.
    """

    command: Annotated[
        list[_Word],
        BeforeValidator(_as_words),
        Field(min_length=1, max_length=1000, examples=[["python", "train.py"]]),
    ]
    """The program and its first arguments, as a list; no shell reads it. ``python`` is the interpreter of the
    run. ``{run}``, ``{seed}`` and other names in braces are replaced (see the how-to); ``{{`` is a brace."""
    per: Literal["rank", "node", "job"] = "rank"
    """How often the command is started: once per ``rank``, with torchrun's variables; once per ``node``, for
    scripts that start their own ranks, as torchrun does; or once per ``job``, on the first node."""
    args: Annotated[dict[_Argument, Any], BeforeValidator(_as_arguments)] = {}
    """Further arguments by name, rendered in the order of the file by ``style``. ``true``: the name alone (in
    the style ``key=value`` the word true); ``false`` and null: not given (there: false and null); a list: its
    items after the name (there: ``[a,b]``). Sweeps vary ``program.args.<name>``."""
    style: Literal["--key=value", "--key value", "key=value"] = "--key=value"
    """How an argument is written: ``key=value`` is that of Hydra and OmegaConf."""
    env: Annotated[dict[_Variable, str], BeforeValidator(_as_variables)] = {}
    """Environment variables of the program. Secrets belong into the environment of ``submit``."""
    outputs: Annotated[list[_RelativePath], BeforeValidator(_as_outputs)] = []
    """Folders or files that the program writes, such as ``out``: each run has its own, kept over attempts.
    The folders of ``resume.if_exists`` and ``metrics.jsonl`` count as well. Other entries of the folder of
    ``submit`` are shared by all runs."""
    resume: Annotated[ResumeConfig | None, BeforeValidator(_as_resume)] = None
    """Arguments for a script that continues from its own checkpoint. Default: it gets the same arguments in
    each attempt."""
    metrics: Annotated[MetricsConfig | None, BeforeValidator(_as_metrics)] = None
    """The metrics that the program writes. Default: none are read."""
    kill_after_s: PositiveFloat | None = None
    """Seconds from a stop signal until a program that has not ended is killed. Default: 60; on Slurm slightly
    less than it grants: ``GraceTime`` or ``KillWait`` after SIGTERM, the rest of the time limit after its
    warning."""
    check: Annotated[list[_Word], Field(min_length=1)] | None = None
    """A command that `hpc-train prepare` runs, such as the script with ``--help``. Default: none."""


class ResumeConfig(Section):
    """How a script that is not changed at all continues."""

    if_exists: Annotated[_RelativePath, Field(examples=["out/ckpt.pt"])]
    """The script's own checkpoint, relative to its working folder; ``*`` matches any name."""
    args: list[_Word] = []
    """Arguments that are added if it exists."""


class MetricsConfig(Section):
    """Where the rows of ``metrics.jsonl`` come from; exactly one of the two keys."""

    regex: Annotated[str, Field(min_length=1, max_length=2000)] | None = None
    """A regular expression that is searched in each line that the first rank prints. It has the group
    ``(?P<step>…)``; each other named group is a metric."""
    jsonl: _RelativePath | None = None
    """A file of JSON objects, one per line, each with ``step``, that the program appends to."""


ProgramConfig.model_rebuild()
