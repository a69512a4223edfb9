"""Names of keys, values, commands and options in other tools, with the equivalent here.

``keys``, ``translations``, ``remedies`` and ``cli.corrections`` read the tables to suggest replacements for
unknown names. The tables are in ``other_tools.yaml``; each target is a key path of the schema, which a test
checks.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from hpc_train.experiment.config.problems import KeyPath, dotted

#: sbatch option → the equivalent key of the file.
SBATCH_KEYS = {
    "nodes": "slurm.nodes",
    "ntasks": "slurm.ranks_per_node",
    "ntasks-per-node": "slurm.ranks_per_node",
    "ntasks-per-gpu": "slurm.ranks_per_node",
    "gpus": "slurm.gpus_per_node",
    "gpus-per-node": "slurm.gpus_per_node",
    "gpus-per-task": "slurm.gpus_per_node",
    "gres": "slurm.gpus_per_node and slurm.gpu_type",
    "cpus-per-task": "slurm.cpus_per_gpu",
    "cpus-per-gpu": "slurm.cpus_per_gpu",
    "mem": "slurm.mem_gb",
    "mem-per-cpu": "slurm.mem_gb",
    "mem-per-gpu": "slurm.mem_gb",
    "time": "slurm.time_limit",
    "mail-user": "slurm.mail",
    "mail-type": "slurm.mail",
    "container": "environment.container",
} | {
    name: f"slurm.{name}"
    for name in ("partition", "account", "qos", "constraint", "exclude", "reservation", "dependency")
}


class OptionRow(NamedTuple):
    """Options of other tools with one equivalent; ``other_tools.yaml`` explains the fields."""

    names: str
    commands: str = ""
    written: str = ""
    note: str = ""


@cache
def tables() -> dict[str, Any]:
    """Return the content of ``other_tools.yaml``: mappings and lists of text."""
    content = Path(__file__).with_name("other_tools.yaml").read_text(encoding="utf-8")
    tables: dict[str, Any] = yaml.load(content, Loader=getattr(yaml, "CBaseLoader", yaml.BaseLoader))
    return tables


def table_of(also_called: dict[str, str]) -> dict[str, str]:
    """Return name → key, from key → names separated by blanks."""
    return {name: key for key, names in also_called.items() for name in names.split()}


@cache
def other_commands() -> dict[str, str]:
    """Return command of another tool → the command line here."""
    return table_of(tables()["commands"])


@cache
def other_options() -> list[OptionRow]:
    """Return the options of other tools. The first row that applies counts."""
    return [OptionRow(**row) for row in tables()["options"]]


@cache
def keys_by_name() -> dict[str, str]:
    """Return name → the dotted key, or two keys (``a and b``), that is equivalent in any section."""
    options_of_sbatch = {option.replace("-", "_"): key for option, key in SBATCH_KEYS.items()}
    return options_of_sbatch | table_of(tables()["keys"])


@cache
def keys_within(section: str) -> dict[str, str]:
    """Return name → the key, relative to the dotted ``section``, that is equivalent there."""
    names = table_of(tables()["keys_within"].get(section, {}))
    names |= {name: f"args.{name}" for name in tables()["arguments"].get(section, "").split()}
    extra = tables()["sbatch_options"].split() if section == "slurm" else []
    return names | {name: f"extra.{name.replace('_', '-')}" for name in extra}


@cache
def advice_by_name(section: str | None = None) -> dict[str, str]:
    """Return name without an equivalent key → the advice; ``section``: names without a meaning in it."""
    rows = tables()["advice"] if section is None else tables()["advice_within"].get(section, [])
    return {name: row["advice"] for row in rows for name in row["names"].split()}


def key_for(path: KeyPath) -> str | None:
    """Return the dotted key (or two keys: ``a and b``) that is equivalent to the unknown key ``path``."""
    if beside := key_beside(path):
        return dotted((*path[:-1], *beside.split(".")))
    return None if advice_within(path) else keys_by_name().get(_plain(path[-1]))


def key_beside(path: KeyPath) -> str | None:
    """Return the key, relative to the same section, that is equivalent to the unknown key ``path``."""
    section = tuple(0 if isinstance(segment, int) else segment for segment in path[:-1])
    return keys_within(dotted(section)).get(_plain(path[-1]))


def argument_for(section: KeyPath, name: str) -> str | None:
    """Return the argument in the ``args`` of ``section`` that other tools call ``name``."""
    called, args = key_for((*section, name)) or "", f"{dotted(section)}.args."
    return called.removeprefix(args) if called.startswith(args) else None


def advice_for(path: KeyPath) -> str | None:
    """Return the advice for ``path`` if no key is equivalent."""
    return advice_within(path) or advice_by_name().get(_plain(path[-1]))


def advice_within(path: KeyPath) -> str | None:
    """Return the advice for ``path`` if it has no meaning in its section."""
    return advice_by_name(dotted(path[:-1])).get(_plain(path[-1]))


def _plain(name: object) -> str:
    return str(name)[:100].lower().replace("-", "_").replace(" ", "_")
