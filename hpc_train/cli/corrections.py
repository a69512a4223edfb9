"""Answers to a command line that can't be parsed: the one that was meant, written out to be typed.

Imported only after such an error, so it may import what takes time.
"""

from __future__ import annotations

import difflib
import inspect
import math
import re
import shlex
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from hpc_train.cli.command_line import OPTIONS, RUN_PARAMETERS
from hpc_train.errors import UsageError
from hpc_train.experiment.config.keys import JOB, all_keys, as_mapping, members, node_at
from hpc_train.experiment.config.problems import KeyPath
from hpc_train.experiment.config.scalars import number_in
from hpc_train.experiment.config.synonyms import (
    OptionRow,
    advice_for,
    key_for,
    other_commands,
    other_options,
    overrides_of,
)
from hpc_train.experiment.validate.loading import why_not_yaml
from hpc_train.registry import nearest
from hpc_train.run.find import find_runs

#: Commands whose results can't be undone: they get no run that the user has not named.
_NEED_A_NAME = {"cancel", "clean", "rm"}
#: Command → the file that its ``-o`` writes.
_OUTPUTS = {"export": "weights.safetensors", "predict": "predictions.jsonl", "report": "report.html"}
#: Keys whose value is the number of ranks, which ``--devices`` is on this machine.
_RANKS = re.compile(rf"{JOB}\.(?:gpus|ranks)_per_node=(.*)")
_YAML = (".yaml", ".yml")
_NUMBER = re.compile(r"-\d+")
_SHORT_WITH_VALUE = re.compile(r"(-[A-Za-z])=?(\d.*)")


def answer(commands: Mapping[str, Any], words: Sequence[str]) -> str | None:
    """Return the answer to ``hpc-train WORDS``, which was rejected; None if nothing is known about it.

    ``commands``: click's commands by name.
    """
    if words[0] in {"-v", "-V", "-version"}:
        return _joined([f"there is no option {words[0]}"], [_line(["--version"])])
    words, problems = _options_last(commands, words), list[str]()
    if not words:
        return None
    if words[0] not in commands:
        problems.append(f"there is no command {words[0]!r}")
        if words[0] in {"help", "version"}:
            named = [word for word in words[1:2] if word in commands]
            return _joined(problems, [_line([*named, f"--{words[0]}"])])
        target = _as_command(words[0], commands)
        if target is None:
            return f"{problems[0]}; `hpc-train --help` lists the commands"
        numbers = [word[1:] for word in words[1:] if _NUMBER.fullmatch(word)]  # `kill -9`, `tail -20`
        lines = ["-n", *numbers] if numbers and target[0] == "logs" else []
        words = [*target, *(word for word in words[1:] if not _NUMBER.fullmatch(word)), *lines]
        if script := next(filter(None, map(why_not_yaml, map(Path, words[1:]))), None):
            return script
    return _Correction(commands, words, problems).answer()


def bad_value(parameter: Any, line_parts: Sequence[str]) -> str | None:
    """Return the answer to an option's number that can't be read or is too small; None without one."""
    names = getattr(parameter, "opts", [])
    value = next((after for word, after in pairwise(line_parts) if word in names), None) or next(
        (word.partition("=")[2] for word in line_parts if word.partition("=")[0] in names), None
    )
    declared = OPTIONS[line_parts[0]].parameters().get(getattr(parameter, "name", None))
    if value is None or declared is None:
        return None
    option, least = max(names, key=len), declared.settings.get("min")
    annotations = map(inspect.get_annotations, OPTIONS[line_parts[0]].__mro__)
    is_whole = any("int" in str(kinds.get(parameter.name)) for kinds in annotations)
    bound = "" if least is None else f" of at least {least:g}"
    problem = f"{option} needs a {'whole ' if is_whole else ''}number{bound}, got {value!r}"
    if option == "--devices":
        rest = [word for word in line_parts if word not in (*names, value, f"{option}={value}")]
        if value.lower() in {"0", "cpu", "none", "no"}:
            return _joined([problem], [_line([*rest, "device=cpu"])], ["without GPUs ranks run on the CPU"])
        if value.lower() in {"auto", "all", "max", "-1", "gpu", "cuda"}:
            return _joined([problem], [_line(rest)], ["without it there is one rank per GPU"])
        if re.fullmatch(r"\d+(,\d+)+", value):
            line = _line([*rest, option, str(value.count(",") + 1)])
            return _joined([problem], [f"`CUDA_VISIBLE_DEVICES={value} {line[1:]}"])
    number = float(number_in(value) or math.nan)
    is_usable = number >= (least or 0) and not (is_whole and number % 1)
    return _joined([problem], [f"{option} {f'{number:.10g}' if is_usable else f'{least or 1:g}'}"])


