"""Mutates sampled lines of the package and tells which mutants no test notices.

    python -m tests.mutation --num 40 --seed 1 --out benchmarks/results/mutation.json

cosmic-ray's operators change one place in a copy of the repository. Each mutant is tested by the fast tests
that run the changed lines (found by coverage, once), then by all fast tests, because commands in child
processes are not covered, then, with ``--slow``, by the slow tests of its package. The first failure ends it.
A mutant that passes everything is a survivor, and is listed with its difference. Mutants that change only
annotations, docstrings or other code that only type checkers use are not counted.

All fast tests take minutes per mutant. To test many mutants of some packages, use ``--near``, which runs
only the tests that run the changed lines. The coverage is measured with the folders of these packages,
tests/cli and tests/end_to_end. A survivor lists how many of their fast tests run its lines:

    python -m tests.mutation --packages recovery checkpoint --near --jobs 2 --num 200

``--out`` is written after each mutant. ``--first N`` continues an interrupted run at its mutant N; with
``--copy``, the copy of the repository and the coverage are kept and reused.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import functools
import importlib.util
import json
import math
import multiprocessing
import os
import platform
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from itertools import islice
from multiprocessing.context import ForkServerContext
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NoReturn

import pytest
from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.operators.operator import Operator
from cosmic_ray.plugins import get_operator, operator_names
from coverage import CoverageData

REPOSITORY = Path(__file__).parents[1]
#: Limit of one stage, in seconds: a mutant may loop forever.
STAGE_LIMIT_S = 1800
#: Limit of one fast test, which takes half a second without a mutant.
TEST_LIMIT_S = 120
#: Limit of the first stage's tests, so that it takes seconds.
COVERING_TESTS = 150
FAST = "not slow and not gpu and not soak"
SLOW = "slow and not slurm and not gpu and not soak"
#: Packages that group others.
WINGS = ("experiment", "training")
#: Folders of tests that run code of all packages.
WIDE = ("tests/cli", "tests/end_to_end")
#: Decorators that only type checkers use.
_TYPING_DECORATORS = {"abstractmethod", "final", "overload", "override", "runtime_checkable"}


@dataclass(frozen=True)
class Mutant:
    """``module`` is relative to the repository; ``code`` is the whole module, changed in one place.

    ``lines`` are the numbers of the original's lines that changed; after an insertion, of the line before it.
    ``statement`` are those of the innermost statements with a changed line, without the bodies of these.
    """

    module: str
    operator: str
    difference: str
    code: str
    lines: tuple[int, ...] = ()
    statement: tuple[int, ...] = ()


#: Module, relative to the repository → line → ids of the tests that run it.
RunBy = dict[str, dict[int, set[str]]]


def sampled(
    num: int, seed: int, packages: Sequence[str] = (), repository: Path = REPOSITORY
) -> Iterator[Mutant]:
    """Yield ``num`` different mutants: modules are weighted by their length, operators and places are not.

    ``packages`` are names in ``hpc_train``; none means all.
    """
    draw = random.Random(seed)
    package = repository / "hpc_train"
    modules = sorted(path for part in packages or [""] for path in (package / part).rglob("*.py"))
    lengths = [path.stat().st_size for path in modules]
    operators = [name for name in sorted(operator_names()) if not get_operator(name).arguments()]
    found: set[tuple[Path, str]] = set()
    while len(found) < num:
        (path,) = draw.choices(modules, lengths)
        name = draw.choice(operators)
        original = path.read_text()
        changed = _mutated(original, get_operator(name)(), draw)
        if changed is None or (path, changed) in found:
            continue
        found.add((path, changed))
        module = str(path.relative_to(repository))
        difference = _difference(original, changed)
        lines = _changed_lines(difference)
        yield Mutant(module, name, difference, changed, lines, _statement_lines(original, lines))


def _mutated(original: str, operator: Operator, draw: random.Random) -> str | None:
    places = [place for node in _nodes(original) for place in operator.mutation_positions(node)]
    if not places:
        return None
    changed = mutate_code(original, operator, draw.randrange(len(places)))
    is_code = changed is not None and _meaning(changed) not in {None, _meaning(original)}
    return changed if is_code else None


@functools.cache
def _nodes(code: str) -> list[Any]:
    return list(ast_nodes(get_ast(code)))


class _WithoutNotes(ast.NodeTransformer):
    """Removes docstrings, annotations and other code that only tools read."""

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        node.annotation = ast.Constant(None)
        return self.generic_visit(node)

    def visit_arg(self, node: ast.arg) -> ast.AST:
        node.annotation = None
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.returns = None
        node.decorator_list = [each for each in node.decorator_list if _name(each) not in _TYPING_DECORATORS]
        return self.generic_visit(node)

    def visit_If(self, node: ast.If) -> ast.AST:
        return ast.Pass() if "TYPE_CHECKING" in ast.dump(node.test) else self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        if _name(node) == "dataclass":
            node.keywords = [each for each in node.keywords if each.arg != "frozen"]
        if _name(node) == "cast" and node.args:
            node.args[0] = ast.Constant(None)
        return self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        return ast.Pass() if isinstance(node.value, ast.Constant) else self.generic_visit(node)


def _name(node: ast.expr) -> str:
    """Return the last name of ``name``, ``module.name`` or a call of either."""
    if isinstance(node, ast.Call):
        node = node.func
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def _meaning(code: str) -> str | None:
    """Return the syntax tree without notes; None for what is not Python, like ``def f(<<, x)``."""
    try:
        return ast.dump(_WithoutNotes().visit(ast.parse(code)))
    except SyntaxError:
        return None


def _difference(original: str, changed: str) -> str:
    lines = difflib.unified_diff(original.splitlines(), changed.splitlines(), lineterm="", n=0)
    return "\n".join(line for line in lines if not line.startswith(("---", "+++")))


def _changed_lines(difference: str) -> tuple[int, ...]:
    changed: set[int] = set()
    for start, count in re.findall(r"^@@ -(\d+)(?:,(\d+))? ", difference, re.MULTILINE):
        changed |= set(range(int(start), int(start) + max(1, int(count or 1))))
    return tuple(sorted(changed))


def _statement_lines(code: str, lines: tuple[int, ...]) -> tuple[int, ...]:
    spans = []
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.stmt):
            body = getattr(node, "body", None)
            end = body[0].lineno - 1 if body else node.end_lineno or node.lineno
            spans.append((node.lineno, max(node.lineno, end)))
    found: set[int] = set()
    for line in lines:
        around = [span for span in spans if span[0] <= line <= span[1]]
        begin, end = max(around, default=(line, line))
        found |= set(range(begin, end + 1))
    return tuple(sorted(found))


def run_by_line(coverage_file: Path, copy: Path) -> RunBy:
    """Read which tests run which lines from the data of ``pytest --cov --cov-context=test``."""
    data = CoverageData(str(coverage_file))
    data.read()
    found: RunBy = {}
    for path in data.measured_files():
        lines = data.contexts_by_lineno(path).items()
        # A context is "test id|phase"; it is empty while modules are imported by the collection.
        found[str(Path(path).relative_to(copy))] = {
            line: {context.rpartition("|")[0] for context in contexts if context} for line, contexts in lines
        }
    return found


def _coverage_percent(copy: Path) -> float:
    command = [sys.executable, "-m", "coverage", "report", "--format=total", "--precision=1"]
    done = subprocess.run(command, cwd=copy, capture_output=True, text=True, check=True)
    return float(done.stdout)


def killed_by(
    mutant: Mutant, copy: Path, *, slow: bool, run_by: RunBy | None = None, near: bool = False
) -> str | None:
    """Return the stage that noticed the mutant; None for a survivor."""
    target = copy / mutant.module
    original = target.read_text()
    _write(target, mutant.code)
    try:
        for stage, arguments in _stages(mutant, copy, run_by or {}, slow=slow, near=near):
            if not _passes(arguments, copy):
                return stage
        return None
    finally:
        _write(target, original)


def _write(module: Path, code: str) -> None:
    """Write a module such that the next import reads it: byte code counts as current for a second."""
    module.write_text(code)
    Path(importlib.util.cache_from_source(str(module))).unlink(missing_ok=True)


def _stages(
    mutant: Mutant, copy: Path, run_by: RunBy, *, slow: bool, near: bool
) -> Iterator[tuple[str, list[str]]]:
    parts = Path(mutant.module).parts
    # `tests/` mirrors the packages without the wings that group them.
    mirror = Path("tests", *[part for part in parts[1:] if part not in WINGS or parts[2:] == parts[-1:]][:1])
    mirrored = [str(mirror)] if (copy / mirror).is_dir() else []
    by_line = run_by.get(mutant.module, {})
    covering = _covering(mutant, by_line)
    # A sample, spread over the files: a line that thousands of tests run needs few of them. Those of the
    # package's own folder first: they notice most mutants.
    sample = covering[:: math.ceil(len(covering) / COVERING_TESTS)] if covering else []
    own = [test for test in covering if mirror in Path(test).parents]
    for part in ([test for test in sample if test in own], [test for test in sample if test not in own]):
        if part:
            yield "tests that run the line", [*_LIMITED, *part]
    if near and (rest := [test for test in own if test not in sample]):
        yield "more tests that run the line", [*_LIMITED, *rest]
    # Lines of a module without functions run only while it is imported.
    is_run = any(line in by_line for line in {*mutant.lines, *mutant.statement})
    if not covering and mirrored and (is_run or not near):
        yield "mirrored tests", [*_LIMITED, "-m", FAST, *mirrored]
    if not near:
        yield "fast tests", [*_LIMITED, "-m", FAST, *_parallel()]
    if slow and mirrored:
        yield "slow tests", ["-m", SLOW, *mirrored]


def _covering(mutant: Mutant, by_line: dict[int, set[str]]) -> list[str]:
    """Return the tests that run the changed statements; all of the module for what runs as it is imported."""
    runs = [by_line[line] for line in {*mutant.lines, *mutant.statement} if line in by_line]
    tests = set().union(*runs)
    return sorted(set().union(*by_line.values()) if runs and not tests else tests)


#: What most tests import: half of the time of a few tests.
_PRELOADED = [
    "pydantic",
    "torch",
    "torchvision.transforms.v2",
    "typer",
    "yaml",
    "pytest",
    "PIL.Image",
]
_LIMITED = ["--timeout", str(TEST_LIMIT_S)]


def _parallel() -> list[str]:
    return ["-n", str(len(os.sched_getaffinity(0)))]


def _passes(arguments: list[str], copy: Path, *, shows: bool = False) -> bool:
    """Run pytest in a copy, in a process that is forked with the tests' dependencies imported."""
    process = _forking().Process(target=_run_pytest, args=(arguments, copy, shows))
    process.start()
    process.join(STAGE_LIMIT_S)
    if process.exitcode is None:
        process.kill()
        process.join()
    # 5: no test was selected
    return process.exitcode in {0, 5}


