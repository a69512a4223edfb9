"""The text of a new experiment file, for ``init``. Comments are the schema's descriptions."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpc_train.config.keys import JOB, description_of
from hpc_train.config.marked_yaml import read_value
from hpc_train.config.problems import KeyPath, is_clean, shown
from hpc_train.config.training_sections import DataConfig
from hpc_train.console import one_line
from hpc_train.data_facts.by_name import data_facts
from hpc_train.data_facts.task_starts import IMAGE_SIZE, STARTS, Start
from hpc_train.errors import UsageError
from hpc_train.launchers.base import JobSection
from hpc_train.registry import suggestion

#: Marks values that only the user knows.
CHANGE = "CHANGE"
_COLUMN = 44
#: Shorter descriptions repeat the key, longer ones obscure the file.
_COMMENT_LENGTHS = (20, 90)
_PLAIN = re.compile(r"[A-Za-z0-9_./~][A-Za-z0-9_./:~+-]*")


@dataclass(frozen=True, kw_only=True)
class FirstFile:
    """The user's choices; None: not given."""

    name: str
    task: str
    data: str | None = None
    root: str | None = None
    model: str | None = None
    #: The cluster's section; None: a file for this machine.
    job: JobSection | None = None
    #: The device of this machine.
    gpus: int = 0

    @property
    def ranks(self) -> int:
        """The ranks of a run of the file; on this machine one per GPU, at least 1."""
        return max(1, self.gpus) if self.job is None else self.job.ranks

    @property
    def has_gpus(self) -> bool:
        """Whether the ranks have GPUs: then the file gets bf16 and ``workers: auto``."""
        return self.gpus > 0 if self.job is None else self.job.has_gpus


def first_file(chosen: FirstFile, output: Path) -> str:
    """Return the file's text. Raises UsageError for a task without a template."""
    start = _start(chosen.task)
    data = chosen.data or start.data_for(chosen.root)
    content = {
        "name": chosen.name,
        "seed": 0,
        "task": start.task,
        "model": _model(start, chosen.model or start.model_for(data)),
        "data": _data(start, data, chosen),
        "optimization": _optimization(start, data, chosen),
    }
    if chosen.has_gpus:
        content["precision"] = "bf16"
    metric, mode = start.metric
    content["evaluation"] = {"every_epochs": 1}
    content["checkpoint"] = {"every_min": 10, "best": {"metric": metric, "mode": mode}}
    changes = _changes(start, data, chosen)
    lines = [*_header(output, chosen), *_rendered(content, changes)]
    text = "\n".join(lines) + "\n"
    return text if chosen.job is None else with_job_section(text, chosen.job)


def with_job_section(text: str, job: JobSection) -> str:
    """Return the text with the cluster's section at its end, unless it has one."""
    if re.search(rf"^{JOB}:", text, flags=re.MULTILINE):
        return text
    notes = [f"# {one_line(note)}" for note in job.notes]
    heading = ["", "# This cluster has:", *notes] if notes else [""]
    return text + "\n".join([*heading, *_rendered({JOB: job.values}, {})]) + "\n"


