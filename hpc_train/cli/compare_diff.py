"""``compare A B --diff``: keys, versions and code in which two runs differ, as diffs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hpc_train.cli.unreadable import find_readable
from hpc_train.console import JSON_VERSION, put, put_json
from hpc_train.errors import ExitCode, UsageError
from hpc_train.report.changed_keys import value_text
from hpc_train.report.run_difference import CodeDifference, RunDifference, run_difference
from hpc_train.run.find import run_names

#: Characters of a value, and names of files, that are printed; JSON has all.
_VALUE_LENGTH = 400
_NAMED = 200


def compare_two(words: Sequence[str], *, as_json: bool) -> ExitCode:
    """Print the differences. Raises UsageError unless the words name two runs."""
    runs = find_readable(words)
    if len(runs) != 2:
        raise UsageError(f"--diff: compares two runs, and these are {len(runs):,}; name two")
    first, second = runs
    names = run_names(runs)
    found = run_difference(first, second, (names[first], names[second]))
    if as_json:
        ids = [{"id": paths.folder.name, "path": str(paths.folder)} for paths in runs]
        put_json({"version": JSON_VERSION, "runs": ids} | found.to_json())
    else:
        put(f"--- {names[first]}", f"+++ {names[second]}", *_lines(found))
    return ExitCode.DONE


def _lines(found: RunDifference) -> Iterator[str]:
    yield f"experiment: {_count(len(found.settings), 'key')}"
    yield from _pairs(found.settings)
    yield f"versions: {_count(len(found.versions), 'package')}"
    yield from _pairs(found.versions)
    if found.code is None:
        yield f"code: unknown: {found.reason}"
    else:
        yield from _code(found.code)


def _pairs(pairs: Mapping[str, tuple[Any, Any]]) -> Iterator[str]:
    """Yield for each key the line of either run that has a value."""
    for key, values in pairs.items():
        for sign, value in zip("-+", values, strict=True):
            if value is not None:
                yield f"{sign} {key}: {_cut(value_text(value))}"


def _code(code: CodeDifference) -> Iterator[str]:
    files = [(mark, path) for mark, path in _marked(code) if path.startswith("tree/")]
    others = sum(1 for _ in _marked(code)) - len(files)
    yield f"code: {_count(len(files), 'file')}"
    if others:
        yield f"hpc-train itself: {_count(others, 'file')}"
    yield from (f"{mark} {path.removeprefix('tree/')}" for mark, path in files[:_NAMED])
    if len(files) > _NAMED:
        yield f"and {len(files) - _NAMED:,} more"
    yield from code.lines


def _marked(code: CodeDifference) -> Iterator[tuple[str, str]]:
    for mark, paths in (("A", code.files.added), ("M", code.files.changed), ("D", code.files.removed)):
        yield from ((mark, path) for path in paths)


def _count(number: int, what: str) -> str:
    if number == 0:
        return f"no {what} differs"
    return f"{number} {what}s differ" if number > 1 else f"1 {what} differs"


def _cut(text: str) -> str:
    return text if len(text) <= _VALUE_LENGTH else f"{text[:_VALUE_LENGTH]}…"