@functools.cache
def _forking() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    return context


def _run_pytest(arguments: list[str], copy: Path, shows: bool) -> NoReturn:
    if not shows:
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, 1)
        os.dup2(null, 2)
    os.chdir(copy)
    os.environ["PYTHONPATH"] = str(copy)
    sys.path[:] = [str(copy), *(path for path in sys.path if path not in {"", str(REPOSITORY)})]
    # This module is of the repository, not of the copy.
    for name in [name for name in sys.modules if name.partition(".")[0] in {"hpc_train", "tests"}]:
        del sys.modules[name]
    code = pytest.main(["-q", "-x", "-p", "no:cacheprovider", *arguments])
    sys.stdout.flush()
    os._exit(code)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--num", type=int, default=40)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=1, help="skip the mutants before this number")
    parser.add_argument(
        "--packages", nargs="+", default=[], help="sample only these: run, training/models, …"
    )
    parser.add_argument("--near", action="store_true", help="run only the fast tests near each mutant")
    parser.add_argument("--slow", action="store_true", help="run the slow tests on survivors, too")
    parser.add_argument("--jobs", type=int, default=1, help="test this number of mutants at the same time")
    parser.add_argument("--copy", type=Path, help="keep the copy of the repository in this folder")
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/mutation[-near].json")
    given = parser.parse_args(arguments)
    out = given.out or Path("benchmarks/results", "mutation-near.json" if given.near else "mutation.json")
    if unknown := [name for name in given.packages if not (REPOSITORY / "hpc_train" / name).is_dir()]:
        parser.error(f"no such package in hpc_train: {', '.join(unknown)}")
    began = time.monotonic()
    with ExitStack() as stack:
        folder = given.copy or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        copy = folder / "unchanged/main"
        if not (copy / ".coverage").exists():
            _copied(copy)
            if not _passes(
                ["-m", FAST, *_parallel(), *_COVERED, *_covering_folders(given)], copy, shows=True
            ):
                print("the fast tests fail without any mutant", file=sys.stderr)
                return 1
        result = _facts(given, copy)
        run_by = run_by_line(copy / ".coverage", copy)
        results = _tested(given, folder, run_by)
        for number, (mutant, stage) in enumerate(results, start=given.first):
            _add(result, mutant, stage, run_by)
            print(
                f"{number}/{given.num} {stage or 'SURVIVES'}: {mutant.module} {mutant.operator}", flush=True
            )
            if stage is None:
                print(mutant.difference, flush=True)
            result["tested"] = number - given.first + 1
            result["minutes"] = round((time.monotonic() - began) / 60, 1)
            out.write_text(json.dumps(result, indent=1) + "\n")
    return 0


