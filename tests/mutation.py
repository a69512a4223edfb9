"""Mutates sampled lines of the package and tells which mutants no test notices.

    python -m tests.mutation --num 40 --seed 1 --out benchmarks/results/mutation.json

cosmic-ray's operators change one place in a copy of the repository. Each mutant is tested by the fast tests
that run the changed lines (found by coverage, once), then by all fast tests, because commands in child
processes are not covered, then, with ``--slow``, by the slow tests of its package. The first failure ends it.
A mutant that passes everything is a survivor, and is listed with its difference. Mutants that change only
annotations or docstrings are not counted.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import importlib.util
import json
import math
import os
import platform
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.operators.operator import Operator
from cosmic_ray.plugins import get_operator, operator_names
from coverage import CoverageData

REPOSITORY = Path(__file__).parents[1]
PACKAGE = REPOSITORY / "hpc_train"
#: Limit of one stage, in seconds: a mutant may loop forever.
STAGE_LIMIT_S = 1800
#: Limit of the first stage's tests, so that it takes seconds.
COVERING_TESTS = 150
FAST = "not slow and not gpu and not soak"
SLOW = "slow and not slurm and not gpu and not soak"


@dataclass(frozen=True)
class Mutant:
    """``module`` is relative to the repository; ``code`` is the whole module, changed in one place.

    ``lines`` are the numbers of the original's lines that changed; after an insertion, of the line before it.
    """

    module: str
    operator: str
    difference: str
    code: str
    lines: tuple[int, ...] = ()


#: Module, relative to the repository → line → ids of the tests that run it.
RunBy = dict[str, dict[int, set[str]]]


def sampled(num: int, seed: int) -> Iterator[Mutant]:
    """Yield ``num`` different mutants: modules are weighted by their length, operators and places are not."""
    draw = random.Random(seed)
    modules = sorted(PACKAGE.rglob("*.py"))
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
        module = str(path.relative_to(REPOSITORY))
        difference = _difference(original, changed)
        yield Mutant(module, name, difference, changed, _changed_lines(difference))


def _mutated(original: str, operator: Operator, draw: random.Random) -> str | None:
    places = [place for node in ast_nodes(get_ast(original)) for place in operator.mutation_positions(node)]
    if not places:
        return None
    changed = mutate_code(original, operator, draw.randrange(len(places)))
    is_code = changed is not None and _meaning(changed) not in {None, _meaning(original)}
    return changed if is_code else None


class _WithoutNotes(ast.NodeTransformer):
    """Removes docstrings and annotations, which only tools read."""

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        node.annotation = ast.Constant(None)
        return self.generic_visit(node)

    def visit_arg(self, node: ast.arg) -> ast.AST:
        node.annotation = None
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.returns = None
        return self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        return ast.Pass() if isinstance(node.value, ast.Constant) else self.generic_visit(node)


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


def killed_by(mutant: Mutant, copy: Path, *, slow: bool, run_by: RunBy | None = None) -> str | None:
    """Return the stage that noticed the mutant; None for a survivor."""
    target = copy / mutant.module
    original = target.read_text()
    _write(target, mutant.code)
    try:
        for stage, arguments in _stages(mutant, copy, run_by or {}, slow=slow):
            if not _passes(arguments, copy):
                return stage
        return None
    finally:
        _write(target, original)


def _write(module: Path, code: str) -> None:
    """Write a module such that the next import reads it: byte code counts as current for a second."""
    module.write_text(code)
    Path(importlib.util.cache_from_source(str(module))).unlink(missing_ok=True)


def _stages(mutant: Mutant, copy: Path, run_by: RunBy, *, slow: bool) -> Iterator[tuple[str, list[str]]]:
    parts = Path(mutant.module).parts
    mirror = Path("tests", *parts[1:2])
    mirrored = [str(mirror)] if (copy / mirror).is_dir() else []
    by_line = run_by.get(mutant.module, {})
    covering = sorted(set().union(*(by_line.get(line, set()) for line in mutant.lines)))
    if covering:
        # A sample, spread over the files: a line that thousands of tests run needs few of them.
        yield "tests that run the line", covering[:: math.ceil(len(covering) / COVERING_TESTS)]
    elif mirrored:
        yield "mirrored tests", ["-m", FAST, *mirrored]
    yield "fast tests", ["-m", FAST, *_parallel()]
    if slow and mirrored:
        yield "slow tests", ["-m", SLOW, *mirrored]


def _parallel() -> list[str]:
    return ["-n", str(len(os.sched_getaffinity(0)))]


def _passes(arguments: list[str], copy: Path, *, shows: bool = False) -> bool:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *arguments]
    try:
        done = subprocess.run(
            command,
            cwd=copy,
            env=os.environ | {"PYTHONPATH": str(copy)},
            stdout=None if shows else subprocess.DEVNULL,
            stderr=None if shows else subprocess.DEVNULL,
            timeout=STAGE_LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return False
    # 5: no test was selected
    return done.returncode in {0, 5}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--num", type=int, default=40)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--slow", action="store_true", help="run the slow tests on survivors, too")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/mutation.json"))
    given = parser.parse_args(arguments)
    began = time.monotonic()
    stages: dict[str, int] = {}
    survivors: list[dict[str, str]] = []
    with tempfile.TemporaryDirectory() as folder:
        copy = _copied(Path(folder) / "main")
        covered = ["--cov=hpc_train", "--cov-context=test", "--cov-report="]
        if not _passes(["-m", FAST, *_parallel(), *covered], copy, shows=True):
            print("the fast tests fail without any mutant", file=sys.stderr)
            return 1
        run_by = run_by_line(copy / ".coverage", copy)
        coverage_percent = _coverage_percent(copy)
        for number, mutant in enumerate(sampled(given.num, given.seed), start=1):
            stage = killed_by(mutant, copy, slow=given.slow, run_by=run_by)
            stages[stage or "none"] = stages.get(stage or "none", 0) + 1
            print(
                f"{number}/{given.num} {stage or 'SURVIVES'}: {mutant.module} {mutant.operator}", flush=True
            )
            if stage is None:
                print(mutant.difference, flush=True)
                survivors.append(
                    {key: value for key, value in asdict(mutant).items() if key not in {"code", "lines"}}
                )
    result = {
        "date": datetime.now(UTC).date().isoformat(),
        "versions": {name: version(name) for name in ("torch", "pytest", "cosmic-ray")}
        | {"python": platform.python_version()},
        "num": given.num,
        "seed": given.seed,
        "slow_tests": given.slow,
        "minutes": round((time.monotonic() - began) / 60, 1),
        "fast_tests_line_coverage_percent": coverage_percent,
        "noticed_by": stages,
        "survivors": survivors,
    }
    given.out.write_text(json.dumps(result, indent=1) + "\n")
    return 0


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
