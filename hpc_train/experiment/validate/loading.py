"""Reads an experiment file and the command line's overrides, and reports all problems with their position."""

from __future__ import annotations

import glob
import json
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from hpc_train.console import one_line
from hpc_train.errors import BadFileError, shortened
from hpc_train.experiment.config import keys, marked_yaml
from hpc_train.experiment.config.explanations import explain, target_of
from hpc_train.experiment.config.marked_yaml import Document
from hpc_train.experiment.config.problems import (
    COMMAND_LINE,
    KeyPath,
    Marks,
    Place,
    Problem,
    ProblemLine,
    Source,
    related,
)
from hpc_train.experiment.config.schema import Job, kind_of
from hpc_train.experiment.config.sweep_sections import SWEPT
from hpc_train.experiment.config.training_sections import OF_STAGE
from hpc_train.experiment.validate import rules
from hpc_train.paths import runs_root
from hpc_train.registry import nearest

#: Valid in the file itself, so not checked again for each run of a sweep.
JUDGED_ONCE: frozenset[KeyPath] = frozenset(SWEPT)
#: The key of a file that has several experiments, which ``plan.staged_file`` reads.
STAGES = "stages"
#: Parts of ``sweep`` with distributions instead of values.
_DRAWN = ("random", "search")
#: Remedies for a path that is not an experiment file.
_DESCRIBE = (
    "hpc-train trains the model, data and task that a YAML file names: `hpc-train init` writes one, and "
    "model.name, data.name and task accept your own code as package.module:factory (docs/plugins.md)"
)
_SCRIPT = (
    "to run it as it is, write a file with `name: my-run` and `program: {command: [python, FILE]}` "
    "(docs/programs.md); to move its parts, " + _DESCRIBE
)
#: Suffixes → the kind of file, and the remedy.
_KINDS = {
    ".py .pyw": ("a Python script", _SCRIPT),
    ".ipynb": ("a notebook", _DESCRIBE),
    ".sh .bash .slurm .sbatch .job .batch .pbs": (
        "a batch script",
        "hpc-train writes its own from the `slurm:` section of a YAML file, which `hpc-train init` writes",
    ),
    ".pt .pth .ckpt .bin .safetensors .onnx .tar": (
        "a file of weights",
        "write it as model.init_from in a YAML file; `hpc-train resume RUN` continues a run",
    ),
    ".toml .ini .cfg": ("not YAML", "`hpc-train init` writes an experiment file, exp.yaml"),
}
_BY_SUFFIX = {suffix: kind for suffixes, kind in _KINDS.items() for suffix in suffixes.split()}


@dataclass(frozen=True)
class Stage:
    """The place of an experiment among the stages of a file; ``stage`` of ``run.json``."""

    #: From 1.
    number: int
    of: int
    #: ``name/id`` of the run whose completion it waits for; None: the first stage.
    after: str | None = None
    #: ``name/id`` of the training stage before it, whose weights it may load; None if there is none.
    weights: str | None = None


@dataclass(frozen=True)
class Loaded:
    """A valid file. ``data`` is the content of the file and the command line, without defaults."""

    experiment: Job
    source: Source
    data: dict[str, Any]
    check_names: bool = True
    #: ``KEY=VALUE`` of the command line.
    overrides: tuple[str, ...] = ()
    #: None: the file has no stages.
    stage: Stage | None = None

    @property
    def source_name(self) -> str:
        """The file as the user named it; empty for a dict of the Python API."""
        return self.source.name

    def variant(self, values: Mapping[str, Any], places: Mapping[str, KeyPath] | None = None) -> Job:
        """Return the experiment with these dotted keys replaced: one run of the sweep.

        Raises BadFileError; problems point to ``places``, the values' places in the file.
        """
        data = self.data
        for path in SWEPT:  # else each run would be checked together with the values of all
            data = _without(data, path)
        for key, value in values.items():
            data = keys.replaced(data, keys.split_key(key), value)
        experiment, problems = _judge(data, self.check_names, JUDGED_ONCE)
        if experiment is None or problems:
            placed = [_at_value(problem, places or {}, values) for problem in problems]
            raise BadFileError(self.source.render_all(placed))
        return experiment

    def problem(self, path: KeyPath | str, message: str, remedy: str, code: str = "launcher.request") -> str:
        """Return the line for a problem that was found later, with its position; ``path`` may be dotted."""
        named = tuple(path.split(".")) if isinstance(path, str) else path
        return self.source.render(Problem(named, message, remedy, code=code))


