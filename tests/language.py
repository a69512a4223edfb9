"""Counts phrases and names of the package's own dialect: ``python -m tests.language [--files]``.

Docstrings should read like those of other projects (torchtitan, per 1,000 sentences: "what" 2, say or tell 1;
bindings named ``found``, ``said`` and the like: 23 of 26,374). Exit code 1 if a count exceeds its limit.
``LIMITS`` have reached ``AIMS`` and may only fall.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "hpc_train"
#: Counted per 1,000 sentences of docstrings.
PHRASES = {
    "what": re.compile(r"\bwhat\b", re.IGNORECASE),
    "Of …": re.compile(r"^Of\b"),
    "where": re.compile(r"\bwhere\b", re.IGNORECASE),
    "say, ask, tell": re.compile(r"\b(?:sa(?:y|ys|id)|ask(?:s|ed)?|tells?|told)\b", re.IGNORECASE),
}
#: Variables and arguments with these names are counted themselves.
NAMES = frozenset({"found", "said", "each", "known", "given", "made", "kept", "words", "own"})
AIMS = dict.fromkeys(PHRASES, 8.0) | {"names": 100.0}
LIMITS = AIMS

_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def sentences(tree: ast.AST) -> Iterator[str]:
    """Yield the sentences of a module's docstrings."""
    for node in ast.walk(tree):
        if isinstance(node, _DOCUMENTED) and (text := ast.get_docstring(node)):
            yield from re.split(r"(?<=[.:;!?])\s+|\n\s*\n", text.strip())


def names(tree: ast.AST) -> Iterator[str]:
    """Yield the name of each binding: assignments, loop variables and arguments."""
    for node in ast.walk(tree):
        if isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id


def count(tree: ast.AST) -> Counter[str]:
    """Return the numbers of ``sentences``, of each phrase and of ``names``, in one module."""
    total: Counter[str] = Counter(names=sum(name in NAMES for name in names(tree)))
    for sentence in sentences(tree):
        total["sentences"] += 1
        total.update({phrase: len(pattern.findall(sentence)) for phrase, pattern in PHRASES.items()})
    return total


def rates(total: Counter[str]) -> dict[str, float]:
    """Return phrases per 1,000 sentences, and the number of names."""
    per_1000 = {phrase: round(1000 * total[phrase] / max(total["sentences"], 1), 1) for phrase in PHRASES}
    return per_1000 | {"names": float(total["names"])}


def main() -> int:
    by_file = {file: count(ast.parse(file.read_text("utf-8"))) for file in sorted(PACKAGE.rglob("*.py"))}
    total = sum(by_file.values(), Counter[str]())
    if "--files" in sys.argv:
        for file, counts in by_file.items():
            print(file.relative_to(PACKAGE.parent), *(f"{name}: {counts[name]}" for name in AIMS), sep="  ")
    measured = rates(total)
    for name, rate in measured.items():
        print(f"{name:16}{rate:8g}  limit {LIMITS[name]:g}, aim {AIMS[name]:g}")
    return int(any(rate > LIMITS[name] for name, rate in measured.items()))


if __name__ == "__main__":
    sys.exit(main())
