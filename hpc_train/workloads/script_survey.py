"""Reads a training script for ``init --from-script``: options, files, prints, its loop; executes nothing."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

#: Options that a sweep varies, and those with the length of the training.
_TUNED = re.compile(
    r"(.*[._-])?(lr|learning[_-]rate|weight[_-]decay|wd|dropout|momentum|(batch|hidden)[_-]size|bs|warmup\w*)|"
    r"((num|n|max|total|train)[_-])*(epochs?|steps|iters|iterations)"
)
_SEED = re.compile(r"(.*[._-])?seed")
_RESUME = re.compile(
    r"(.*[_-])?(resume([_-].*)?|(init|load|restore|start)[_-]from([_-].*)?|from[_-]checkpoint)|load|restore"
)
#: The last name of a function that saves or makes a folder → the position of its path.
_SAVERS = {"torch.save": 1, "save_file": 1, "save": 0, "save_pretrained": 0, "save_checkpoint": 0}
#: Methods of a path that write to it.
_PATH_METHODS = {"write_text", "write_bytes"}
#: In the path of a file that may be a checkpoint.
_CHECKPOINT = re.compile(r"ckpt|checkpoint|state|last", re.I)
_FOLDER_MAKERS = {"makedirs": 0, "SummaryWriter": 0}
_FOLDER_KEYWORDS = {"output_dir", "default_root_dir", "dirpath", "log_dir", "save_dir", "logging_dir"}
_STEP_NAMES = ("global_step", "step", "iter_num", "iteration", "iter", "it", "batch_idx", "i", "epoch")
_STEP_WORDS = {"step", "iter", "iteration", "epoch"}
_METRIC = re.compile(
    r"((train|training|val|valid|validation|test|eval)[ _/]?)?(loss|acc|accuracy|ppl|perplexity|f1|mse|mae|"
    r"reward|return|score|bleu|iou|miou|auc)"
)
_NUMBER = r"[-+.\deE]+|nan|inf"
#: Libraries that own the training loop, or wrap it → names of theirs.
_LIBRARIES = {
    "Lightning": {"LightningCLI", "LightningModule"},
    "Hugging Face": {"TrainingArguments", "Seq2SeqTrainingArguments", "HfArgumentParser"},
    "Accelerate": {"Accelerator"},
}
#: A text of ``logging`` whose values are further arguments.
_PERCENT = re.compile(r"%[-+#\d.]*[dfsgei]\b")


@dataclass
class Script:
    """The facts about a script that could be read; empty if they could not."""

    #: Name without dashes → default, for options that a file sets.
    args: dict[str, Any] = field(default_factory=dict)
    #: Options and arguments without a default that the script requires.
    required: list[str] = field(default_factory=list)
    positional: list[str] = field(default_factory=list)
    style: str = "--key=value"
    #: Words that follow the script's name.
    arguments: list[str] = field(default_factory=list)
    #: Folders and files that it writes, relative, without duplicates.
    outputs: list[str] = field(default_factory=list)
    #: Its own checkpoint and the arguments with which it continues.
    resume: tuple[str, list[str]] | None = None
    regex: str | None = None
    #: Whether it can use several ranks that were started for it.
    is_distributed: bool = False
    starts_ranks: bool = False
    #: Library that owns the training loop.
    library: str | None = None
    #: The last import, the loop over steps, and the line of ``optimizer.step()``; 0: not found.
    import_line: int = 0
    loop_line: int = 0
    step_line: int = 0
    step_name: str = "step"
    #: Whether the innermost loop is within another one, such as that over epochs.
    is_nested: bool = False


def survey(text: str) -> Script:
    """Return the facts about a script. Raises SyntaxError."""
    return _Survey(ast.parse(text)).script


class _Survey:
    def __init__(self, tree: ast.Module) -> None:
        self._nodes = list(ast.walk(tree))
        self._calls = [node for node in self._nodes if isinstance(node, ast.Call)]
        self._names = {_name(call.func) for call in self._calls}
        self.script = script = Script()
        self._defaults = dict(self._options(tree))
        self._constants = _constants(self._nodes)
        if "LightningCLI" in self._names:
            script.arguments = ["fit"]
        script.style = "key=value" if "hydra.main" in self._decorators() else "--key=value"
        if script.style == "key=value":
            script.outputs.append("outputs")  # Hydra's own
        for name, value in self._defaults.items():
            if _SEED.fullmatch(name):
                script.args[name] = "{seed}"
            elif _TUNED.fullmatch(name) and isinstance(value, int | float) and not isinstance(value, bool):
                script.args[name] = value
        self._read_files()
        self._read_ranks()
        self._read_loop(tree)
        patterns = list(filter(None, map(_regex, self._prints())))
        script.regex = max(patterns, key=lambda pattern: pattern.count("(?P<"), default=None)

    # Options.

    def _decorators(self) -> set[str]:
        decorators = [
            decorator.func if isinstance(decorator, ast.Call) else decorator
            for node in self._nodes
            if isinstance(node, ast.FunctionDef)
            for decorator in node.decorator_list
        ]
        return {_name(decorator) for decorator in decorators}

    def _options(self, tree: ast.Module) -> Iterator[tuple[str, Any]]:
        """Yield the options of the command line with their defaults; None: no constant."""
        for call in self._calls:
            name = _name(call.func)
            last = name.rpartition(".")[2]
            if last in {"add_argument", "option"}:
                yield from self._declared(call)
            elif last.startswith("DEFINE_") and len(call.args) > 1:
                yield str(_constant(call.args[0])), _constant(call.args[1])
            elif name == "exec" and "open" in self._names:  # nanoGPT's configurator
                yield from _assigned(tree.body)
            elif name in {"fire.Fire", "typer.run", "tyro.cli", "HfArgumentParser"} and call.args:
                yield from self._parameters(call.args[0], "-" if name == "typer.run" else "_")

    def _declared(self, call: ast.Call) -> Iterator[tuple[str, Any]]:
        """Yield the option of ``add_argument`` or ``click.option``, with its default."""
        names = [name for name in map(_constant, call.args) if isinstance(name, str)]
        long = [name.partition("/")[0].lstrip("-") for name in names if name.startswith("--")]
        keywords: Mapping[str | None, Any] = {word.arg: _constant(word.value) for word in call.keywords}
        is_flag = keywords.get("action") == "store_true" or keywords.get("is_flag") is True
        if long:
            if keywords.get("required") is True:
                self.script.required.append(long[0])
            yield long[0], False if is_flag else keywords.get("default")
        elif names and not names[0].startswith("-") and keywords.get("nargs") not in {"?", "*"}:
            self.script.positional.append(names[0])

    def _parameters(self, target: ast.expr, dash: str) -> Iterator[tuple[str, Any]]:
        """Yield the parameters of functions, or the fields of classes, that a library makes options."""
        names = {node.id for node in ast.walk(target) if isinstance(node, ast.Name)}
        for node in self._nodes:
            if isinstance(node, ast.FunctionDef) and node.name in names:
                parameters = node.args.args[::-1]
                for parameter, default in zip(parameters, node.args.defaults[::-1], strict=False):
                    yield parameter.arg.replace("_", dash), _constant(default)
            elif isinstance(node, ast.ClassDef) and node.name in names:
                yield from _assigned(node.body)

    # Files.

    def _read_files(self) -> None:
        script, saved = self.script, list[str]()
        for call, path, is_file in self._written():
            parts, suffix = PurePosixPath(path).parts, PurePosixPath(path).suffix
            if not parts or path.startswith(("/", "~")) or "*" in parts[0] or ".." in parts:
                continue
            if len(parts) > 1 or suffix or not is_file:
                script.outputs.append(parts[0])
            if suffix and (_name(call.func) == "torch.save" or _CHECKPOINT.search(path)):
                saved.append(str(PurePosixPath(path)))
        script.outputs = list(dict.fromkeys(script.outputs))
        for name in filter(_RESUME.fullmatch, self._defaults):
            for path in saved:
                if script.resume is None and (arguments := self._resume_arguments(name, path)):
                    script.resume = path, arguments

    def _written(self) -> Iterator[tuple[ast.Call, str, bool]]:
        """Yield the calls that write to a path, the path, and whether it is a file's."""
        for call in self._calls:
            name = _name(call.func)
            last = name.rpartition(".")[2]
            positions = _FOLDER_MAKERS if last in _FOLDER_MAKERS else _SAVERS
            position = positions.get(name, positions.get(last))
            places = [] if position is None else call.args[position : position + 1]
            if last in _PATH_METHODS and isinstance(call.func, ast.Attribute):
                places = [call.func.value]
            folders = [word.value for word in call.keywords if word.arg in _FOLDER_KEYWORDS]
            for place in [*places, *folders]:
                if path := self._path(place):
                    yield call, path, place in places and positions is _SAVERS

    def _resume_arguments(self, name: str, path: str) -> list[str]:
        """Return the arguments with which the option continues from a checkpoint; empty if that is unsure."""
        default = self._defaults[name]
        if default is False:
            return [f"--{name}"]
        compared = {
            value
            for node in self._nodes
            if isinstance(node, ast.Compare) and _name(node.left).rpartition(".")[2] == name
            for value in map(_constant, node.comparators)
        }
        if "resume" in compared:
            return [f"--{name}=resume"]
        return [f"--{name}={path}"] if default in (None, "") and "*" not in path else []

    def _path(self, node: ast.expr) -> str | None:
        """Return the path that an expression is, with ``*`` for parts that are unknown; None: no path."""
        match node:
            case ast.Constant(value=str(text)):
                return text
            case ast.Name(id=name):
                return self._known(name)
            case ast.Attribute(attr=name):
                return self._known(name)
            case ast.JoinedStr(values=values):
                return re.sub(r"\*+", "*", "".join(self._path(value) or "*" for value in values))
            case ast.FormattedValue(value=value):
                return self._path(value)
            case ast.BinOp(left=left, op=ast.Div() | ast.Add() as op, right=right):
                separator = "/" if isinstance(op, ast.Div) else ""
                return f"{self._path(left) or '*'}{separator}{self._path(right) or '*'}"
            case ast.Call(func=func, args=[_, *_] as args) if _name(func).endswith(("join", "Path", "str")):
                return "/".join(self._path(arg) or "*" for arg in args)
        return None

    def _known(self, name: str) -> str | None:
        if (value := self._constants.pop(name, None)) is not None:  # it may contain itself
            path = self._path(value)
            self._constants[name] = value
            if path is not None:
                return path
        default = self._defaults.get(name, self._defaults.get(name.replace("_", "-")))
        return default if isinstance(default, str) else None

    # Ranks and the loop.

    def _read_ranks(self) -> None:
        script = self.script
        bases = [base for node in self._nodes if isinstance(node, ast.ClassDef) for base in node.bases]
        names = {name.rpartition(".")[2] for name in (*self._names, *map(_name, bases))}
        script.library = next((library for library, parts in _LIBRARIES.items() if names & parts), None)
        script.starts_ranks = "spawn" in names or "start_processes" in names
        script.is_distributed = "init_process_group" in names or script.library is not None

    def _read_loop(self, tree: ast.Module) -> None:
        script = self.script
        imports = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
        script.import_line = max((node.end_lineno or node.lineno for node in imports), default=0)
        for loop in self._nodes:  # outer loops first: of the step's line, the innermost one stays
            if not isinstance(loop, ast.For | ast.While):
                continue
            inner = list(ast.walk(loop))
            steps = [
                node.end_lineno or node.lineno
                for node in inner
                if isinstance(node, ast.Call) and _is_optimizer_step(_name(node.func))
            ]
            if steps:
                script.is_nested = script.loop_line > 0
                script.loop_line = script.loop_line or loop.lineno
                script.step_line = max(steps)
                counted: list[ast.expr] = [node.target for node in inner if isinstance(node, ast.AugAssign)]
                if isinstance(loop, ast.For) and not script.is_nested:  # else it begins again in each epoch
                    counted.append(loop.target)
                names = {
                    node.id for target in counted for node in ast.walk(target) if isinstance(node, ast.Name)
                }
                script.step_name = next((name for name in _STEP_NAMES if name in names), "step")

    # Prints.

    def _prints(self) -> Iterator[list[str | ast.expr]]:
        """Yield the texts and values of each printed or logged f-string or list of values, in order."""
        for call in self._calls:
            name = _name(call.func)
            if name != "print" and not name.endswith((".info", "tqdm.write")):
                continue
            parts: list[str | ast.expr] = []
            for argument in call.args:
                parts += [" "] if parts else []
                for value in argument.values if isinstance(argument, ast.JoinedStr) else [argument]:
                    text = _constant(value)
                    inner = value.value if isinstance(value, ast.FormattedValue) else value
                    parts.append(text if isinstance(text, str) else inner)
            yield parts


