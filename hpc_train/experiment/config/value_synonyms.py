"""Names of values in other tools, and of the models and data sets of their hubs → the value here.

``remedies``, ``translations`` and the rules on names of parts read it to suggest replacements.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from functools import cache

from hpc_train.experiment.config.problems import KeyPath, dotted
from hpc_train.experiment.config.synonyms import table_of, tables
from hpc_train.registry import as_factory, nearest, parts

#: Packages whose classes people name in full.
_LIBRARIES = ("torch", "nn", "optim", "timm", "transformers", "keras", "tf", "lr_scheduler", "bitsandbytes")
#: sbatch's forms of a time in minutes: ``90``, ``90:00``.
_MINUTES = re.compile(r"\d+:\d\d")
_MEMORY = re.compile(r"(\d+(?:\.\d+)?)([KMGT]?)(?:i?B)?", re.IGNORECASE)
#: sbatch's units of memory, in GB.
_GB = {"K": 2**-20, "M": 2**-10, "": 2**-10, "G": 1, "T": 2**10}
_HUB = re.compile(r"^(hf[-_]hub:|hf:|https?://huggingface\.co/(datasets/)?)")


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
    elif key == "slurm.mem_gb" and (match := _MEMORY.fullmatch(value)):
        yield f"{key}={math.ceil(float(match[1]) * _GB[match[2].upper()])}"
    elif key == "slurm.time_limit" and (value.isdigit() or _MINUTES.fullmatch(value)):
        yield f"{key}={int(value.partition(':')[0])}min"
    else:
        yield f"{key}={value_for(path, value) or value}"


def without_module(text: str) -> str:
    """Return ``SGD`` for ``torch.optim.SGD``; other text unchanged."""
    module, dot, name = text.rpartition(".")
    return name if dot and module.partition(".")[0] in _LIBRARIES and name.isidentifier() else text


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