_COVERED = ["--cov=hpc_train", "--cov-context=test", "--cov-report="]


def _covering_folders(given: argparse.Namespace) -> list[str]:
    if not (given.near and given.packages):
        return []
    folders = [*(f"tests/{Path(name).name}" for name in given.packages), *WIDE]
    return [folder for folder in folders if (REPOSITORY / folder).is_dir()]


def _facts(given: argparse.Namespace, copy: Path) -> dict[str, Any]:
    """Return the result without any mutant."""
    settings = {name: getattr(given, name) for name in ("num", "seed", "first", "packages", "near")}
    # Coverage of some folders' tests says little about the package.
    covered = {} if given.near else {"fast_tests_line_coverage_percent": _coverage_percent(copy)}
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "versions": {name: version(name) for name in ("torch", "pytest", "cosmic-ray")}
        | {"python": platform.python_version()},
        **settings,
        "slow_tests": given.slow,
        **covered,
        "noticed_by": {},
        "survivors": [],
    }


def _add(result: dict[str, Any], mutant: Mutant, stage: str | None, run_by: RunBy) -> None:
    stages = result["noticed_by"]
    stages[stage or "none"] = stages.get(stage or "none", 0) + 1
    if stage is None:
        facts = asdict(mutant)
        survivor = {key: facts[key] for key in ("module", "operator", "difference")}
        survivor["run_by_tests"] = len(_covering(mutant, run_by.get(mutant.module, {})))
        result["survivors"].append(survivor)