def _regex(parts: list[str | ast.expr]) -> str | None:
    """Return the expression of a line with a step and metrics; None if it is not sure to be one."""
    pattern, before, groups = "", "", dict[str, int]()
    for part in parts:
        if isinstance(part, str):
            if _PERCENT.search(part):
                return None
            pattern += re.sub(r"\\([ /:=,#%|-])", lambda match: match[1].replace("|", r"\|"), re.escape(part))
            before = (before + part).lower()
            continue
        group = _group(_name(part).rpartition(".")[2].lower(), re.findall(r"[a-z_\d/]+", before))
        if group in groups:
            return None
        value = r"\d+" if group == "step" else _NUMBER
        blanks = " *" if pattern else ""  # a format may pad the value
        pattern = pattern.rstrip(" ") + blanks + (f"(?P<{group}>{value})" if group else r"\S+")
        if group:
            groups[group] = len(pattern)
        before = ""
    is_sure = "step" in groups and len(groups) > 1
    return pattern[: max(groups.values())].lstrip() if is_sure else None


def _group(name: str, preceding: list[str]) -> str:
    """Return the group of a value, by its variable's name and the words before it; empty: none."""
    if name in _STEP_NAMES or (preceding and preceding[-1] in _STEP_WORDS):
        return "step"
    labels = (" ".join(preceding[-2:]), *preceding[-1:], name)
    return next((_metric_name(label) for label in labels if _METRIC.fullmatch(label)), "")