def quoted(value: object) -> str:
    """Return a value as YAML on one line. Raises UsageError for text with control characters."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {quoted(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(quoted, value)) + "]"
    if not isinstance(value, str):
        return json.dumps(value)
    if not is_clean(value):
        raise UsageError(f"{shown(value)}: has a control character or line break; write it without")
    # YAML would read it as a number, or as true.
    is_plain = _PLAIN.fullmatch(value) and not value.endswith(":") and read_value(value)[0] == value
    return value if is_plain else json.dumps(value, ensure_ascii=False)


def _start(task: str) -> Start:
    for start in STARTS:
        if start.task == task:
            return start
    names = [start.task for start in STARTS]
    remedy = suggestion(task, names, f"write one of {', '.join(names)}, and change the file")
    raise UsageError(f"--task: init has no file for {shown(task)}; {remedy}")


def _model(start: Start, name: str) -> dict[str, Any]:
    model: dict[str, Any] = {"name": name}
    if name == start.model and start.model_args:
        model["args"] = dict(start.model_args)
    return model


def _data(start: Start, name: str, chosen: FirstFile) -> dict[str, Any]:
    data: dict[str, Any] = {"name": name}
    if start.needs_root(name) or chosen.root is not None:
        data["root"] = chosen.root or start.root
    if name == start.own_data:
        data |= start.own_keys
    elif data_facts(name).modality == "images" and _has_no_size(name):
        data["image_size"] = IMAGE_SIZE
    if chosen.has_gpus:
        data["workers"] = "auto"
    return data


def _has_no_size(name: str) -> bool:
    facts = data_facts(name)
    return facts.image_size_argument is None and facts.image_size(DataConfig(name=name)) is None


def _optimization(start: Start, data: str, chosen: FirstFile) -> dict[str, Any]:
    batch, micro = _sizes(start, _num_samples(start, data, chosen), chosen.ranks)
    sizes = {"epochs": 10, "global_batch_size": batch, "micro_batch_size": micro}
    return sizes | dict(start.optimization) | {"schedule": {"name": "cosine", "warmup_epochs": 0.5}}


def _num_samples(start: Start, name: str, chosen: FirstFile) -> int | None:
    """Return N if it can be counted without the data set's own code."""
    args = start.own_keys.get("args", {}) if name == start.own_data else {}
    try:
        number = data_facts(name).num_samples(DataConfig(name=name, root=chosen.root, args=args))
    except Exception:  # `validate` explains data that can't be read
        return None
    return number if isinstance(number, int) else None


def _sizes(start: Start, samples: int | None, ranks: int) -> tuple[int, int]:
    """Return global and micro-batch size: one micro-batch per rank, and a step no larger than the data."""
    batch, micro = start.global_batch_size, start.micro_batch_size
    while True:
        size = max(batch, micro * ranks)
        if samples is None or size <= samples or micro == 1:
            return size, micro
        micro //= 2
        batch = min(batch, samples // micro * micro)


def _changes(start: Start, data: str, chosen: FirstFile) -> dict[KeyPath, str]:
    """Return the remark on values that only the user knows."""
    changes: dict[KeyPath, str] = {}
    if chosen.root is None and start.needs_root(data):
        changes["data", "root"] = f"{CHANGE}: {data_facts(data).root}"
    if data == start.own_data:
        table = "docs/reference_parts.md, data.name"
        changes |= {("data", key): f"{CHANGE}: as in your data ({table})" for key in start.to_change}
    return changes


def _header(output: Path, chosen: FirstFile) -> list[str]:
    shown_name, where = one_line(str(output)), "" if chosen.job is not None else " --local"
    return [
        f"# An experiment, written by `hpc-train init` for {'a cluster' if chosen.job else 'this machine'}.",
        f"# Lines with {CHANGE} have values that only you know; the others are a start. All keys:",
        "# docs/reference_file.md. Check and start it:",
        "#",
        f"#   hpc-train validate {shown_name}",
        f"#   hpc-train plan {shown_name}{where}",
        f"#   hpc-train submit {shown_name}{where}",
    ]


def _rendered(content: Mapping[str, Any], changes: Mapping[KeyPath, str]) -> Iterator[str]:
    """Yield the lines of a mapping of sections: two levels as blocks, deeper ones on one line."""
    for key, value in content.items():
        if not isinstance(value, Mapping):
            yield _line((key,), f"{key}: {quoted(value)}", changes)
            continue
        yield _line((key,), f"{key}:", changes)
        for below, item in value.items():
            yield _line((key, below), f"  {below}: {quoted(item)}", changes)


def _line(path: KeyPath, text: str, changes: Mapping[KeyPath, str]) -> str:
    comment = changes.get(path) or _described(path)
    return f"{text:<{_COLUMN}} # {comment}" if comment else text


def _described(path: KeyPath) -> str:
    """Return the first sentence of the key's description; none if that is too short or too long."""
    sentence = re.split(r"(?<=\.)\s|\s*Default:", " ".join(description_of(path).split()))[0]
    sentence = sentence.replace("``", "").rstrip(".")
    return sentence if _COMMENT_LENGTHS[0] <= len(sentence) <= _COMMENT_LENGTHS[1] else ""
