"""``init``: writes an experiment file that fits this machine or cluster and the data (``first_file``).

With ``--from-script`` the file of a program, and the lines with which the script resumes exactly.
"""

from __future__ import annotations

import csv
import io
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypedDict

from hpc_train.cli import first_file
from hpc_train.cli.command_options import InitOptions
from hpc_train.cli.first_file import CHANGE, DOCS, commented, quoted
from hpc_train.console import columns, one_line, put, put_json, say
from hpc_train.errors import ExitCode, NoSchedulerError, UsageError
from hpc_train.experiment.data_facts.survey.content import Survey
from hpc_train.experiment.data_facts.survey.looking import survey
from hpc_train.experiment.data_facts.task_starts import STARTS
from hpc_train.launchers.base import ClusterLauncher, JobSection
from hpc_train.launchers.lookup import DEFAULT, load_launcher
from hpc_train.paths import expanded
from hpc_train.rank.env import count_gpus
from hpc_train.registry import suggestion
from hpc_train.workloads import script_survey
from hpc_train.workloads.script_survey import Script

#: The repository's recipes: package data, in a checkout a link.
EXAMPLES = Path(__file__).with_name("examples")
_LIST = "list"
_NOT_IN_NAMES = re.compile(r"[^a-z0-9._-]+")
#: The name of the recipes' own modules in the repository.
_OWN_MODULE = re.compile(r"\bexamples\.(\w+):")


