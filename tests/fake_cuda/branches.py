"""Every place in hpc_train that depends on CUDA, and a test without a GPU that executes it.

    python -m tests.fake_cuda.branches [TESTS …]    runs tests, by default those of the list, and writes it

A place is the smallest statement with ``torch.cuda``, ``is_cuda`` or a comparison with ``"cuda"``; of an
``if`` the branch for CUDA. ``branches.json`` has a test for each, or null. The tests run with the stand-in
and fresh ranks, in each of whose processes ``site/sitecustomize.py`` notes the lines.
"""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tests import fake_cuda, warm

ROOT = Path(__file__).parents[2]
LIST = Path(__file__).with_name("branches.json")
_SITE = Path(__file__).with_name("site")
#: Of ``tests.fake_cuda.site.sitecustomize``: the lines to be noted, and where.
LINES, NOTES = "HPC_TRAIN_TEST_LINES", "HPC_TRAIN_TEST_NOTES"


class Place(NamedTuple):
    """``key`` has no line number, so that it survives changes elsewhere in the file."""

    key: str
    file: str
    line: int


def places(root: Path = ROOT) -> list[Place]:
    """Return all places of the package."""
    found = []
    for path in sorted((root / "hpc_train").rglob("*.py")):
        if "examples" in path.parts:
            continue
        file = path.relative_to(root).as_posix()
        source = path.read_text(encoding="utf-8")
        numbers: dict[str, int] = {}
        for name, statement, line in _statements(ast.parse(source), "", None):
            text = f"{file}::{name}::{' '.join(ast.unparse(statement).splitlines()[0].split())}"
            numbers[text] = numbers.get(text, 0) + 1
            key = text if numbers[text] == 1 else f"{text} #{numbers[text]}"
            found.append(Place(key, file, line))
    return found


def _statements(node: ast.AST, name: str, after: ast.stmt | None) -> Iterator[tuple[str, ast.stmt, int]]:
    """Yield function, statement and the line that proves that it was executed for CUDA."""
    for field in ("body", "orelse", "finalbody", "handlers", "cases"):
        children = getattr(node, field, None)
        if not isinstance(children, list) or not children:
            continue
        for child, following in zip(children, [*children[1:], after], strict=True):
            own = name
            if isinstance(child, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
                own = f"{name}.{child.name}".lstrip(".")
            elif isinstance(child, ast.stmt) and (header := _header(child)) and any(map(_is_cuda, header)):
                yield name, child, _proof(child, following).lineno
            yield from _statements(child, own, following)


def _header(statement: ast.stmt) -> list[ast.AST]:
    """Return the expressions of a statement without those of the statements in it."""
    if isinstance(statement, ast.AnnAssign):  # the annotation is not executed
        roots: list[ast.AST] = [] if statement.value is None else [statement.value]
    elif hasattr(statement, "body"):
        roots = [
            getattr(statement, field) for field in ("test", "iter", "subject") if hasattr(statement, field)
        ]
        roots += getattr(statement, "items", [])
    else:
        roots = [statement]
    return [node for root in roots for node in ast.walk(root)]


def _is_cuda(node: ast.AST) -> bool:
    if isinstance(node, ast.Attribute):
        value = node.value
        return node.attr == "is_cuda" or (
            node.attr == "cuda" and isinstance(value, ast.Name) and value.id == "torch"
        )
    if isinstance(node, ast.Compare):
        return any(isinstance(each, ast.Constant) and each.value == "cuda" for each in node.comparators)
    return False


def _proof(statement: ast.stmt, following: ast.stmt | None) -> ast.stmt:
    if not isinstance(statement, ast.If):
        return statement
    negated = isinstance(statement.test, ast.Compare) and isinstance(statement.test.ops[0], ast.NotEq)
    if not negated:
        return statement.body[0]
    return statement.orelse[0] if statement.orelse else following or statement


def executed(tests: list[str]) -> dict[str, str]:
    """Run the tests; return by key the first that executed a place."""
    known = places()
    lines: dict[str, list[int]] = {}
    for place in known:
        lines.setdefault(place.file, []).append(place.line)
    with tempfile.TemporaryDirectory() as folder:
        notes, wanted = Path(folder) / "notes", Path(folder) / "lines.json"
        notes.touch()
        wanted.write_text(json.dumps(lines), encoding="utf-8")
        search = os.pathsep.join(filter(None, (str(_SITE), os.environ.get("PYTHONPATH"))))
        variables = {LINES: str(wanted), NOTES: str(notes), "PYTHONPATH": search, warm.FRESH: "1"}
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests]
        environment = os.environ | fake_cuda.environment() | variables
        if subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode:
            raise SystemExit("the tests must pass with the fake device")
        first: dict[tuple[str, int], str] = {}
        for note in notes.read_text(encoding="utf-8").splitlines():
            test, file, line = note.split("\t")
            first.setdefault((file, int(line)), test)
    return {place.key: first[place[1:]] for place in known if place[1:] in first}


def main() -> None:
    old = json.loads(LIST.read_text(encoding="utf-8")) if LIST.exists() else {}
    named = sorted({test for test in old.values() if test is not None})
    found = executed(sys.argv[1:] or named)
    table = {place.key: found.get(place.key) or old.get(place.key) for place in places()}
    LIST.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
    missing = [key for key, test in table.items() if test is None]
    print(
        f"{len(table) - len(missing)} of {len(table)} places are executed; without a test:",
        *missing,
        sep="\n  ",
    )


if __name__ == "__main__":
    main()
