"""``stages``: the experiments of a file that run one after the other, each checked as a file of its own.

A stage is a text, the path of a file, or a section of keys that replace those of the rest of the file. A
section with ``export`` or ``evaluate`` is a program that reads the training stage before it. Which run a
training stage it reads is part of its id.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hpc_train.errors import BadFileError
from hpc_train.experiment.config.keys import JOB
from hpc_train.experiment.config.marked_yaml import Document
from hpc_train.experiment.config.problems import KeyPath, Marks, Problem, Source, shown
from hpc_train.experiment.config.schema import Experiment
from hpc_train.experiment.config.training_sections import ModelConfig
from hpc_train.experiment.plan.sweep import run_id
from hpc_train.experiment.validate import model_facts
from hpc_train.experiment.validate.child_process import one_child
from hpc_train.experiment.validate.loading import (
    STAGES,
    Loaded,
    Stage,
    instead_of_missing,
    load_document,
    read,
)

EXPORT, EVALUATE = "export", "evaluate"
#: Keys of the training stage that a stage of ``export`` or ``evaluate`` shares.
_SHARED = ("name", "device", JOB, "environment")
#: The file with the row of a stage of ``evaluate``, in its working folder.
_ROWS = "evaluation.jsonl"
#: Stands for the run of a stage that has problems.
_UNKNOWN = "stage/unknown"


def load_stages(path: Path | Mapping[str, Any], overrides: Sequence[str] = ()) -> list[Loaded]:
    """Return the stages of the file, in order; of a file without ``stages`` the file itself.

    The ``KEY=VALUE`` overrides apply to each training stage. Raises BadFileError with all problems.
    """
    return StagedFile(path, overrides).load_all()


class StagedFile:
    """A file that may have ``stages``, read once."""

    def __init__(self, path: Path | Mapping[str, Any], overrides: Sequence[str] = ()) -> None:
        """``path`` may also be the content of a file, whose files are relative to the current folder.

        Raises BadFileError if it can't be read, or the list of stages is invalid.
        """
        self._name, self._overrides = str(path) if isinstance(path, Path) else "", tuple(overrides)
        self._path = Path(self._name)
        self._document = read(path)
        self._source = Source(self._name, self._document.marks)
        data = self._document.data or {}
        self._entries: list[Any] = []
        if data.get(STAGES) is not None:
            if problems := list(_shape_problems(data[STAGES], self._path)):
                raise BadFileError(self._source.render_all(problems))
            self._entries = data[STAGES]
        #: Valid stages by their place in the list.
        self._loaded: dict[int, Loaded] = {}

    @property
    def has_stages(self) -> bool:
        """Whether the file has the key ``stages``."""
        return bool(self._entries)

    def load_all(self) -> list[Loaded]:
        """Return the checked stages. Raises BadFileError with the problems of all."""
        if not self._entries:
            return [load_document(self._document, self._name, self._overrides)]
        problems: dict[str, None] = {}
        after = weights = None
        ids: dict[str, int] = {}
        with one_child():
            for index in range(len(self._entries)):
                try:
                    loaded = self.load(index, after, weights)
                except BadFileError as error:
                    problems |= dict.fromkeys(error.problems)
                    after, weights = _UNKNOWN, weights or _UNKNOWN
                    continue
                after = name_of(loaded)
                weights = after if isinstance(loaded.experiment, Experiment) else weights
                if (first := ids.setdefault(after, index + 1)) != index + 1:
                    message, remedy = f"is the same run as stage {first}", "take one of the two out"
                    problems[self._problem(index, message, remedy, "stages.same-run")] = None
            if not problems:
                problems = dict.fromkeys(self._misfits())
        if problems:
            raise BadFileError(list(problems))
        return [self._loaded[index] for index in range(len(self._entries))]

    def load(self, index: int, after: str | None, weights: str | None) -> Loaded:
        """Return one checked stage. ``after``, ``weights``: see ``Stage``. Raises BadFileError."""
        entry = self._entries[index]
        section = entry if isinstance(entry, dict) else {}
        program = next((key for key in (EXPORT, EVALUATE) if key in section), None)
        if program is not None:
            loaded = self._load_program(index, program, section, weights)
        elif isinstance(entry, str):
            file = self._path.parent / entry
            document = read(file)
            if STAGES in (document.data or {}):
                message = "has stages itself" if file.resolve() != self._path.resolve() else "names itself"
                remedy = "write its stages here" if "has" in message else "name the file of an experiment"
                raise BadFileError([self._problem(index, f"{entry} {message}", remedy, "stages.cycle")])
            loaded = load_document(document, str(file), self._overrides, weights=weights)
        else:
            document = Document(_merged(self._rest(), section), self._marks_of(index))
            loaded = load_document(document, self._name, self._overrides, weights=weights)
        if loaded.experiment.sweep.model_fields_set - {"max_parallel"}:
            message = "varies keys, and a stage is one run"
            remedy = "take it out, or submit a file per run"
            raise BadFileError([loaded.problem("sweep", message, remedy, "stages.sweep")])
        stage = Stage(index + 1, len(self._entries), after, weights)
        self._loaded[index] = replace(loaded, stage=stage, overrides=self._overrides)
        return self._loaded[index]

    def _misfits(self) -> Iterator[str]:
        """Yield a line per stage whose model can't load the weights of the training stage before it."""
        before: Loaded | None = None
        for _, loaded in sorted(self._loaded.items()):
            if not isinstance(loaded.experiment, Experiment):
                continue
            if (
                before is not None
                and loaded.stage
                and loaded.experiment.model.init_from == loaded.stage.weights
            ):
                assert isinstance(before.experiment, Experiment) and before.stage
                other = before.experiment.model
                if (misfit := _misfit(loaded.experiment.model, other)) is not None:
                    message = f"those of stage {before.stage.number}, {other.name}, do not fit: {misfit}"
                    remedy = "write the model.name and model.args of that stage"
                    yield loaded.problem("model.init_from", message, remedy, "stages.misfit")
            before = loaded

    def _load_program(self, index: int, program: str, section: dict[str, Any], weights: str | None) -> Loaded:
        """Return the program that exports or evaluates the training stage before it."""
        path: KeyPath = (STAGES, index, program)
        before = [self._loaded[number] for number in range(index) if number in self._loaded]
        training = next((one for one in reversed(before) if isinstance(one.experiment, Experiment)), None)
        if weights is None:
            message = f"there is no training stage before it that it could {program}"
            problem = Problem(path, message, "write it after a training stage", on_key=True)
            raise BadFileError([self._source.render(replace(problem, code="stages.no-training"))])
        shared = {} if training is None else training.data
        data = {key: shared[key] for key in _SHARED if key in shared}
        data.setdefault("name", "unknown")
        if isinstance(data.get(JOB), dict):
            data[JOB] = data[JOB] | {"nodes": 1}
        changed = {key: value for key, value in section.items() if key != program}
        data = _merged(data, changed) | {"program": self._program(program, section[program], weights)}
        marks = self._marks_of(index)
        marks |= {("program", *mark[1:]): marks[mark] for mark in list(marks) if mark[:1] == (program,)}
        return load_document(Document(data, marks), self._name)

    def _program(self, program: str, value: Any, weights: str) -> dict[str, Any]:
        # By the place of this run, so that the command does not depend on the folder of runs.
        run = f"{{run}}/../../{weights}"
        if program == EVALUATE:
            command = ["python", "-m", "hpc_train.cli.evaluate", run, _ROWS]
            return {"command": command, "per": "job", "metrics": {"jsonl": _ROWS}}
        target = str(Path(value).expanduser().absolute()).replace("{", "{{").replace("}", "}}")
        return {"command": ["python", "-m", "hpc_train", "export", run, "-o", target], "per": "job"}

    def _rest(self) -> dict[str, Any]:
        return {key: value for key, value in (self._document.data or {}).items() if key != STAGES}

    def _marks_of(self, index: int) -> dict[KeyPath, Marks]:
        """Return the places of a stage's keys: in its section, else in the rest of the file."""
        rest = {path: mark for path, mark in self._document.marks.items() if path[:1] != (STAGES,)}
        section = {
            path[2:]: mark
            for path, mark in self._document.marks.items()
            if path[:2] == (STAGES, index) and len(path) > 2
        }
        return rest | section

    def _problem(self, index: int, message: str, remedy: str, code: str) -> str:
        return self._source.render(Problem((STAGES, index), message, remedy, code=code))