def _options_last(commands: Mapping[str, Any], words: Sequence[str]) -> list[str]:
    """Move options before the command behind it; empty if there is no command."""
    for index, word in enumerate(words):
        if (
            word in commands
            or word in other_commands()
            or word.endswith(_YAML)
            or not (index or word.startswith("-"))
        ):
            return [word, *words[:index], *words[index + 1 :]]
    return []


def _as_command(word: str, commands: Mapping[str, Any]) -> list[str] | None:
    """Return the words here for a first word that is not a command; None if it means nothing."""
    if word.endswith(_YAML) or why_not_yaml(Path(word)):
        return ["submit", word]
    if written := other_commands().get(word.lower().replace("_", "-")):
        return written.split()
    if close := nearest(word, [*commands, *other_commands()]):
        return other_commands().get(close, close).split()
    try:
        find_runs([word])
    except UsageError:
        return None
    return ["status", word]


def _line(words: Sequence[str]) -> str:
    return f"`{shlex.join(['hpc-train', *words])}`"


def _joined(problems: Sequence[str], lines: Sequence[str], notes: Sequence[str] = ()) -> str:
    written = [", or ".join([f"write {lines[0]}", *lines[1:]])] if lines else []
    return "; ".join(dict.fromkeys([*problems, *notes, *written]))


