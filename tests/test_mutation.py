"""``make mutation`` changes what code means, one place at a time, and tells which tests notice."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from coverage import CoverageData

from tests.mutation import REPOSITORY, Mutant, _copied, killed_by, run_by_line, sampled


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


@pytest.mark.slow
def test_a_mutant_that_a_test_notices_is_killed_and_another_survives(tmp_path: Path) -> None:
    (tmp_path / "hpc_train/part").mkdir(parents=True)
    (tmp_path / "tests/part").mkdir(parents=True)
    (tmp_path / "tests/conftest.py").touch()
    (tmp_path / "hpc_train/part/module.py").write_text("checked = 1\nunchecked = 1\n")
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n  slow\n  gpu\n  soak\n")
    test = "from hpc_train.part.module import checked\n\ndef test_it():\n    assert checked == 1\n"
    (tmp_path / "tests/part/test_module.py").write_text(test)
    (tmp_path / "hpc_train/__init__.py").touch()
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


@pytest.mark.slow  # also, a copy is no git checkout, and its fast tests must pass
def test_the_copy_has_the_templates_behind_a_link(tmp_path: Path) -> None:
    copy = _copied(tmp_path / "main")
    assert (copy / "hpc_train/launchers/slurm/templates/setup.sh.j2").is_file()
