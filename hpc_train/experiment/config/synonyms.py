"""Names of keys, values, commands and options in other tools, with the equivalent here.

``keys``, ``explanations``, ``remedies`` and ``cli.corrections`` read the tables to suggest replacements for
unknown names. The tables are in ``other_tools.yaml``; each target is a key path of the schema, which a test
checks.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from hpc_train.experiment.config.fields import OWN_PART_PATTERN
from hpc_train.experiment.config.problems import KeyPath, dotted
from hpc_train.experiment.config.scalars import gigabytes
from hpc_train.registry import nearest, parts

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
    if key_beside(path):
        return advice_within(path)
    return advice_within(path) or advice_by_name().get(_plain(path[-1]))


def advice_within(path: KeyPath) -> str | None:
    """Return the advice for ``path`` if it has no meaning in its section."""
    return advice_by_name(dotted(path[:-1])).get(_plain(path[-1]))


def _plain(name: object) -> str:
    return str(name)[:100].lower().replace("-", "_").replace(" ", "_")


#: Packages whose classes people name in full.
_LIBRARIES = ("torch", "nn", "optim", "timm", "transformers", "keras", "tf", "lr_scheduler", "bitsandbytes")
#: sbatch's forms of a time in minutes: ``90``, ``90:00``.
_MINUTES = re.compile(r"\d+:\d\d")
_HUB = re.compile(r"^(timm/)?(hf[-_]hub:|hf:|https?://huggingface\.co/(datasets/)?)")


def _squeezed(name: str) -> str:
    return re.sub(r"[\s_./-]", "", name[:100].lower())


@cache
def values_by_name(key: str) -> dict[str, str]:
    """Return name in other tools, squeezed → the value of the dotted key."""
    names = table_of(tables()["values"].get(key, {}))
    return {_squeezed(name): value for name, value in names.items()}


def value_for(path: KeyPath, value: object) -> str | None:
    """Return the value of the key ``path`` that other tools call ``value``."""
    if isinstance(value, bool | dict | list) or value is None:
        return None
    if naming := _NAMES.get(path):
        return naming(str(value))
    text = str(value).partition(":")[0] if path == ("device",) else without_module(str(value))
    choices = values_by_name(dotted(path))
    plain = _squeezed(text)
    if meant := next((choice for choice in choices.values() if _squeezed(choice) == plain), None):
        return meant
    is_class = text != str(value) or path[-1] == "strategy"
    return choices.get(plain, text.lower() if is_class and text.lower() != value else None)


def overrides_of(path: KeyPath, value: str) -> Iterator[str]:
    """Yield ``KEY=VALUE`` with the value as it is written here; Slurm's GPUs may be of a type."""
    key = dotted(path)
    if key == "slurm.gpus_per_node":
        *kind, number = value.removeprefix("gpu:").split(":")
        yield f"{key}={number if number.isdigit() or not value.startswith('gpu') else 1}"
        yield from (f"slurm.gpu_type={word}" for word in kind if word != "gpu")
    elif key == "slurm.mem_gb" and (amount := gigabytes(value)):
        yield f"{key}={math.ceil(amount)}"
    elif key == "slurm.time_limit" and (value.isdigit() or _MINUTES.fullmatch(value)):
        yield f"{key}={int(value.partition(':')[0])}min"
    else:
        yield f"{key}={value_for(path, value) or value}"


#: Words in the names of metrics of which a lower value is better, and of those of which a higher one is.
_FALLING = {"loss", "perplexity", "mae", "mse", "rmse", "error"}
_RISING = {"accuracy", "f1", "iou", "miou", "map", "map50", "precision", "r2", "recall"}
_GPUS = re.compile(r"gpu(?::([A-Za-z_][\w.-]*))?:(\d{1,3})|([A-Za-z_][\w.-]*):(\d{1,3})", re.ASCII)