class FirstFileJson(TypedDict):
    """The experiment file that was written."""

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
        chosen = first_file.FirstFile(
            name=_name_of(output), start=first_file.start_of(task), data=options.data, root=options.root,
            model=options.model, job=job, gpus=gpus, survey=content,
        )  # fmt: skip
        text = first_file.first_file(chosen, output)
        if content is not None:
            modules = _own_modules(text) | _lists(content, output)
            remarks = content.lines
    files = {output: text} | modules
    say(*(f"{options.root}: {remark}" for remark in remarks))
    for path in modules:
        if path.suffix == ".csv" and path.exists():
            raise UsageError(f"{path}: exists, and is not overwritten; write another name after -o")
    for path, file_text in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("x", encoding="utf-8") as file:
            file.write(file_text)
    to_change = [number for number, line in enumerate(text.splitlines(), start=1) if f"# {CHANGE}:" in line]
    _say_next(output, to_change, job)
    say(*lines)
    if options.as_json:
        written = FirstFileJson(
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
    say(*(f"  `hpc-train {command}`" for command in steps))


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
        put_json(Recipes(recipes=recipes))
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
    for name in ("example", "task", "data", "root", "model"):
        if vars(options)[name] is not None:
            flag = "--from" if name == "example" else f"--{name}"
            raise UsageError(f"{flag}: does not go with --from-script; omit one of them")
    script = read_script(path)
    text = script_file(_name_of(options.output), path, script, options.output, for_cluster=job is not None)
    if job is not None:
        text = first_file.with_job_section(text, replace(job, values=job_values(script, job.values)))
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
    return (first_file.with_job_section(text, job) if job is not None else text), modules


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
        texts[first_file.list_path(output, split)] = text.getvalue()
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


_GUIDE = f"{DOCS}/programs.md"


def read_script(path: Path) -> Script:
    """Return the facts about a script. Raises UsageError for one that runs of this folder can't start."""
    if path.suffix != ".py":
        command = "[bash, train.sh]" if path.suffix in {".sh", ".bash"} else "[./train, --steps=100]"
        raise UsageError(
            f"--from-script: {path} is not a Python file; for others write program: {{command: {command}}} "
            f"into a file yourself, see {_GUIDE}"
        )
    if path.is_absolute() or ".." in path.parts:
        raise UsageError(
            f"--from-script: {path}: write a path below this folder, since runs get its code: "
            f"`cd {path.resolve().parent}`, then `hpc-train init --from-script {path.name}`"
        )
    try:
        return script_survey.survey(path.read_text(encoding="utf-8"))
    except OSError as error:
        reason = error.strerror or error
        raise UsageError(f"--from-script: {path}: {reason}; write the path of a script") from error
    except (SyntaxError, ValueError) as error:
        line = f":{error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
        raise UsageError(f"--from-script: {path}{line}: is not Python: {error}; fix the script") from error


def script_file(name: str, path: Path, script: Script, output: Path, *, for_cluster: bool) -> str:
    """Return the text of the file, without the cluster's section."""
    shown, where = one_line(str(output)), "" if for_cluster else " --local"
    lines = [
        f"# {one_line(str(path))} as a program, written by `hpc-train init --from-script`.",
        f"# All keys: {_GUIDE}",
        "#",
        f"#   hpc-train validate {shown}",
        f"#   hpc-train submit {shown}{where}",
        f"name: {quoted(name)}",
        "program:",
        *(f"  {line}" for line in _program(path, script)),
        *_sweep(script),
    ]
    return "\n".join(lines) + "\n"


def _program(path: Path, script: Script) -> Iterator[str]:
    arguments = [*script.arguments, *(name.upper() for name in script.positional)]
    change = f"{CHANGE}: arguments that the script requires" if script.positional else ""
    yield commented(f"command: {quoted(['python', str(path), *arguments])}", change)
    if script.starts_ranks:
        yield commented("per: node", "the script starts its ranks itself")
    if script.style != "--key=value":
        yield commented(f"style: {script.style}", "as Hydra reads it")
    yield from _args(script)
    if script.outputs:
        yield commented(f"outputs: {quoted(script.outputs)}", "each run has its own")
    else:
        yield "# outputs: [out]  # folders and files that the script writes: each run has its own"
    if script.resume is not None:
        checkpoint, arguments = script.resume
        yield "resume:"
        yield commented(f"  if_exists: {quoted(checkpoint)}", "the script's own checkpoint")
        yield f"  args: {quoted(arguments)}"
    else:
        yield "# resume: {if_exists: out/checkpoint.pt, args: [--resume]}  # for a script that can continue"
    if script.regex is not None:
        regex = script.regex.replace("'", "''")
        yield f"metrics: {{regex: '{regex}'}}"
    else:
        yield r"# metrics: {regex: 'step (?P<step>\d+).*loss (?P<loss>[-+.\deE]+|nan|inf)'}  # of its output"


def _args(script: Script) -> Iterator[str]:
    if not script.args and not script.required:
        example = "learning_rate: 1e-4" if script.style == "--key=value" else "optimizer.lr: 1e-4"
        yield f"# args: {{{example}}}  # options of the script that this file sets"
        return
    yield "args:"
    for name in script.required:
        yield commented(f"  {name}: {quoted(name.upper())}", f"{CHANGE}: the script requires it")
    for name, value in script.args.items():
        yield commented(f"  {name}: {quoted(value)}", "the seed of this file" if value == "{seed}" else "")


def _sweep(script: Script) -> Iterator[str]:
    rates = [name for name in script.args if "lr" in name or "rate" in name]
    tuned = [*rates, *(name for name, value in script.args.items() if value != "{seed}")]
    for name in tuned[:1]:
        values = [script.args[name], script.args[name] * 2]
        yield ""
        yield f"# sweep: {{grid: {{program.args.{name}: {quoted(values)}}}}}"


def job_values(script: Script, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the cluster's section: one rank per node if the script starts ranks, one if it uses one."""
    if script.starts_ranks:
        return {**values, "ranks_per_node": 1}
    if script.is_distributed or not values.get("gpus_per_node"):
        return dict(values)
    return {**values, "gpus_per_node": 1}


_RESUMES = "with these lines it saves when it is asked to stop, and resumes exactly:"
#: Library that owns the loop → the lines of its adapter, after the imports and in the calls.
_ADAPTERS = {
    "Lightning": (
        "from hpc_train.session.lightning import SessionCallback, SessionEnvironment, latest",
        "Trainer(…, callbacks=[SessionCallback()], plugins=[SessionEnvironment()])",
        "trainer.fit(…, ckpt_path=latest())",
    ),
    "Hugging Face": (
        "from hpc_train import session",
        "from hpc_train.session.transformers import SessionCallback",
        "Trainer(…, callbacks=[SessionCallback()])",
        "trainer.train(resume_from_checkpoint=session.latest())",
    ),
}


def session_lines(path: Path, script: Script) -> list[str]:
    """Return the lines to add to the script, with their places, with which it saves and resumes exactly."""
    if adapter := _ADAPTERS.get(script.library or ""):
        return [f"{path}: {_RESUMES}", *(f"    {line}" for line in adapter)]
    if not script.step_line:
        how = f"{script.library} owns the loop" if script.library else "no optimizer.step() in a loop"
        return [f"{path}: {how}; {_GUIDE} shows how it saves when it is asked to stop"]
    step = script.step_name
    return [
        f"{path}: {_RESUMES}",
        f"  after line {script.import_line}:",
        "    from hpc_train import session",
        f"  before line {script.loop_line}, whose first step is then start + 1:",
        "    start = session.load_state(model=model, optimizer=optimizer)",
        f"  after line {script.step_line}; {step}: the steps done in all epochs, from 1:",
        f"    session.log({step}, loss=loss.item())",
        f"    if session.end_step({step}):",
        "        raise SystemExit" if script.is_nested else "        break",
    ]