def name_of(loaded: Loaded) -> str:
    """Return ``name/id`` of the run of a stage."""
    return f"{loaded.experiment.name}/{run_id(loaded.experiment)}"


def _misfit(model: ModelConfig, former: ModelConfig) -> str | None:
    """Return why the weights of ``former`` don't fit ``model``; None if they may, or if this is unknown.

    The ranks check it again. Embeddings are excluded: some models convert those of another image size.
    """
    (tensors, head), (former_tensors, _) = (
        model_facts.tensors(m.name, dict(m.args)) for m in (model, former)
    )
    if not tensors or not former_tensors:
        return None
    for name, shape in tensors.items():
        other = former_tensors.get(name, shape)
        if other != shape and name not in head and "embed" not in name:
            return f"{name} is {_size(shape)} here and {_size(other)} there"
    ends = {name[start:] for name in former_tensors for start in _starts(name)}
    if any(name[start:] in ends and "." in name[start:] for name in tensors for start in _starts(name)):
        return None
    return "no tensor has the same name"


def _starts(name: str) -> list[int]:
    return [0, *(index + 1 for index, letter in enumerate(name) if letter == ".")]


def _size(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape))


def _merged(rest: Mapping[str, Any], section: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(rest)
    for key, value in section.items():
        before = result.get(key)
        if value is None:
            result.pop(key, None)
        elif isinstance(value, dict) and isinstance(before, dict):
            result[key] = _merged(before, value)
        else:
            result[key] = value
    return result


def _shape_problems(entries: Any, path: Path) -> Iterator[Problem]:
    """Yield the problems of the list of stages, before any of them is read."""
    example = "write a list of files and sections, like [pretrain.yaml, tune.yaml, {export: w.safetensors}]"
    if not isinstance(entries, list):
        message = f"needs a list of stages, not {shown(entries)}"
        yield Problem((STAGES,), message, example, code="stages.list")
        return
    for index, entry in enumerate(entries):
        place: KeyPath = (STAGES, index)
        if isinstance(entry, dict) and entry:
            yield from _section_problems(place, entry)
        elif not isinstance(entry, str):
            yield Problem(place, f"is {shown(entry)}, not a stage", example, code="stages.list")
        elif not (file := path.parent / entry).is_file():
            yield Problem(place, f"there is no file {file}", instead_of_missing(file), code="stages.file")


def _section_problems(place: KeyPath, entry: Mapping[str, Any]) -> Iterator[Problem]:
    programs = [key for key in (EXPORT, EVALUATE) if key in entry]
    if len(programs) > 1:
        message, remedy = f"is in the stage of {EXPORT}", "write two stages, one of each"
        yield Problem((*place, EVALUATE), message, remedy, on_key=True, code="stages.two")
    others = [key for key in entry if key not in {*programs, *_SHARED, "recovery", "logging"}]
    if programs and others:
        message = f"has no effect in a stage of {programs[0]}"
        remedy = "take it out, or write a training stage before it"
        yield Problem((*place, others[0]), message, remedy, on_key=True, code="stages.not-training")
    if STAGES in entry:
        remedy = "write all stages in one list"
        yield Problem((*place, STAGES), "a stage has no stages", remedy, on_key=True, code="stages.cycle")
    target = entry.get(EXPORT)
    if EXPORT in entry and (not isinstance(target, str) or not target):
        message = f"needs the path of the file to write, not {shown(target)}"
        yield Problem((*place, EXPORT), message, f"write {EXPORT}: weights.safetensors", code="stages.export")
    elif isinstance(target, str) and not Path(target).expanduser().absolute().parent.is_dir():
        folder = Path(target).parent
        remedy = "make the folder first, or write another path"
        yield Problem((*place, EXPORT), f"there is no folder {folder}", remedy, code="stages.export")
    if EVALUATE in entry and entry[EVALUATE] is not True:
        message = f"is {shown(entry[EVALUATE])}, and only true starts an evaluation"
        yield Problem((*place, EVALUATE), message, f"write {EVALUATE}: true", code="stages.evaluate")


def described(loaded: Loaded) -> str:
    """Return ``stage 2 of 3``, with its file if it has one of its own."""
    assert loaded.stage is not None
    return f"stage {loaded.stage.number} of {loaded.stage.of}"
