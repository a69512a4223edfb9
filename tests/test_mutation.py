"""``make mutation`` changes what code means, one place at a time, and tells which tests notice."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.mutation import REPOSITORY, Mutant, _copied, killed_by, sampled


def test_mutants_are_changed_code_that_compiles_and_the_same_for_a_seed() -> None:
    mutants = list(sampled(3, seed=1))
    assert len({mutant.code for mutant in mutants}) == 3
    for mutant in mutants:
        original = (REPOSITORY / mutant.module).read_text()
        assert ast.dump(ast.parse(mutant.code)) != ast.dump(ast.parse(original))
        assert mutant.difference.startswith("@@")
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
    for code, stage in [
        ("checked = 2\nunchecked = 1\n", "mirrored tests"),
        ("checked = 1\nunchecked = 2\n", None),
    ]:
        mutant = Mutant("hpc_train/part/module.py", "", "", code)
        assert killed_by(mutant, tmp_path, slow=False) == stage
        assert (tmp_path / mutant.module).read_text() == "checked = 1\nunchecked = 1\n"


@pytest.mark.slow  # also, a copy is no git checkout, and its fast tests must pass
def test_the_copy_has_the_templates_behind_a_link(tmp_path: Path) -> None:
    copy = _copied(tmp_path / "main")
    assert (copy / "hpc_train/launchers/slurm/templates/setup.sh.j2").is_file()