def load(
    path: Path | Mapping[str, Any], overrides: Sequence[str] = (), *, check_names: bool = True
) -> Loaded:
    """Read ``path``, apply the ``KEY=VALUE`` overrides and check the result.

    ``path`` may also be the content of a file; its problems have no position. Raises BadFileError with all
    problems. ``check_names``: also look up names of timm and torchvision.
    """
    return load_document(
        read(path), str(path) if isinstance(path, Path) else "", overrides, check_names=check_names
    )


def read(path: Path | Mapping[str, Any]) -> Document:
    """Return the content of a file, or of a mapping, before it is checked. Raises BadFileError."""
    return marked_yaml.read_document(_content(path) if isinstance(path, Path) else _as_yaml(path))


def load_document(
    document: Document,
    name: str,
    overrides: Sequence[str] = (),
    *,
    check_names: bool = True,
    weights: str | None = None,
) -> Loaded:
    """Check a document with the ``KEY=VALUE`` overrides. ``name``: of the file, for messages.

    ``weights``: the run that ``model.init_from: stage`` means. Raises BadFileError with all problems.
    """
    problems = list(document.problems)
    data = {} if document.data is None else document.data
    data, changed, bad_overrides = _overridden(data, overrides)
    problems += bad_overrides
    source = Source(name, document.marks, frozenset(changed))
    if data.get(STAGES):
        message = "has several runs, and this command reads one experiment"
        remedy = "use validate, plan and submit with this file, or give the file of one of its stages"
        raise BadFileError([source.render(Problem((STAGES,), message, remedy, code="stages.one-experiment"))])
    model = data.get("model")
    if weights is not None and isinstance(model, dict) and model.get("init_from") == OF_STAGE:
        data = keys.replaced(data, ("model", "init_from"), weights)
    experiment = None
    if document.data is not None:
        experiment, value_problems = _judge(
            data, check_names, {problem.path for problem in problems if problem.path}
        )
        problems = with_unindented_sections(data, document.marks, [*problems, *value_problems])
    if experiment is None or problems:
        raise BadFileError(source.render_all(problems))
    return Loaded(experiment, source, data, check_names, tuple(overrides))


def _content(path: Path) -> bytes:
    if other := why_not_yaml(path):
        raise BadFileError(ProblemLine(one_line(other), "file.not-yaml", ""))
    try:
        with path.open("rb") as file:
            return file.read(marked_yaml.MAX_BYTES + 1)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        reason = getattr(error, "strerror", None) or str(error)
        message = f"{path}: can't be read ({reason}); {instead_of_missing(path)}"
        raise BadFileError(ProblemLine(one_line(message), "file.unreadable", "")) from error


def why_not_yaml(path: Path) -> str | None:
    """Return the error for a file of another kind, with a remedy; None if it may be an experiment file."""
    kind, remedy = _BY_SUFFIX.get(path.suffix.lower(), ("", ""))
    remedy = remedy.replace("FILE]", f"{path.name}]")
    return f"{path}: is {kind}, not an experiment file; {remedy}" if kind else None


def instead_of_missing(path: Path) -> str:
    """Return the remedy for a path that can't be read: a file beside it, or a command for a run."""
    folder = path if path.is_dir() else path.parent
    names = {str(folder / name): name for name in sorted(_yaml_files(folder))}
    if path.is_dir():
        return f"write {next(iter(names))}" if names else "give the path of an experiment file"
    for suffix in (".yaml", ".yml"):
        if str(path.with_name(f"{path.name}{suffix}")) in names:
            return f"write {path}{suffix}"
    if _is_run(str(path)):
        return f"it is a run: `hpc-train status {path}` shows it, `hpc-train resume {path}` continues it"
    if "=" in str(path):
        return f"write the file before {path}"
    if close := nearest(str(path), names):
        return f"did you mean {close}?"
    return "give the path of an experiment file; `hpc-train init` writes one"


def _yaml_files(folder: Path) -> list[str]:
    try:
        return [entry.name for entry in folder.iterdir() if entry.suffix in {".yaml", ".yml"}]
    except (OSError, ValueError):  # ValueError: a NUL in the path
        return []


def _is_run(word: str) -> bool:
    if not word.isprintable() or word in {"", ".", ".."}:
        return False
    root = runs_root()
    return (root / word).is_dir() or ("/" not in word and any(root.glob(f"*/{glob.escape(word)}*")))


def _as_yaml(content: Mapping[str, Any]) -> bytes:
    try:
        return json.dumps(dict(content), ensure_ascii=False).encode(errors="surrogatepass")
    except (TypeError, ValueError) as error:
        raise BadFileError(f"experiment: {error}; use dicts, lists, text, numbers and None") from error