def _metric_name(words: str) -> str:
    name = re.sub(r"\W+", "_", words.lower())
    name = re.sub(r"^(train|training)_", "", name)
    return re.sub(r"^(valid|validation|test|eval)_", "val_", name)


def _name(node: ast.AST) -> str:
    """Return ``a.b.c`` of names and attributes, their last names for others; empty without any."""
    match node:
        case ast.Name(id=name):
            return name
        case ast.Attribute(value=value, attr=name):
            return f"{_name(value)}.{name}".lstrip(".")
        case ast.Call(func=func):
            return _name(func).rpartition(".")[0]
        case ast.Subscript(value=value):
            return _name(value)
    return ""


def _is_optimizer_step(name: str) -> bool:
    owner, _, method = name.rpartition(".")
    return method == "step" and re.search(r"opt|scaler", owner, re.I) is not None


def _constant(node: ast.AST) -> Any:
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError):
        return None


def _constants(nodes: list[ast.AST]) -> dict[str, ast.expr]:
    """Return the names that are assigned once, with their values."""
    values: dict[str, list[ast.expr]] = {}
    for node in nodes:
        if isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Name):
                    values.setdefault(target.id, []).append(node.value)
    return {name: assigned[0] for name, assigned in values.items() if len(assigned) == 1}


def _assigned(body: list[ast.stmt]) -> Iterator[tuple[str, Any]]:
    """Yield the names of a module or class that have constant values."""
    for node in body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            yield node.targets[0].id, _constant(node.value)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value:
            yield node.target.id, _constant(node.value)
