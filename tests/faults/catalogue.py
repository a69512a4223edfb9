"""The catalogue of faults, and which tests say that they cause them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import yaml

TESTS = Path(__file__).parents[1]
FILE = Path(__file__).with_name("catalogue.yaml")


@dataclass(frozen=True)
class Row:
    """A fault, and what must happen."""

    number: int
    fault: str
    promise: str
    #: What brings the rest and is not built yet, and what is shown until then.
    waits_for: str = ""
    #: What can't be caused on the machines that tests run on.
    not_here: str = ""
    #: What happens in place of the promise, or of a part of it, on purpose.
    departs: str = ""


@cache
def catalogue() -> list[Row]:
    return [Row(**row) for row in yaml.safe_load(FILE.read_text(encoding="utf-8"))]


@cache
def marked_tests() -> dict[str, set[int]]:
    """Return by ``tests/….py::test_…`` the faults that a test, one of its cases, or its whole file carries.

    Read, not imported: hundreds of files import torch.
    """
    found: dict[str, set[int]] = {}
    for path in sorted(TESTS.rglob("test_*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        of_all = {number for node in tree.body if _is_pytestmark(node) for number in _numbers(node)}
        for node in tree.body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                own = {number for mark in node.decorator_list for number in _numbers(mark)}
                if own | of_all:
                    found[f"{path.relative_to(TESTS.parent)}::{node.name}"] = own | of_all
    return found


def _is_pytestmark(node: ast.stmt) -> bool:
    targets = node.targets if isinstance(node, ast.Assign) else []
    return any(isinstance(target, ast.Name) and target.id == "pytestmark" for target in targets)


def _numbers(tree: ast.AST) -> Iterator[int]:
    """Yield the arguments of each ``pytest.mark.fault(…)`` within."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.mark.fault":
            for argument in node.args:
                assert isinstance(argument, ast.Constant), f"fault({ast.unparse(argument)}): write a number"
                yield int(argument.value)