def _overridden(
    data: dict[str, Any], overrides: Sequence[str]
) -> tuple[dict[str, Any], list[KeyPath], list[Problem]]:
    """Return the changed data, the key paths given on the command line, and their problems."""
    changed: list[KeyPath] = []
    problems: list[Problem] = []
    rest = list(overrides)
    while rest:
        key, equals, text = (override := rest.pop(0)).partition("=")
        try:
            if divided := keys.divided_override(override, rest):
                raise keys.BadKeyError(divided)
            path = keys.split_key(key)
        except keys.BadKeyError as error:
            is_argument = keys.PROGRAM in data and equals and not divided
            remedy = keys.argument_remedy(key) if is_argument else error.problem.remedy
            problems.append(replace(error.problem, place=COMMAND_LINE, remedy=remedy))
            continue
        value, bad = marked_yaml.read_value(text)
        problems += [replace(problem, path=(*path, *problem.path), place=COMMAND_LINE) for problem in bad]
        if value is None and not bad and not keys.accepts_null(path):
            changed.append(path)
            data = _removed(data, path)
        else:
            changed.append(_first_new(data, path))
            data = keys.replaced(data, path, value)
    return data, changed, problems


def _first_new(data: Any, path: KeyPath) -> KeyPath:
    """Return the part of ``path`` that the command line adds: a section that was missing, or all of it."""
    for end, segment in enumerate(path, start=1):
        data = data.get(segment) if isinstance(data, dict) else None
        if not isinstance(data, dict | bool):
            return path[:end]
    return path


def _judge(
    data: dict[str, Any], check_names: bool, reported: Set[KeyPath]
) -> tuple[Job | None, list[Problem]]:
    """Return the experiment, if it fits the schema, and all problems except those of ``reported`` keys."""
    problems: list[Problem] = []
    experiment = None
    try:
        experiment = kind_of(data).model_validate(data)
    except ValidationError as error:
        problems = explain(error, data)
        if keys.means_program(data):  # not what our trainer's file lacks
            problems = [problem for problem in problems if problem.code != "key.missing"]
    failed = _failed_paths(problems, data)
    judged = experiment or _salvaged(data, failed | {problem.path for problem in problems})
    problems = [problem for problem in problems if problem.path not in reported]
    if judged is not None:
        problems += rules.check(judged, reported | failed, check_names=check_names)
    return experiment, problems


def _failed_paths(problems: list[Problem], data: dict[str, Any]) -> set[KeyPath]:
    """Return the keys of ``data`` that the rules can't rely on: invalid keys, those that an unknown key
    probably means, and mappings of which no key is valid.
    """
    failed: set[KeyPath] = set()
    invalid = {problem.path for problem in problems}
    for problem in problems:
        path, is_unknown = problem.path, problem.code == "key.unknown"
        if not is_unknown and not _is_free(path):
            failed.add(path)
        elif meant := target_of(path):
            failed.add(meant)
        if is_unknown:
            # The first part that is not in the schema, which may wrap the key.
            ends = (end for end in range(1, len(path)) if keys.node_at(path[:end]) is None)
            failed.add(path[: next(ends, len(path))])
        if _is_free(path) and invalid.issuperset((*path[:-1], key) for key in keys.value_at(data, path[:-1])):
            failed.add(path[:-1])
    return failed


def _is_free(path: KeyPath) -> bool:
    """Return True if the user chose the key's name; the mapping's other keys can be checked without it."""
    return not isinstance(path[-1], int) and not keys.known_keys(path[:-1])


def _salvaged(data: dict[str, Any], failed: set[KeyPath]) -> Job | None:
    """Return the data without the invalid keys, with placeholders for required keys, for the rules."""
    for path in failed:
        data = _without(data, tuple(takewhile(lambda segment: not isinstance(segment, int), path)))
    try:
        return kind_of(data).model_validate(data)
    except ValidationError:
        return None


def _without(data: dict[str, Any], path: KeyPath) -> dict[str, Any]:
    parent: Any = data
    for segment in path[:-1]:
        parent = parent.get(segment) if isinstance(parent, dict) else None
    if parent is not None and not isinstance(parent, dict):
        return data
    required = (keys.as_mapping(keys.node_at(path[:-1]) or {}) or {}).get("required", [])
    if path[-1] in required:
        return keys.replaced(data, path, _stand_in(keys.node_at(path) or {}))
    return _removed(data, path) if parent is not None else data