def _tested(given: argparse.Namespace, folder: Path, run_by: RunBy) -> Iterable[tuple[Mutant, str | None]]:
    """Yield the mutants in the order of the sample, each with the stage that noticed it."""
    unchanged = folder / "unchanged"
    copies: SimpleQueue[Path] = SimpleQueue()
    for number in range(given.jobs):
        # An interrupted run leaves its mutant in its copy.
        shutil.rmtree(folder / str(number), ignore_errors=True)
        shutil.copytree(unchanged, folder / str(number), symlinks=True)
        copies.put(folder / str(number) / "main")

    def tested(mutant: Mutant) -> tuple[Mutant, str | None]:
        copy = copies.get()
        try:
            return mutant, killed_by(mutant, copy, slow=given.slow, run_by=run_by, near=given.near)
        finally:
            copies.put(copy)

    # The repository may be edited meanwhile.
    mutants = list(sampled(given.num, given.seed, given.packages, unchanged / "main"))
    with ThreadPoolExecutor(given.jobs) as executor:
        yield from executor.map(tested, islice(mutants, given.first - 1, None))


def _copied(target: Path) -> Path:
    """Copy the tracked files to ``target``; and link the repository's neighbour ``shared``."""
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=REPOSITORY, capture_output=True, text=True, check=True
    )
    for name in filter(None, listed.stdout.split("\0")):
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(REPOSITORY / name, target / name, follow_symlinks=False)
    shared = REPOSITORY.parent / "shared"
    if shared.is_dir():
        (target.parent / "shared").symlink_to(shared)
    return target


if __name__ == "__main__":
    sys.exit(main())
