from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpc_train.errors import BadFileError
from hpc_train.experiment.config.synonyms import as_factory
from hpc_train.registry import _NOUNS, load, parts


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder that modules are imported from; what was imported is forgotten afterwards."""
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]


def test_a_nested_attribute_of_a_module_is_loaded(package: Path) -> None:
    (package / "own_parts.py").write_text("class Parts:\n    size = 3\n")
    assert load("models", "own_parts:Parts.size") == 3


@pytest.mark.parametrize(
    ("attr", "remedy"),
    [
        ("biuld", "did you mean own_parts:build?"),
        ("Nets.smal", "did you mean own_parts:Nets.small?"),
        ("build.inner", "fix the name 'own_parts:build.inner'"),
    ],
)
def test_a_missing_attribute_is_named_with_its_module(package: Path, attr: str, remedy: str) -> None:
    (package / "own_parts.py").write_text("def build(): ...\nclass Nets:\n    small = 1\n")
    said = f"model.name: module 'own_parts' has no '{attr}'; {remedy}"
    with pytest.raises(BadFileError, match=f"^{re.escape(said)}$"):
        load("models", f"own_parts:{attr}")


@pytest.mark.parametrize(
    ("name", "factory"),
    [
        ("net.py:build", "net:build"),
        ("./net.py:build", "net:build"),
        ("models/net.py:Net.small", "models.net:Net.small"),
        ("models/net:build", "models.net:build"),
        ("models.net:build", None),
        ("timm/resnet18", None),
        ("net.py", None),
    ],
)
def test_a_path_before_a_colon_is_written_as_a_module(name: str, factory: str | None) -> None:
    assert as_factory(name) == factory


@pytest.mark.parametrize(
    "broken", ["import json\njson.spawn\n", "build.size = 3\n", "raise AttributeError('spawn')\n"]
)
def test_an_error_inside_a_module_being_imported_is_its_own(package: Path, broken: str) -> None:
    (package / "shadowing.py").write_text(broken if "build" not in broken else f"build = 3\n{broken}")
    (package / "own_parts.py").write_text("import shadowing\ndef build(): ...\n")
    with pytest.raises(AttributeError) as raised:
        load("models", "own_parts:build")
    assert Path(raised.traceback[-1].path).name == "shadowing.py"


def test_a_module_that_is_not_there_is_named(package: Path) -> None:
    said = (
        r"^data\.name: 'no_parts:build' can't be imported: no module 'no_parts'; start hpc-train in the "
        r"folder that contains no_parts\.py, or install its package for /"
    )
    with pytest.raises(BadFileError, match=said):
        load("datasets", "no_parts:build")


def test_a_module_missing_inside_a_module_that_is_there_is_not_blamed_on_the_name(package: Path) -> None:
    (package / "own_parts.py").write_text("import no_parts\n")
    with pytest.raises(ModuleNotFoundError, match="no_parts"):
        load("models", "own_parts:build")


def test_a_misspelt_provider_gets_a_hint() -> None:
    with pytest.raises(
        BadFileError, match=r"^parallel\.strategy: there is no strategy 'fsdpp'; did you mean fsdp\?$"
    ):
        load("strategies", "fsdpp")


@pytest.mark.parametrize("code", ["0", "1", "'bye'"])
def test_a_module_that_ends_the_process_is_an_error(code: str, package: Path) -> None:
    (package / "own_launcher.py").write_text(f"import sys\nsys.exit({code})\n")
    with pytest.raises(BadFileError, match=rf"--launcher: .*own_launcher calls sys\.exit\({code}\)"):
        load("launchers", "own_launcher:Launcher")


@pytest.mark.parametrize("kind", _NOUNS)
def test_every_part_can_be_imported(kind: str) -> None:
    assert parts(kind)
    for name in parts(kind):
        assert callable(load(kind, name)), name