def _removed(data: dict[str, Any], path: KeyPath) -> dict[str, Any]:
    key, rest = path[0], path[1:]
    if not rest:
        return {name: value for name, value in data.items() if name != key}
    assert isinstance(key, str)
    section = data.get(key)
    return data | {key: _removed(section, rest)} if isinstance(section, dict) else data


def _stand_in(node: keys.Node) -> Any:
    first = keys.members(node)[0]
    match first["type"]:
        case "object":
            properties = first.get("properties", {})
            return {key: _stand_in(properties[key]) for key in first.get("required", [])}
        case "integer":
            return first.get("minimum", 0)
        case "number":
            return 0.5
        case "array":
            return []
    return "x"


def _at_value(problem: Problem, places: Mapping[str, KeyPath], values: Mapping[str, Any]) -> Problem:
    """Return the problem moved to the swept value that it concerns; unchanged if there is none."""
    for concerned in ([problem.path], list(problem.reads)):
        for key, place in places.items():
            path = keys.split_key(key)
            if any(related(path, other) for other in concerned):
                below = problem.path[len(path) :] if problem.path[: len(path)] == path else ()
                is_its = below or problem.path == path
                whole = f"{'.'.join(map(str, problem.path))}: {problem.message}"
                message = problem.message if is_its else whole
                if place[1] in _DRAWN:  # the file has no value there
                    message += f" ({key} is {shortened(str(values[key]))})"
                    below = ()
                return replace(problem, path=(*place, *below), message=message)
    return problem


#: A key beside the section, and where.
_Key = tuple[Place, str]


def with_unindented_sections(
    data: Mapping[str, Any], marks: Mapping[KeyPath, Marks], problems: Sequence[Problem]
) -> list[Problem]:
    """Return ``problems``; those that missing indentation causes are replaced by one per section."""
    found = list(problems)
    for section in _empty_sections(data):
        if section not in marks:  # of the command line
            continue
        parent, start = section[:-1], marks[section].key
        places = [*((mark.key, path) for path, mark in marks.items()), *_repeated(problems)]
        following = sorted(
            (place, str(path[-1])) for place, path in places if path[:-1] == parent and place > start
        )
        inner = list(takewhile(_belonging_to(section, marks[section].key.column, problems), following))
        paths = {section, *((*section[:-1], key) for _, key in inner)}
        caused = [each for each in problems if each.path[: len(section)] in paths]
        if inner and caused:
            end = next((place for place, _ in following[len(inner) :]), None)
            first, last = inner[0][0].line, _last_line(section[:-1], inner[-1][0], end, marks)
            lines = f"line {first}" if first == last else f"lines {first}-{last}"
            found = [each for each in found if each not in caused]
            remedy = f"indent {lines} below {section[-1]}:"
            found.append(Problem(section, "is empty", remedy, on_key=True, code="yaml.indentation"))
    return found


def _empty_sections(data: Mapping[str, Any], path: KeyPath = ()) -> Iterator[KeyPath]:
    for key, value in data.items():
        below = (*path, key)
        if isinstance(value, dict):
            yield from _empty_sections(value, below)
        elif value is None and keys.as_mapping(keys.node_at(below) or {}):
            yield below


def _repeated(problems: Sequence[Problem]) -> list[tuple[Place, KeyPath]]:
    """Return the keys that are given once more, which have no marks."""
    return [
        (each.place, each.path) for each in problems if each.place and each.code == marked_yaml.GIVEN_TWICE
    ]


def _belonging_to(section: KeyPath, column: int, problems: Sequence[Problem]) -> Callable[[_Key], bool]:
    """Return what tells whether a key in this column can be one of the section's own."""
    own, beside = set(keys.known_keys(section)), set(keys.known_keys(section[:-1]))
    twice = {path[-1] for _, path in _repeated(problems)}
    must_have_keys = any(each.path == section for each in problems)

    def belongs(key: _Key) -> bool:
        place, name = key
        is_known = name in own if own else name not in beside
        is_at_home = name in beside and name not in twice and not must_have_keys
        return place.column == column and is_known and not is_at_home

    return belongs


def _last_line(parent: KeyPath, last_key: Place, end: Place | None, marks: Mapping[KeyPath, Marks]) -> int:
    """Return the last line of the value of the key at ``last_key``, before ``end``."""
    below = [mark for path, mark in marks.items() if path[: len(parent)] == parent]
    inside = [mark.value.line for mark in below if mark.key >= last_key and (end is None or mark.key < end)]
    return max([last_key.line, *inside])