def slurm_request(name: str, value: object, section: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the keys of ``slurm`` for ``gres: gpu:a100:4``, ``gpu: a100`` or ``mem: 16G``; else None.

    ``section``: the file's, whose GPUs and cores multiply memory per GPU and per core.
    """
    name, text = _plain(name), str(value)[:100]
    if name in ("gres", "gpus", "gpus_per_node") and (match := _GPUS.fullmatch(text)):
        kind = match[1] or match[3]
        return {"gpus_per_node": int(match[2] or match[4])} | ({"gpu_type": kind} if kind else {})
    is_type = isinstance(value, str) and re.fullmatch(r"[A-Za-z][\w.-]{1,30}", value)
    if name in ("gpu", "gpus") and is_type and value not in ("auto", "all", "none"):
        return {"gpus_per_node": 1, "gpu_type": value}
    factors = {"mem": [], "mem_per_gpu": ["gpus_per_node"], "mem_per_cpu": ["gpus_per_node", "cpus_per_gpu"]}
    is_short = text.isdecimal() and len(text) < 4  # GB is meant, although Slurm reads MB
    amount = gigabytes(f"{text}G" if is_short else text) if name in factors else None
    if amount is None:
        return None
    numbers = [number for key in factors[name] if type(number := section.get(key, 1)) is int]
    return {"mem_gb": math.ceil(amount * math.prod(numbers))}


def usual_mode(metric: str) -> str | None:
    """Return the mode for which a better value of the metric is better, by the words of its name."""
    terms = set(re.split(r"[^a-z0-9]+", metric))
    if terms & _FALLING:
        return "min"
    return "max" if terms & _RISING else None


def python_of(environment: str) -> str | None:
    """Return the Python of an environment's folder, or how to find that of a conda environment."""
    if "/python" in environment or not environment or environment.lower() in ("true", "false", "none"):
        return None
    if "/" in environment:
        return f"{environment.rstrip('/')}/bin/python"
    path = f"~/miniconda3/envs/{environment}/bin/python"
    return f"{path}, or the path that `conda run -n {environment} which python` prints"


def swept_leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the lists and distributions in nested mappings, by dotted key."""
    for key, value in values.items():
        if not isinstance(value, dict):
            yield f"{prefix}{key}", value
        elif (distribution := distribution_of(value)) is not None:
            yield f"{prefix}{key}", distribution
        else:
            yield from swept_leaves(value, f"{prefix}{key}.")


def distribution_of(value: Mapping[str, Any]) -> Any:
    """Return the values, or the distribution here, of a parameter of wandb's sweeps; else None."""
    if isinstance(values := value.get("values", value.get("choices")), list):
        return values
    bounds = [value.get("min"), value.get("max")]
    if all(isinstance(bound, int | float) for bound in bounds):
        is_log = str(value.get("distribution", "")).startswith("log")
        return {"log_uniform" if is_log else "uniform": bounds}
    return dict(value) if value.keys() & {"choice", "uniform", "log_uniform", "int", "log_int"} else None


def without_module(text: str) -> str:
    """Return ``SGD`` for ``torch.optim.SGD`` and ``SGD()``; other text unchanged."""
    text = text.removesuffix("()")
    module, dot, name = text.rpartition(".")
    return name if dot and module.partition(".")[0] in _LIBRARIES and name.isidentifier() else text


def as_factory(name: str) -> str | None:
    """Return ``nets.a:build`` for ``nets/a.py:build``, ``nets.a::build`` or ``nets.a:build()``; else None."""
    path, _, attr = name.removesuffix("()").partition(":")
    module = re.sub(r"^(\.*/)+", "", path).removesuffix(".py").replace("/", ".").replace("-", "_")
    factory = f"{module}:{attr.removeprefix(':')}"
    return factory if re.fullmatch(OWN_PART_PATTERN, factory) and factory != name else None


def model_name(text: str) -> str | None:
    """Return the name of a model as the file has it, for one of another tool; None if it is the same."""
    if as_factory(text) or text.endswith(".py"):
        return None
    hub = _HUB.sub("", text)
    head, separator, name = _split(hub)
    if provider := table_of(tables()["providers"]).get(head):
        name = f"{provider}/{name}"
    elif not separator or separator == ".":
        name = head if head in parts("models") else nearest(head, ["gpt"]) or f"timm/{hub.lower()}"
    else:
        close = nearest(head, parts("models"))
        name = f"{close}/{name}" if close and hub == text else f"hf/{hub}"
    return None if name == text else name


def data_name(text: str) -> str | None:
    """Return the name of a data set as the file has it, for one of another tool; None if it is the same."""
    if as_factory(text) or text.endswith(".py"):
        return None
    hub = _HUB.sub("", text)
    head, separator, name = _split(hub)
    plain = _squeezed(name if separator == "." or head == "torchvision" else hub)
    if spelling := table_of(tables()["data_sets"]).get(plain):
        name = spelling
    elif head == "torchvision":
        name = f"torchvision/{name}"
    elif "/" in hub:
        close = nearest(head, parts("datasets"))
        name = f"{close}/{name}" if close and hub == text else f"huggingface/{hub}"
    else:
        return nearest(hub.lower(), parts("datasets"))
    return None if name == text else name


def _split(text: str) -> tuple[str, str, str]:
    """Return provider, separator and name of ``timm.models.resnet18``, ``timm:resnet18`` or ``timm/x``."""
    separator = re.search(r"[.:/]", text)
    if separator is None:
        return text, "", text
    head, rest = text[: separator.start()], text[separator.end() :]
    return head, separator[0], re.sub(r"^(models|datasets)[./:]", "", rest)


_NAMES: dict[KeyPath, Callable[[str], str | None]] = {
    ("model", "name"): model_name,
    ("data", "name"): data_name,
}
