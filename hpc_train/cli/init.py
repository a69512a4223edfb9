"""``init``: writes an experiment file that fits this machine or cluster, with the keys explained.

Comments are the schema's descriptions.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

from hpc_train.cli.command_options import InitOptions
from hpc_train.console import JSON_VERSION, columns, one_line, put, put_json, say
from hpc_train.errors import ExitCode, NoSchedulerError, UsageError
from hpc_train.experiment.config.keys import JOB, description_of
from hpc_train.experiment.config.marked_yaml import read_value
from hpc_train.experiment.config.problems import KeyPath, is_clean, shown
from hpc_train.experiment.config.training_sections import DataConfig
from hpc_train.experiment.data_facts.by_name import data_facts
from hpc_train.experiment.data_facts.task_starts import IMAGE_SIZE, STARTS, Start
from hpc_train.launchers.base import ClusterLauncher, JobSection
from hpc_train.launchers.gpus import count_gpus
from hpc_train.launchers.lookup import DEFAULT, load_launcher
from hpc_train.registry import suggestion

#: The repository's recipes: package data, in a checkout a link.
EXAMPLES = Path(__file__).with_name("examples")
_LIST = "list"
_NOT_IN_NAMES = re.compile(r"[^a-z0-9._-]+")
#: The name of the recipes' own modules in the repository.
_OWN_MODULE = re.compile(r"\bexamples\.(\w+):")
#: Marks values that only the user knows.
CHANGE = "CHANGE"
_COLUMN = 44
#: Shorter descriptions repeat the key, longer ones obscure the file.
_COMMENT_LENGTHS = (20, 90)
_PLAIN = re.compile(r"[A-Za-z0-9_./~][A-Za-z0-9_./:~+-]*")


class FirstFileJson(TypedDict):
    """The experiment file that was written."""

    version: int
    file: str
    #: All files that were written: of a recipe its modules, too.
    files: list[str]
    #: Whether it is for this cluster rather than for this machine.
    for_cluster: bool
    #: Numbers of the lines that have to be changed.
    lines_to_change: list[int]


class RecipeJson(TypedDict):
    """An experiment file to start from."""

    name: str
    title: str


class Recipes(TypedDict):
    """What ``--from`` takes."""

    version: int
    recipes: list[RecipeJson]


def init(options: InitOptions) -> ExitCode:
    """Write the file and print the next steps. Raises UsageError if it exists."""
    output = options.output
    if options.example == _LIST:
        _put_examples(as_json=options.as_json)
        return ExitCode.DONE
    if output.exists() or output.is_symlink():
        raise UsageError(f"{output}: exists, and is not overwritten; write another name after -o")
    if _is_terminal() and not options.yes:
        options = _with_answers(options)
    job = None if options.local else _job_section(options)
    gpus = count_gpus(os.environ) if options.gpus is None else options.gpus
    if options.example is not None:
        text, modules = _from_example(options, output, job)
    else:
        name = _NOT_IN_NAMES.sub("-", output.stem.lower()).strip("._-")[:64] or "exp"
        chosen = _FirstFile(
            name=name, task=options.task or STARTS[0].task, data=options.data, root=options.root,
            model=options.model, job=job, gpus=gpus,
        )  # fmt: skip
        text, modules = _first_file(chosen, output), {}
    files = {output: text} | modules
    for path, content in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("x", encoding="utf-8") as file:
            file.write(content)
    # The first line with CHANGE explains the marker.
    to_change = [number for number, line in enumerate(text.splitlines(), start=1) if CHANGE in line][1:]
    _say_next(output, to_change, job)
    if options.as_json:
        written = FirstFileJson(
            version=JSON_VERSION,
            file=str(output),
            files=list(map(str, files)),
            for_cluster=job is not None,
            lines_to_change=to_change,
        )
        put_json(written)
    return ExitCode.DONE


def _job_section(options: InitOptions) -> JobSection | None:
    """Return the cluster's facts; None if there is no cluster here."""
    launcher = load_launcher(options.launcher or DEFAULT)
    if not isinstance(launcher, ClusterLauncher):
        return None
    try:
        return launcher.job_section(options.queue, options.gpus)
    except NoSchedulerError as error:
        if options.queue is not None or options.launcher is not None:
            raise
        say(f"no cluster found, so the file is for this machine ({error})")
        return None


def _say_next(output: Path, to_change: Sequence[int], job: JobSection | None) -> None:
    where = "" if job is not None else " --local"
    say(f"{output}: written for {'this cluster' if job is not None else 'this machine'}")
    if to_change:
        lines = "line" if len(to_change) == 1 else "lines"
        say(f"  change {lines} {', '.join(map(str, to_change))}")
    steps = (f"validate {output}", f"prepare {output}", f"plan {output}{where}", f"submit {output}{where}")
    for command in steps:
        say(f"  `hpc-train {command}`")


def _is_terminal() -> bool:
    return sys.stdin.isatty() and sys.stderr.isatty()