class _Correction:
    """The words of a command line, translated one by one."""

    def __init__(self, commands: Mapping[str, Any], words: Sequence[str], problems: list[str]) -> None:
        self._commands, self._name, self._rest, self._problems = commands, words[0], list(words[1:]), problems
        command = commands[self._name]
        self._parameters = {parameter.name: parameter for parameter in command.params}
        self._options = {
            option: parameter
            for parameter in command.params
            if parameter.param_type_name == "option"
            for option in parameter.opts
        }
        self._accepts_keys = not self._parameters.keys().isdisjoint({"overrides", "runs_and_overrides"})
        self._unknown: list[str] = []
        self._notes: list[str] = []
        self._positional: list[str] = []
        self._keys: list[str] = []
        self._written: list[str] = []
        self._suffix: str | None = None
        self._is_clear = True

    def answer(self) -> str | None:
        """Return the answer; None if the words themselves are in order."""
        while self._rest:
            word = self._rest.pop(0)
            if not word.startswith("-") or word == "-" or _NUMBER.fullmatch(word):
                self._positional.append(word)
            elif word == "--":
                self._positional += self._rest
                self._rest = []
            elif not self._keep(word) and (other := self._replace(word)):
                words = [*other.split()[1:], *self._positional, *self._written, *self._rest]
                return _Correction(self._commands, words, self._all_problems()).answer()
        problems = self._all_problems()
        self._complete(problems)
        lines = self._lines() if self._is_clear else []
        return _joined(problems, lines, self._notes) if problems else None

    def _all_problems(self) -> list[str]:
        unknown = ", ".join(self._unknown)
        return [*self._problems, *([f"there is no option {unknown}"] if unknown else [])]

    def _keep(self, word: str) -> bool:
        """Keep an option of this command, with its value; False for another word."""
        name, has_value, value = word.partition("=")
        if name not in self._options:
            if word.startswith("--") or word[:2] not in self._options:
                return False
            self._written.append(word)  # `-n20`
            return True
        self._written.append(name)
        if not self._options[name].is_flag and (has_value or self._rest):
            self._written.append(value if has_value else self._rest.pop(0))
        return True

    def _replace(self, word: str) -> str | None:
        """Translate an unknown option; return the command that has it, if that is another one."""
        short = _SHORT_WITH_VALUE.fullmatch(word)
        name, _, attached = (short[1], "=", short[2]) if short else word.partition("=")
        value = attached or next((after for after in self._rest[:1] if not after.startswith("-")), None)
        self._unknown.append(name)
        match = self._row(name, attached, value)
        if match is None:
            if not (self._accepts_keys and self._key(name.lstrip("-"), attached, value)):
                self._misspelled(name)
            return None
        row, takes_value = match
        if takes_value and not attached:
            self._rest.pop(0)
        self._notes += [row.note] if row.note else []
        if row.written.startswith("hpc-train "):
            return row.written
        self._write(row.written, (value or "") if takes_value else "")
        return None

    def _row(self, name: str, attached: str, value: str | None) -> tuple[OptionRow, bool] | None:
        """Return the first row of the option that applies to this command, and whether it takes the value."""
        for row in other_options():
            if row.commands and self._name not in row.commands.split():
                continue
            for alias in row.names.split() if self._applies(row.written) else ():
                other, has_value, wanted = alias.partition("=")
                if other != name.replace("_", "-"):
                    continue
                if not has_value and not attached:
                    return row, False
                if has_value and (value == wanted if wanted else self._may_be_value(row, attached, value)):
                    return row, True
        return None

    def _applies(self, written: str) -> bool:
        first = written.split()[0] if written else ""
        if written in {"FILE", "FILE.yaml"}:
            return "file" in self._parameters
        if written == "RUN":
            return not self._parameters.keys().isdisjoint(RUN_PARAMETERS)
        if first.startswith("-"):
            return first in self._options
        return "=" not in written or self._accepts_keys

    @staticmethod
    def _may_be_value(row: OptionRow, attached: str, value: str | None) -> bool:
        if row.written == "FILE":
            return value is not None and (value.endswith(_YAML) or Path(value).is_file())
        return bool(attached) or row.written == "KEY=VALUE" or _may_be_value(value)

    def _write(self, written: str, value: str) -> None:
        """Add what the table says, with the value; see ``OptionRow.written``."""
        if written.startswith("-o {}."):
            self._suffix = written.removeprefix("-o {}")
        elif written.startswith("-"):
            self._written += [part.format(value) for part in written.split()]
        elif written in {"FILE", "FILE.yaml", "RUN"}:
            self._positional.insert(0, value + written.removeprefix("FILE").removeprefix("RUN"))
        elif written == "KEY=VALUE":
            key, equals, text = value.lstrip("+~").partition("=")
            path = _path_of(key) if equals else None
            self._keys += overrides_of(path, text) if path else [value]
        elif written:
            key, _, template = written.partition("=")
            self._add_key(tuple(key.split(".")), template.format(value))

    def _key(self, name: str, attached: str, value: str | None) -> bool:
        """Translate an option that is a key of the file, here or in another tool; False if it is not."""
        path = _path_of(name)
        advice = None if path else advice_for((name,))
        if path is None and advice is None:
            return False
        has_value = bool(attached) or _may_be_value(value)
        if has_value and not attached:
            self._rest.pop(0)
        if path is None:
            self._notes.append(str(advice).removeprefix("take it out; "))
            self._is_clear = self._is_clear and str(advice).startswith("take it out")
        else:
            self._add_key(path, str(value) if has_value else None)
        return True

    def _add_key(self, path: KeyPath, value: str | None) -> None:
        """Add ``KEY=VALUE``; without a value one that switches the key on."""
        node = node_at(path) or {}
        section = as_mapping(node)
        if value is not None and section is not None and "name" in section.get("properties", {}):
            path = (*path, "name")
        if value is None:
            kinds = {member.get("type") for member in members(node)}
            value = "true" if "boolean" in kinds else "{}" if section is not None else "VALUE"
        self._keys += overrides_of(path, value)

    def _misspelled(self, name: str) -> None:
        """Take the option of this command that is spelled almost like it, or refer to the help."""
        options = [option for option in self._options if option.startswith("--")]
        if close := next(iter(difflib.get_close_matches(name, options, n=1, cutoff=0.75)), None):
            self._written.append(close)
            if not self._options[close].is_flag:
                self._written.append(self._rest.pop(0) if self._rest else "VALUE")
            return
        self._is_clear = False
        self._notes.append(f"{_line([self._name, '--help'])} lists the options")

    def _complete(self, problems: list[str]) -> None:
        """Add what the command requires and is missing; remove what it does not accept."""
        names = [word for word in self._positional if "=" not in word]
        takes_runs = not self._parameters.keys().isdisjoint(RUN_PARAMETERS)
        if "file" in self._parameters:
            names = self._only_file(names)
            if self._parameters["file"].required and (not names or self._positional[0] != names[0]):
                self._positional.insert(0, _experiment_file())
                problems.append("FILE is missing")
        elif self._name in _OUTPUTS and len(names) == 2 and Path(names[1]).suffix:
            problems.append(f"{self._name} takes one RUN")
            self._second_word(names[1])
        elif "run" in self._parameters and len(names) > 1:
            problems.append(f"{self._name} takes one RUN, not {len(names)}")
            del self._positional[1:]
        elif not names and any(map(self._is_required, RUN_PARAMETERS)):
            self._add_run(problems)
        elif names and not takes_runs:  # a command without arguments: `init FILE` means `init -o FILE`
            problems.append(f"{self._name} takes no argument {names[0]}")
            self._positional = []
            if "output" in self._parameters and not self._output_index():
                self._written += ["--root" if Path(names[0]).is_dir() else "-o", names[0]]
        self._add_output(problems)

    def _only_file(self, names: list[str]) -> list[str]:
        """Keep the experiment file alone of several words: ``launch exp.yaml`` after ``accelerate``."""
        files = [name for name in names if name.endswith(_YAML)][:1]
        if not files or not (self._problems or self._unknown):
            return names
        self._positional = [*files, *(word for word in self._positional if word not in names)]
        return files

    def _second_word(self, word: str) -> None:
        """Make a word after RUN the option that it means: ``export RUN a.onnx``, ``predict RUN a.png``."""
        is_data = self._name == "predict" and Path(word).suffix not in {".jsonl", ".csv", ".json"}
        self._positional.remove(word)
        self._written += ["--data" if is_data else "-o", word]

    def _is_required(self, name: str) -> bool:
        return name in self._parameters and self._parameters[name].required

    def _add_run(self, problems: list[str]) -> None:
        problems.append("RUN is missing")
        if self._name in _NEED_A_NAME:
            self._is_clear = False
            self._notes.append("`hpc-train status` lists the runs")
        else:
            self._positional.insert(0, "latest")

    def _output_index(self) -> int | None:
        """Return the index in ``_written`` of the value of ``-o``; None without it."""
        places = (index for index, word in enumerate(self._written) if word in {"-o", "--output"})
        return next((index + 1 for index in places), None)

    def _add_output(self, problems: list[str]) -> None:
        index = self._output_index()
        if index is None and self._is_required("output"):
            file = Path(_OUTPUTS[self._name])
            problems.append("-o FILE is missing")
            self._written += ["-o", str(file.with_suffix(self._suffix or file.suffix))]
        elif index is not None and self._suffix:
            self._written[index] = str(Path(self._written[index]).with_suffix(self._suffix))

    def _lines(self) -> list[str]:
        """Return the command line; two if what was meant differs between a queue and this machine."""
        of_job = [key for key in self._keys if key.startswith(f"{JOB}.")]
        words = [self._name, *self._positional, *(key for key in self._keys if key not in of_job)]
        num_ranks = [match[1] for key in of_job if (match := _RANKS.fullmatch(key))]
        if not of_job or "--devices" not in self._options:
            return [_line([*words, *of_job, *self._written])]
        if "--local" not in self._options:  # always on this machine
            return [_line([*words, *self._written, *(["--devices", num_ranks[-1]] if num_ranks else [])])]
        options, devices = _without_devices(self._written)
        is_local = "--local" in options
        options = [option for option in options if option != "--local"]
        if devices and not num_ranks:
            of_job.append(f"{JOB}.gpus_per_node={devices}")
        number = devices or (num_ranks[-1] if num_ranks else None)
        size = [] if number is None else ["device=cpu"] if number == "0" else ["--devices", number]
        here, queued = _line([*words, *options, "--local", *size]), _line([*words, *of_job, *options])
        if is_local:
            return [here, *([f"in the queue {queued}"] if len(of_job) > len(num_ranks) else [])]
        return [queued, *([f"on this machine {here}"] if number else [])]


def _without_devices(options: Sequence[str]) -> tuple[list[str], str | None]:
    """Return the options without ``--devices``, and its value."""
    if "--devices" not in options[:-1]:
        return list(options), None
    index = options.index("--devices")
    return [*options[:index], *options[index + 2 :]], options[index + 1]


def _may_be_value(word: str | None) -> bool:
    """Return True if the word after an option may be its value, rather than FILE or KEY=VALUE."""
    return word is not None and "=" not in word and not word.endswith(_YAML)


def _path_of(name: str) -> KeyPath | None:
    """Return the key of the file that an option names, as here or as in another tool."""
    path = tuple(name.replace("-", "_").split("."))
    if node_at(path) is not None:
        return path
    if key := key_for(path[-1:]):
        return tuple(key.partition(" ")[0].split("."))
    same = [other for other in all_keys() if other[-1] == path[-1]]
    return same[0] if len(same) == 1 else None


def _experiment_file() -> str:
    """Return the name of the only YAML file in the current folder, else ``exp.yaml``."""
    files = [path.name for path in sorted(Path().iterdir()) if path.suffix in _YAML]
    return files[0] if len(files) == 1 else "exp.yaml"
