"""``compare A B --diff``: keys, versions and code in which two runs differ, as diffs."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, TypedDict

from hpc_train.cli.many_runs import find_readable
from hpc_train.console import JSON_VERSION, put, put_json
from hpc_train.errors import ExitCode, HpcTrainError, UsageError, shortened
from hpc_train.paths import RunPaths
from hpc_train.report.changed_keys import changed_keys, value_text
from hpc_train.run.code import snapshot
from hpc_train.run.create import newest_versions
from hpc_train.run.files import UnreadableFileError, open_regular
from hpc_train.run.find import run_names
from hpc_train.run.run_status import run_facts
from hpc_train.run.versions import differences

#: Maximum number of printed characters of a value, and of file names; JSON has all.
_VALUE_LENGTH, _NAMED = 400, 200
#: Larger files are only named: the time to compare lines grows with the square of their number.
_MAX_FILE_BYTES, _MAX_FILE_LINES = 256 * 1024, 5_000
#: Maximum number of lines of all files' diffs.
_MAX_LINES = 2_000
_TREE = f"{snapshot.TREE}/"


class ComparedIds(TypedDict):
    """One of two runs."""

    id: str
    path: str


class CodeDifferenceJson(TypedDict):
    """Files in which two code snapshots differ."""

    added: list[str]
    changed: list[str]
    removed: list[str]
    #: Lines of a unified diff; the last line counts omitted lines.
    diff: list[str]


class Difference(TypedDict):
    """The differences of the second of two runs from the first."""

    version: int
    runs: list[ComparedIds]
    #: Key → its two values.
    settings: dict[str, list[Any]]
    #: Package → its two versions.
    versions: dict[str, list[Any]]
    code: CodeDifferenceJson | None
    #: Why there is no ``code``.
    code_unknown: str | None


def compare_two(arguments: Sequence[str], *, as_json: bool) -> ExitCode:
    """Print the differences. Raises UsageError unless the words name two runs."""
    runs = find_readable(arguments)
    if len(runs) != 2:
        raise UsageError(f"--diff: compares two runs, and these are {len(runs):,}; name two")
    answer = difference(runs)
    if as_json:
        put_json(answer)
        return ExitCode.DONE
    names = run_names(runs)
    put(
        *(f"{sign} {names[paths]}" for sign, paths in zip(("---", "+++"), runs, strict=True)),
        *difference_text(answer),
        *(answer["code"]["diff"] if answer["code"] else ()),
    )
    return ExitCode.DONE


def difference(runs: Sequence[RunPaths]) -> Difference:
    """Return the differences of the second of two runs from the first."""
    names, keys = run_names(runs), changed_keys(runs)
    before, after = (keys[paths] for paths in runs)
    code, reason = _code(runs, [names[paths] for paths in runs])
    return Difference(
        version=JSON_VERSION,
        runs=[ComparedIds(id=paths.folder.name, path=str(paths.folder)) for paths in runs],
        settings={key: [before.get(key), after.get(key)] for key in {**before, **after}},
        versions={
            package: list(pair)
            for package, pair in differences(*(newest_versions(run_facts(paths)) for paths in runs)).items()
        },
        code=code,
        code_unknown=reason,
    )


def difference_text(answer: Difference) -> list[str]:
    """Return the lines to print, without the diff of the code."""
    code = answer["code"]
    return [
        f"experiment: {count_text(len(answer['settings']), 'key')}",
        *pair_lines(answer["settings"]),
        f"versions: {count_text(len(answer['versions']), 'package')}",
        *pair_lines(answer["versions"]),
        *([f"code: unknown: {answer['code_unknown']}"] if code is None else _code_lines(code)),
    ]


def pair_lines(pairs: Mapping[str, Sequence[Any]]) -> Iterator[str]:
    """Yield for each key the line of either run that has a value."""
    for key, values in pairs.items():
        for sign, value in zip("-+", values, strict=True):
            if value is not None:
                yield f"{sign} {key}: {shortened(value_text(value), _VALUE_LENGTH)}"


def _code_lines(code: CodeDifferenceJson) -> Iterator[str]:
    paths = (("A", code["added"]), ("M", code["changed"]), ("D", code["removed"]))
    marked = [(mark, path) for mark, of_kind in paths for path in of_kind]
    files = [f"{mark} {path.removeprefix(_TREE)}" for mark, path in marked if path.startswith(_TREE)]
    yield f"code: {count_text(len(files), 'file')}"
    if others := len(marked) - len(files):
        yield f"hpc-train itself: {count_text(others, 'file')}"
    yield from files[:_NAMED]
    if len(files) > _NAMED:
        yield f"and {len(files) - _NAMED:,} more"


def count_text(number: int, what: str) -> str:
    """Return ``no key differs``, ``1 key differs``, ``2 keys differ``."""
    if number == 0:
        return f"no {what} differs"
    return f"{number} {what}s differ" if number > 1 else f"1 {what} differs"


def _code(runs: Sequence[RunPaths], names: Sequence[str]) -> tuple[CodeDifferenceJson | None, str | None]:
    """Return ``code`` of ``compare --diff --json``, or why the difference is unknown."""
    try:
        folders = [snapshot.linked(paths) for paths in runs]
        before, after = folders
        if before is None or after is None:
            return None, f"{names[folders.index(None)]} has no snapshot of its code"
        files = snapshot.differences(before, after)
    except HpcTrainError as error:
        return None, str(error)
    diff = list(islice(_diff(before, after, files, names), _MAX_LINES + 1))
    if len(diff) > _MAX_LINES:
        diff[_MAX_LINES:] = [f"… cut after {_MAX_LINES:,} lines"]
    return (
        CodeDifferenceJson(added=files.added, changed=files.changed, removed=files.removed, diff=diff),
        None,
    )


def _diff(before: Path, after: Path, files: snapshot.Differences, names: Sequence[str]) -> Iterator[str]:
    """Yield unified diffs of the work tree's files in two snapshots, without line ends."""
    for path in sorted([*files.added, *files.changed, *files.removed]):
        if not path.startswith(_TREE):
            continue
        name = path.removeprefix(_TREE)
        old = [] if path in files.added else _content(before, path)
        new = [] if path in files.removed else _content(after, path)
        if old is None or new is None:
            yield f"{name}: not compared: too long, not text, or not readable"
        else:
            first, second = (f"{run}/{name}" for run in names)
            yield from difflib.unified_diff(old, new, first, second, lineterm="")


def _content(folder: Path, path: str) -> list[str] | None:
    """Return the lines of a file; None if they can't be compared."""
    file_path = Path(os.path.realpath(folder / path))  # unlike resolve, accepts a link that leads to itself
    if not file_path.is_relative_to(os.path.realpath(folder)):
        return None  # from a manifest or a link that somebody else wrote
    try:
        with open_regular(file_path) as file:
            content = file.read(_MAX_FILE_BYTES + 1)
        lines = content.decode("utf-8").splitlines()
    except (OSError, UnreadableFileError, UnicodeDecodeError):
        return None
    is_text = len(content) <= _MAX_FILE_BYTES and b"\0" not in content
    return lines if is_text and len(lines) <= _MAX_FILE_LINES else None