def _with_answers(options: InitOptions) -> InitOptions:
    """Prompt for the most important options; an empty answer keeps the default."""
    if options.example is None and options.task is None:
        tasks = [start.task for start in STARTS]
        options = _replaced(options, task=_asked("task", tasks[0], tasks))
    start = next((start_of_task for start_of_task in STARTS if start_of_task.task == options.task), None)
    if options.example is None and start is not None:
        if options.data is None:
            options = _replaced(options, data=_asked("data set", start.data_for(options.root), []))
        if options.root is None and start.needs_root(options.data):
            options = _replaced(options, root=_asked("folder of the data", start.root, []))
        if options.model is None:
            options = _replaced(options, model=_asked("model", start.model_for(options.data), []))
    return options


def _replaced(options: InitOptions, **values: str) -> InitOptions:
    return InitOptions(**(vars(options) | values))


def _asked(what: str, default: str, choices: Sequence[str]) -> str:
    import typer

    listed = f" ({', '.join(choices)})" if choices else ""
    while True:
        try:
            answer = str(typer.prompt(f"{what}{listed}", default=default, err=True)).strip()
        except typer.Abort:  # Ctrl-C, or the end of the input
            raise KeyboardInterrupt from None
        if not choices or answer in choices:
            return answer
        say(f"write one of {', '.join(choices)}")


def _examples() -> dict[str, Path]:
    return {path.stem: path for path in sorted(EXAMPLES.glob("*.yaml"))}


def _put_examples(*, as_json: bool) -> None:
    titles = {name: _title(path) for name, path in _examples().items()}
    if as_json:
        recipes = [RecipeJson(name=name, title=title) for name, title in titles.items()]
        put_json(Recipes(version=JSON_VERSION, recipes=recipes))
    else:
        put(*columns(list(titles.items())))


def _title(path: Path) -> str:
    paragraph, _, _ = path.read_text(encoding="utf-8").partition("\n#\n")
    text = " ".join(line.lstrip("# ") for line in paragraph.splitlines())
    return text.partition(". ")[0].rstrip(".:")


def _from_example(options: InitOptions, output: Path, job: JobSection | None) -> tuple[str, dict[Path, str]]:
    """Return the recipe's text, with a section for this cluster if it has none, and its own modules."""
    options_with_recipe = [("--task", options.task), ("--data", options.data), ("--model", options.model)]
    if excess := [name for name, value in options_with_recipe if value is not None]:
        raise UsageError(f"{excess[0]}: the recipe has its own; change it in the file, or omit --from")
    assert options.example is not None
    recipes_by_name = _examples()
    name = options.example.removesuffix(".yaml")
    if name not in recipes_by_name:
        remedy = suggestion(name, recipes_by_name, "`hpc-train init --from list` lists them")
        raise UsageError(f"--from: there is no recipe {name!r}; {remedy}")
    text = recipes_by_name[name].read_text(encoding="utf-8")
    if options.root is not None:
        text = _with_root(text, options.root)
    modules = {
        Path("examples", f"{module}.py"): (EXAMPLES / f"{module}.py").read_text(encoding="utf-8")
        for module in _OWN_MODULE.findall(text)
    }
    for path in list(modules):
        if path.exists():
            say(f"{path}: exists, and is used as it is")
            del modules[path]
    text = text.replace(f"examples/{name}.yaml", one_line(str(output)))
    return (with_job_section(text, job) if job is not None else text), modules


def _with_root(text: str, root: str) -> str:
    replaced, count = re.subn(
        r"^(  root: )\S+(?=$|\s)", lambda match: match[1] + quoted(root), text, flags=re.MULTILINE
    )
    if count != 1:
        raise UsageError("--root: the recipe has no data.root of its own line; change it in the file")
    return replaced


@dataclass(frozen=True, kw_only=True)
class _FirstFile:
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


def _first_file(chosen: _FirstFile, output: Path) -> str:
    start = _start(chosen.task)
    data = chosen.data or start.data_for(chosen.root)
    name = chosen.model or start.model_for(data)
    model: dict[str, Any] = {"name": name}
    if name == start.model and start.model_args:
        model["args"] = dict(start.model_args)
    batch, micro = _sizes(start, _num_samples(start, data, chosen), chosen.ranks)
    sizes = {"epochs": 10, "global_batch_size": batch, "micro_batch_size": micro}
    content = {
        "name": chosen.name,
        "seed": 0,
        "task": start.task,
        "model": model,
        "data": _data(start, data, chosen),
        "optimization": {**sizes, **start.optimization, "schedule": {"name": "cosine", "warmup_epochs": 0.5}},
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


def _data(start: Start, name: str, chosen: _FirstFile) -> dict[str, Any]:
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


def _num_samples(start: Start, name: str, chosen: _FirstFile) -> int | None:
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


def _changes(start: Start, data: str, chosen: _FirstFile) -> dict[KeyPath, str]:
    """Return the remark on values that only the user knows."""
    changes: dict[KeyPath, str] = {}
    if chosen.root is None and start.needs_root(data):
        changes["data", "root"] = f"{CHANGE}: {data_facts(data).root}"
    if data == start.own_data:
        table = "docs/reference_parts.md, data.name"
        changes |= {("data", key): f"{CHANGE}: as in your data ({table})" for key in start.to_change}
    return changes


def _header(output: Path, chosen: _FirstFile) -> list[str]:
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
