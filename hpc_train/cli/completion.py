"""``completion``: the shells' scripts, and the candidates for which they ask on each Tab (``complete``).

A shell passes the line up to the cursor; the first line of the answer says how it inserts the candidates that
follow, one per line. Nothing that takes long is done: folders are listed, no run is opened.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from hpc_train.cli.completion_scripts import SCRIPTS
from hpc_train.console import one_line, put
from hpc_train.errors import ExitCode, UsageError
from hpc_train.paths import expanded, runs_root

#: Entries of a folder that are looked at, and candidates that are offered.
_MAX_ENTRIES, _MAX_CANDIDATES = 50_000, 1000
_YAML = (".yaml", ".yml")
#: Option → its values, where its metavar does not say.
_VALUES: dict[str, Callable[[], Iterable[str]]] = {
    "--launcher": lambda: _parts("launchers"),
    "--task": lambda: _parts("tasks"),
    "--code": lambda: ["new"],
    "--format": lambda: ["safetensors", "onnx", "torch-export"],
    "--from": lambda: ["list", *_examples()],
}
_PLAIN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")
#: Key of the file → the group of parts of which it names one.
_PARTS = {"task": "tasks", "data.name": "datasets", "parallel.strategy": "strategies"}


def completion(shell: str) -> ExitCode:
    """Print the script that makes ``shell`` complete; raises UsageError for an unknown one."""
    if shell not in SCRIPTS:
        raise UsageError(f"completion: {shell!r} is not supported; write one of {', '.join(SCRIPTS)}")
    put(SCRIPTS[shell].rstrip("\n"))
    return ExitCode.DONE


def complete(line: str, word_breaks: str, program: Any) -> ExitCode:
    """Print the candidates for the last word of ``line``.

    ``word_breaks``: characters at which the shell begins another word: what is before ``=`` or ``:`` is not
    repeated if they are among them, as in bash.
    ``program``: the command with its subcommands.
    """
    *before, word = _words(line)
    found = _candidates(program, before[1:], word)
    kept = max(word.rfind(char) if char in word_breaks else -1 for char in "=:") + 1
    names = sorted({name for name in found.names if name.startswith(word)})[:_MAX_CANDIDATES]
    # A name that would act on the terminal is none that can be typed.
    put(_mode(names, found), *(name[kept:] for name in names if one_line(name) == name))
    return ExitCode.DONE


@dataclass(frozen=True)
class _Candidates:
    names: Iterable[str] = ()
    #: Paths, which the shell quotes.
    are_files: bool = False


def _mode(names: Sequence[str], found: _Candidates) -> str:
    """Return how they are inserted. ``folders`` and ``open``: more follows without a space."""
    is_open = all(name.endswith(("=", "/")) for name in names)
    if found.are_files:
        return "folders" if is_open else "files"
    return "open" if is_open else "words"


def _words(line: str) -> list[str]:
    """Return the words of a line, the last one as far as it was typed; two at least."""
    words: list[str] = []
    for quote in ("", '"', "'"):  # the last word's may still be open
        try:
            words = shlex.split(line + quote)
            break
        except ValueError:
            continue
    is_between = not line or (line[-1].isspace() and line[-2:-1] != "\\")
    return [*(words or [""]), ""] if is_between or len(words) < 2 else words


def _candidates(program: Any, before: Sequence[str], word: str) -> _Candidates:
    commands = {name: each for name, each in program.commands.items() if not each.hidden}
    if not before:
        of_program = [option for each in program.params for option in each.opts]
        return _Candidates([*of_program, "--help"] if word.startswith("-") else commands)
    command = commands.get(before[0])
    if command is None:
        return _Candidates()
    options = {opt: each for each in command.params for opt in each.opts if opt.startswith("-")}
    given, last = before[1:], options.get(before[-1])
    if last is not None and not last.is_flag:
        return _option_values(last, word)
    if word.startswith("--") and "=" in word:
        name, _, value = word.partition("=")
        found = _option_values(options[name], value) if name in options else _Candidates()
        return _Candidates([f"{name}={each}" for each in found.names], found.are_files)
    if word.startswith("-"):
        return _Candidates([*(set(options) - set(given)), "--help"])
    return _argument_values(_argument(command, options, given), word)


def _option_values(option: Any, word: str) -> _Candidates:
    metavar = option.metavar or ""
    for name in option.opts:
        if name in _VALUES:
            return _Candidates(_VALUES[name]())
    if metavar.startswith("KEY"):
        return _Candidates(key.rstrip("=") for key in _keys(""))
    is_path = metavar.startswith(("FILE", "PATH")) or "--data" in option.opts
    return _Candidates(_files(word, ()), are_files=True) if is_path else _Candidates()


def _argument(command: Any, options: dict[str, Any], given: Sequence[str]) -> str:
    """Return the metavar of the argument that comes next; empty if none does."""
    count, takes_value = 0, False
    for word in given:
        if takes_value or word.startswith("-"):
            option = options.get(word)
            takes_value = not takes_value and option is not None and not option.is_flag
        else:
            count += 1
    arguments = [each for each in command.params if not each.opts[0].startswith("-")]
    for each in arguments:
        if each.nargs == -1 or count == 0:
            return str(each.metavar or "").strip("[]")
        count -= 1
    return ""


def _argument_values(metavar: str, word: str) -> _Candidates:
    kinds = metavar.split("|")
    if "FILE" in kinds:
        return _Candidates(_files(word, _YAML), are_files=True)
    if "SHELL" in kinds:
        return _Candidates(SCRIPTS)
    names: list[str] = []
    if "RUN" in kinds:
        names += _runs(word)
    if "KEY=VALUE" in kinds and (word or "RUN" not in kinds):
        names += _keys(word)
    return _Candidates(names)


def _entries(folder: Path) -> Iterator[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            yield from islice(entries, _MAX_ENTRIES)
    except OSError:
        return


def _files(word: str, suffixes: tuple[str, ...]) -> Iterator[str]:
    """Yield folders, and files with one of the suffixes; without suffixes all."""
    place, _, part = word.rpartition("/")
    prefix = word[: len(word) - len(part)]
    for entry in _entries(expanded(prefix or place or ".")):
        if entry.name[0] == "." and not part.startswith("."):
            continue
        if entry.is_dir():
            yield f"{prefix}{entry.name}/"
        elif not suffixes or entry.name.endswith(suffixes):
            yield prefix + entry.name


def _runs(word: str) -> Iterator[str]:
    """Yield experiments and, once a part of it is typed, ids of runs; below a folder ``name/id``."""
    root = runs_root()
    experiment, slash, _ = word.partition("/")
    if slash:
        yield from (f"{experiment}/{entry.name}" for entry in _shown(root / experiment))
        return
    for folder in _shown(root):
        yield folder.name
        if word:
            yield from (entry.name for entry in _shown(Path(folder)) if entry.name.startswith(word))


def _shown(folder: Path) -> Iterator[os.DirEntry[str]]:
    """Return the folders whose names a shell takes as they are: others can't be ours."""
    return (entry for entry in _entries(folder) if _PLAIN.fullmatch(entry.name) and entry.is_dir())


def _keys(word: str) -> Iterator[str]:
    """Yield ``key=`` for the keys of the file; behind a ``=`` the key's values."""
    from hpc_train.config.keys import all_keys, as_mapping, node_at
    from hpc_train.config.problems import dotted

    key, is_value, _ = word.partition("=")
    if is_value:
        yield from (f"{key}={value}" for value in _key_values(key))
        return
    for path in all_keys():
        node = node_at(path)
        if node is not None and not (as_mapping(node) or {}).get("properties"):
            yield f"{dotted(path)}="


def _key_values(key: str) -> Iterator[str]:
    from hpc_train.config.keys import members, node_at

    if key in _PARTS:
        yield from _parts(_PARTS[key])
    for member in members(node_at(tuple(key.split("."))) or {}):
        yield from map(str, member.get("enum", ()))
        yield from (str(member["const"]) for _ in ("const",) if isinstance(member.get("const"), str))
        yield from ("true", "false") if member.get("type") == "boolean" else ()


def _parts(group: str) -> Iterable[str]:
    from hpc_train.registry import parts

    return parts(group)


def _examples() -> Iterable[str]:
    from hpc_train.cli.init import EXAMPLES

    return (path.stem for path in EXAMPLES.glob("*.yaml"))
