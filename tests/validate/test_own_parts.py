"""The user's own modules, which are searched without being imported; their typing errors are in
``messages.golden``.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from hpc_train.experiment.validate.loading import load
from hpc_train.experiment.validate.own_parts import missing_parts
from tests.validate.messages import FILES, MODULES


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_parts.py").write_text(MODULES["own_parts.py"])
    monkeypatch.chdir(tmp_path)


def problems(root: Path | None = None) -> list[str]:
    Path("exp.yaml").write_text(FILES["own"])
    return [problem.code for problem in missing_parts([load(Path("exp.yaml")).experiment], lambda: root)]


def test_ranks_import_from_the_root_of_the_work_tree_too(monkeypatch: pytest.MonkeyPatch) -> None:
    root, folder = Path.cwd(), Path.cwd() / "experiments"
    folder.mkdir()
    monkeypatch.chdir(folder)
    assert problems() == ["part.missing"] * 3
    assert problems(root=root) == []


def test_what_python_has_no_description_of_is_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def find_spec(module: str) -> None:
        raise ValueError(f"{module}.__spec__ is None")

    Path("own_parts.py").unlink()
    monkeypatch.setattr("importlib.util.find_spec", find_spec)
    assert problems() == ["part.missing"] * 3
