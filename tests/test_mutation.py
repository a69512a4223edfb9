"""``make mutation`` changes what code means, one place at a time, and tells which tests notice."""

from __future__ import annotations

import ast
import json
import multiprocessing
import subprocess
from pathlib import Path

import pytest
from coverage import CoverageData

from tests import mutation
from tests.mutation import REPOSITORY, Mutant, _copied, killed_by, run_by_line, sampled


@pytest.fixture(autouse=True)
def _own_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process has one fork server, started once: that of pytest is for ``tests.ranks``."""
    monkeypatch.setattr(mutation, "_forking", lambda: multiprocessing.get_context("spawn"))


def test_mutants_are_changed_code_that_compiles_and_the_same_for_a_seed() -> None:
    mutants = list(sampled(3, seed=1))
    assert len({mutant.code for mutant in mutants}) == 3
    for mutant in mutants:
        original = (REPOSITORY / mutant.module).read_text()
        assert ast.dump(ast.parse(mutant.code)) != ast.dump(ast.parse(original))
        assert mutant.difference.startswith("@@")
        original_lines = original.splitlines()
        removed = [line[1:] for line in mutant.difference.splitlines() if line.startswith("-")]
        assert [original_lines[number - 1] for number in mutant.lines][: len(removed)] == removed
    assert mutants == list(sampled(3, seed=1))


def test_only_modules_of_the_given_packages_are_mutated(tmp_path: Path) -> None:
    for name in ("first", "second", "third/below"):
        (tmp_path / "hpc_train" / name).mkdir(parents=True)
        (tmp_path / "hpc_train" / name / "module.py").write_text(f"value_{name[0]} = 1 + 2 * 3\n")
    mutants = list(sampled(20, 1, ["first", "third"], tmp_path))
    modules = {mutant.module for mutant in mutants}
    assert modules == {"hpc_train/first/module.py", "hpc_train/third/below/module.py"}
    assert "hpc_train/second/module.py" in {mutant.module for mutant in sampled(40, 1, (), tmp_path)}


@pytest.mark.parametrize(
    ("original", "mutant"),
    [
        ("@dataclass(frozen=True)\nclass A: ...", "@dataclass(frozen=False)\nclass A: ..."),
        ("if TYPE_CHECKING:\n    import b", "if not TYPE_CHECKING:\n    import b"),
        ("def f(x: A | B) -> A | B: ...", "def f(x: A + B) -> A - B: ..."),
        ("class A:\n    @abstractmethod\n    def f(self): ...", "class A:\n    def f(self): ..."),
        ("x = cast(A | B, y)", "x = cast(A & B, y)"),
    ],
)
def test_changes_of_code_for_type_checkers_are_no_mutants(original: str, mutant: str) -> None:
    assert mutation._meaning(original) == mutation._meaning(mutant)


@pytest.mark.parametrize(
    ("original", "mutant"),
    [
        ("@dataclass(order=True)\nclass A: ...", "@dataclass(order=False)\nclass A: ..."),
        ("class A:\n    @property\n    def f(self): ...", "class A:\n    def f(self): ..."),
        ("if checked:\n    f()", "if not checked:\n    f()"),
        ("x = cast(A, y + 1)", "x = cast(A, y - 1)"),
    ],
)
def test_changes_of_code_that_runs_are_mutants(original: str, mutant: str) -> None:
    assert mutation._meaning(original) != mutation._meaning(mutant)


def _project(folder: Path) -> None:
    """Write a package of two lines of which its test notices changes of the first."""
    (folder / "hpc_train/part").mkdir(parents=True)
    (folder / "tests/part").mkdir(parents=True)
    (folder / "tests/conftest.py").touch()
    (folder / "hpc_train/part/module.py").write_text("checked = 1\nunchecked = 1\n")
    (folder / "pytest.ini").write_text("[pytest]\nmarkers =\n  slow\n  gpu\n  soak\n")
    test = "from hpc_train.part.module import checked\n\ndef test_it():\n    assert checked == 1\n"
    (folder / "tests/part/test_module.py").write_text(test)
    (folder / "hpc_train/__init__.py").touch()


@pytest.mark.slow
def test_a_mutant_that_a_test_notices_is_killed_and_another_survives(tmp_path: Path) -> None:
    _project(tmp_path)
    run_by = {"hpc_train/part/module.py": {1: {"tests/part/test_module.py::test_it"}}}
    for code, line, stage in [
        ("checked = 2\nunchecked = 1\n", 1, "tests that run the line"),
        ("checked = 2\nunchecked = 1\n", 2, "mirrored tests"),
        ("checked = 1\nunchecked = 2\n", 1, None),
    ]:
        mutant = Mutant("hpc_train/part/module.py", "", "", code, (line,))
        assert killed_by(mutant, tmp_path, slow=False, run_by=run_by) == stage
        assert (tmp_path / mutant.module).read_text() == "checked = 1\nunchecked = 1\n"


def test_the_tests_that_run_a_line_are_read_from_coverage(tmp_path: Path) -> None:
    source = tmp_path / "hpc_train/part.py"
    data = CoverageData(str(tmp_path / ".coverage"))
    for context, lines in [("", [1, 2]), ("tests/test_part.py::test_it[a|b]|run", [2]), ("x::y|setup", [2])]:
        data.set_context(context)
        data.add_lines({str(source): lines})
    data.write()
    by_line = run_by_line(tmp_path / ".coverage", tmp_path)
    assert by_line == {"hpc_train/part.py": {1: set(), 2: {"tests/test_part.py::test_it[a|b]", "x::y"}}}


def test_near_runs_all_tests_of_the_folder_that_run_the_line_and_a_sample_of_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    _project(tmp_path)
    ran: list[list[str]] = []

    def passes(arguments: list[str], copy: Path) -> bool:
        ran.append([argument for argument in arguments if argument.startswith("tests/")])
        return True

    monkeypatch.setattr(mutation, "_passes", passes)
    own = [f"tests/part/test_module.py::test_{number:03}" for number in range(mutation.COVERING_TESTS)]
    others = [f"tests/cli/test_it.py::test_{number:03}" for number in range(mutation.COVERING_TESTS)]
    run_by = {"hpc_train/part/module.py": {1: set(own[:1]), 2: set(), 3: {*own, *others}}}
    for line, expected in [
        (1, [own[:1]]),
        (2, [own[::2], others[::2], own[1::2]]),  # runs when the module is imported
        (3, [own[::2], others[::2], own[1::2]]),
        (4, []),
    ]:
        ran.clear()
        mutant = Mutant("hpc_train/part/module.py", "", "", "", (line,))
        assert killed_by(mutant, tmp_path, slow=False, run_by=run_by, near=True) is None
        assert ran == expected
    ran.clear()
    constants = {"hpc_train/part/module.py": {1: set[str]()}}
    mutant = Mutant("hpc_train/part/module.py", "", "", "", (1,))
    assert killed_by(mutant, tmp_path, slow=False, run_by=constants, near=True) is None
    assert ran == [["tests/part"]], "nothing runs but the import"


@pytest.mark.parametrize(
    ("changed", "statement"), [(3, (2, 3, 4)), (5, (5,)), (8, (6, 7, 8, 9)), (10, (10,))]
)
def test_a_statement_of_several_lines_is_run_by_the_tests_of_each(
    changed: int, statement: tuple[int, ...]
) -> None:
    code = """def f(x):
    if (
        x
    ):
        return 1
    return (
        2
        + 3
    )
