"""Docs, messages and docstrings use the terms of PyTorch and Slurm, and none of the words in ``WORDS``."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests import language
from tests.docs.pages import PAGES, REPOSITORY

PACKAGE = REPOSITORY / "hpc_train"
_AMOUNT = (
    r"(?:one|twice|times|steps|lines?|rows?|bytes|samples|micro-batches|stages|slots|cores|processes"
    r"|operations|nats)"
)
_PER = (
    r"(?:rank|node|epoch|step|run|GPU|core|job|line|row|file|sample|image|channel|parameter|block|stage"
    r"|token)"
)
#: Words to avoid → what to write instead.
WORDS = {
    r"\bto the bit\b": "bitwise identical, bitwise reproducible",
    r"\bcomes? back by (?:it|them)sel": "resumes automatically",
    r"\b(?:go|goes|going|went|gone) on\b": "resumes, continues",
    r"\bquiet (?:run|one)\b": "an uninterrupted run",
    r"\bbeside training\b": "asynchronous checkpointing",
    r"\bsummed up\b": "gradient accumulation",
    r"\bnumber(?:s')? formats?\b": "precision, dtype",
    rf"\b{_AMOUNT} an? {_PER}\b": "one per rank, steps per epoch",
    r"(?<!there\s)\bis no (?:multiple|key|path|file|folder|tensor|text|rank|name|word|code)\b": "is not a …",
    r"\banew\b": "again",
    r"\bby now\b": "now",
    r"\bmend(?:s|ed|ing)?\b": "fix",
    r"\b(?:lies?|lay)\b": "is, are in",
    r"\b(?:stands?|stood)\b": "is, are in",
    r"\b(?:leaves?|leaving|left) (?:\w+\s)?out\b": "excluded, skipped, omitted",
    r"\branks? (?:holds?|asks? for)\b": "owns, receives, reads, requests",
    r"\bonce an? (?:step|epoch|run)\b(?! (?:is|has|of|that)\b)": "once per step",
    r"\btold\b": "receives, is reported, is signalled",
    r"\bwish(?:es)?\b": "flags, request",
    r"\bheed(?:s|ed)?\b": "handle",
    r"\bpens?\b": "writer",
    r"\bby hand of\b": "by",
    r"(?<!at\s)\bleast\b|\bgreatest\b": "minimum, maximum",
    r"\bso many\b": "N",
    r"\bnot first a sign\b": "starting with a letter or digit",
    r"\babsent:": "default:",
    r"\bit matters not\b": "the result does not depend on",
}
_PATTERNS = {re.compile(word.replace(" ", r"\s+"), re.IGNORECASE): instead for word, instead in WORDS.items()}
#: Words that no name contains.
_METAPHORS = {"told", "wish", "heed", "pen", "birth", "errand", "mended", "settle", "unheard", "anew"}
#: Names in code font, and links to tests, whose text is the name of the test.
_NAMES = re.compile(r"`+[^`\n]+`+|\[[^]\n]*\]\(\.\./tests/[^)\n]*\)")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_use_plain_terms(page: Path) -> None:
    assert list(_hits(page, page.read_text(encoding="utf-8"))) == []


def test_changes_since_the_last_release_use_plain_terms() -> None:
    """In files that towncrier finds by their names, and in a section that has not been released."""
    files = [file for file in (REPOSITORY / "changelog.d").iterdir() if file.name != "README.md"]
    kinds = "added|changed|removed|fixed|security"
    assert [file.name for file in files if not re.fullmatch(rf"\+[\w-]+\.({kinds})\.md", file.name)] == []
    texts = {file: file.read_text(encoding="utf-8") for file in files}
    page = REPOSITORY / "CHANGELOG.md"
    newest = page.read_text(encoding="utf-8").split("\n## ")[1]
    if "unreleased" in newest.partition("\n")[0]:
        texts[page] = newest
    assert [hit for file, text in texts.items() for hit in _hits(file, text)] == []


def test_messages_and_docstrings_use_plain_terms() -> None:
    # First all strings of a file at once, which takes a fraction of the time.
    files = [
        file
        for file in sorted(PACKAGE.rglob("*.py"))
        if any(_hits(file, "\n\0\n".join(text for _, text in _texts(file).strings)))
    ]
    assert [
        hit for file in files for line, text in _texts(file).strings for hit in _hits(file, text, line)
    ] == []


def test_phrases_and_names_are_counted() -> None:
    text = (
        '"""Say what is known. Of two, the one where it is told."""\ndef f(found):\n    each = own = found\n'
    )
    total = language.count(ast.parse(text))
    assert language.rates(total) == {
        "what": 500,
        "Of …": 500,
        "where": 500,
        "say, ask, tell": 1000,
        "names": 3,
    }


def test_names_use_plain_terms() -> None:
    named = [
        f"{file.relative_to(REPOSITORY)}: {name}"
        for file in sorted(PACKAGE.rglob("*.py"))
        for name in sorted(_texts(file).names)
        if _METAPHORS & set(name.lower().split("_"))
    ]
    assert named == []


class _Texts(NamedTuple):
    """The texts and names of a module."""

    #: Line and text of the string constants with spaces: docstrings, messages, parts of f-strings.
    strings: list[tuple[int, str]]
    names: set[str]


def _own_names(tree: ast.Module) -> set[str]:
    """Return the names that a module gives to functions, classes, arguments and variables."""
    names: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.arg(arg=name):
                names.add(name)
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                names.add(name)
    return names


@pytest.mark.parametrize(
    "text", ["Rank 0's pen", "a rank is told so", "the user's wish", "once a step", "three lines a run"]
)
def test_a_word_to_avoid_is_found(text: str) -> None:
    assert len(list(_hits(PACKAGE / "__init__.py", text))) == 1


@functools.cache
def _texts(file: Path) -> _Texts:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    return _Texts(list(_strings(tree)), _own_names(tree))


def _strings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield node.lineno, node.value


def _hits(file: Path, text: str, first_line: int = 1) -> Iterator[str]:
    prose = _NAMES.sub(lambda name: " " * len(name[0]), text)
    for pattern, instead in _PATTERNS.items():
        for match in pattern.finditer(prose):
            line = first_line + prose.count("\n", 0, match.start())
            yield f"{file.relative_to(REPOSITORY)}:{line}: {' '.join(match[0].split())!r}: write {instead}"
