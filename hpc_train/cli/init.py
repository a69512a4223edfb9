"""``init``: writes an experiment file that fits this machine or cluster and the data (``first_file``)."""

from __future__ import annotations

import csv
import io
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypedDict

from hpc_train.cli.command_options import InitOptions
from hpc_train.cli.first_file import (
    CHANGE,
    FirstFile,
    first_file,
    list_path,
    quoted,
    start_of,
    with_job_section,
)
from hpc_train.console import JSON_VERSION, columns, one_line, put, put_json, say
from hpc_train.errors import ExitCode, NoSchedulerError, UsageError
from hpc_train.experiment.data_facts.survey.content import Survey
from hpc_train.experiment.data_facts.survey.looking import survey
from hpc_train.experiment.data_facts.task_starts import STARTS
from hpc_train.launchers.base import ClusterLauncher, JobSection
from hpc_train.launchers.lookup import DEFAULT, load_launcher
from hpc_train.paths import expanded
from hpc_train.rank.env import count_gpus
from hpc_train.registry import suggestion

#: The repository's recipes: package data, in a checkout a link.
EXAMPLES = Path(__file__).with_name("examples")
_LIST = "list"
_NOT_IN_NAMES = re.compile(r"[^a-z0-9._-]+")
#: The name of the recipes' own modules in the repository.
_OWN_MODULE = re.compile(r"\bexamples\.(\w+):")


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
    #: Lines on the content of ``--root``: numbers and sizes, then possible mistakes.
    data: list[str]
    #: Lines that tell how to change the script of ``--from-script``.
    script: list[str]


class RecipeJson(TypedDict):
    """An experiment file to start from."""

    name: str
    title: str


class Recipes(TypedDict):
    """The recipes of ``--from``."""

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
    if _is_terminal() and not options.yes and options.script is None:
        options = _with_answers(options)
    job = None if options.local else _job_section(options)
    gpus = count_gpus(os.environ) if options.gpus is None else options.gpus
    remarks: list[str] = []
    lines: list[str] = []
    modules: dict[Path, str] = {}
    if options.script is not None:
        text, lines = _from_script(options, options.script, job)
    elif options.example is not None:
        text, modules = _from_example(options, output, job)
    else:
        content = _survey(options)
        task = options.task or (STARTS[0].task if content is None else content.task)
        chosen = FirstFile(
            name=_name_of(output), start=start_of(task), data=options.data, root=options.root,
            model=options.model, job=job, gpus=gpus, survey=content,
        )  # fmt: skip
        text = first_file(chosen, output)
        if content is not None:
            modules = _own_modules(text) | _lists(content, output)
            remarks = content.lines
    files = {output: text} | modules
    for remark in remarks:
        say(f"{options.root}: {remark}")
    for path in modules:
        if path.suffix == ".csv" and path.exists():
            raise UsageError(f"{path}: exists, and is not overwritten; write another name after -o")
    for path, file_text in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("x", encoding="utf-8") as file:
            file.write(file_text)
    to_change = [number for number, line in enumerate(text.splitlines(), start=1) if f"# {CHANGE}:" in line]
    _say_next(output, to_change, job)
    for line in lines:
        say(line)
    if options.as_json:
        written = FirstFileJson(
            version=JSON_VERSION,
            file=str(output),
            files=list(map(str, files)),
            for_cluster=job is not None,
            lines_to_change=to_change,
            data=remarks,
            script=lines,
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
    if options.example is None and options.task is None and options.root is None:
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


def _name_of(output: Path) -> str:
    return _NOT_IN_NAMES.sub("-", output.stem.lower()).strip("._-")[:64] or "exp"


def _from_script(options: InitOptions, path: Path, job: JobSection | None) -> tuple[str, list[str]]:
    """Return the file's text, and the lines that tell how to change the script."""
    from hpc_train.cli.from_script import job_values, read_script, script_file, session_lines

    for name in ("example", "task", "data", "root", "model"):
        if vars(options)[name] is not None:
            flag = "--from" if name == "example" else f"--{name}"
            raise UsageError(f"{flag}: does not go with --from-script; omit one of them")
    script = read_script(path)
    text = script_file(_name_of(options.output), path, script, options.output, for_cluster=job is not None)
    if job is not None:
        text = with_job_section(text, replace(job, values=job_values(script, job.values)))
    return text, session_lines(path, script)


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
    modules = _own_modules(text)
    text = text.replace(f"examples/{name}.yaml", one_line(str(output)))
    return (with_job_section(text, job) if job is not None else text), modules


def _own_modules(text: str) -> dict[Path, str]:
    """Return path → content of the modules of the recipes that a file names and that are not here."""
    modules = {}
    for name in _OWN_MODULE.findall(text):
        path = Path("examples", f"{name}.py")
        if path.exists():
            say(f"{path}: exists, and is used as it is")
        else:
            modules[path] = (EXAMPLES / path.name).read_text(encoding="utf-8")
    return modules


def _lists(content: Survey, output: Path) -> dict[Path, str]:
    """Return path → content of the lists of images that the file names."""
    texts = {}
    for split, rows in content.new_lists.items():
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows(rows)
        texts[list_path(output, split)] = text.getvalue()
    return texts


def _survey(options: InitOptions) -> Survey | None:
    """Return the content of ``--root``; None, after a line about it, if it is not on this machine."""
    if options.root is None:
        return None
    folder = expanded(options.root)
    if not folder.exists():
        say(f"{options.root}: not on this machine, so sizes and numbers are a start")
    return survey(folder, options.data, options.task)


def _with_root(text: str, root: str) -> str:
    replaced, count = re.subn(
        r"^(  root: )\S+(?=$|\s)", lambda match: match[1] + quoted(root), text, flags=re.MULTILINE
    )
    if count != 1:
        raise UsageError("--root: the recipe has no data.root of its own line; change it in the file")
    return replaced