"""
    assert mutation._statement_lines(code, (changed,)) == statement


@pytest.mark.slow
def test_an_interrupted_run_leaves_its_result_and_can_be_continued(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """With two copies, the results are still in the sample's order."""
    repository, out = tmp_path / "main", tmp_path / "out.json"
    _project(repository)
    (repository / "hpc_train/part/module.py").write_text("checked = 1 + 0\nunchecked = 1 + 0\n")
    monkeypatch.setattr(mutation, "REPOSITORY", repository)
    for command in (["init", "-q"], ["add", "."]):
        subprocess.run(["git", *command], cwd=repository, check=True)
    command = [
        "--num",
        "8",
        "--packages",
        "part",
        "--near",
        "--out",
        str(out),
        "--copy",
        str(tmp_path / "copy"),
    ]
    assert mutation.main(command) == 0
    whole = json.loads(out.read_text())
    assert whole["tested"] == sum(whole["noticed_by"].values()) == 8
    assert 0 < len(whole["survivors"]) == whole["noticed_by"]["none"] < 8
    assert any("-unchecked = 1 + 0" in survivor["difference"] for survivor in whole["survivors"])
    assert mutation.main([*command, "--first", "5", "--jobs", "2"]) == 0
    rest = json.loads(out.read_text())
    assert (rest["first"], rest["tested"]) == (5, 4)
    assert rest["survivors"] == whole["survivors"][-len(rest["survivors"]) :]


def test_an_unknown_package_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        mutation.main(["--packages", "recovery", "recovry"])
    assert "no such package in hpc_train: recovry" in capsys.readouterr().err


@pytest.mark.slow  # also, a copy is no git checkout, and its fast tests must pass
def test_the_copy_has_the_templates_behind_a_link(tmp_path: Path) -> None:
    copy = _copied(tmp_path / "main")
    assert (copy / "hpc_train/launchers/slurm/templates/setup.sh.j2").is_file()
