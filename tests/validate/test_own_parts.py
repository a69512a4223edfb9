"""Typing errors in ``package.module:factory``, found without importing the module."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpc_train.errors import BadFileError
from hpc_train.validate.loading import load
from hpc_train.validate.own_parts import missing_parts

MODULE = """
raise RuntimeError("imported")

def build_net(num_classes): ...
class Task: ...
if True:
    from os import path as renamed
other, (nested, *rest) = 1, (2, 3)
"""
FILE = """
name: x
task: "own_parts:Task"
model: {{name: "{model}"}}
data: {{name: "own_parts:build_net"}}
optimization: {{steps: 4, global_batch_size: 8, micro_batch_size: 8, optimizer: {{name: sgd, lr: 0.1}}}}
{more}
"""


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_parts.py").write_text(MODULE)
    (tmp_path / "broken.py").write_text("def build(:\n")
    (tmp_path / "starred.py").write_text("from own_parts import *\n")
    (tmp_path / "dynamic.py").write_text("globals()['build'] = None\n")
    (tmp_path / "lazy.py").write_text("def __getattr__(name): ...\n")
    (tmp_path / "pack" / "inner").mkdir(parents=True)
    (tmp_path / "pack" / "__init__.py").write_text("raise RuntimeError('imported')\n")
    (tmp_path / "pack" / "inner" / "nets.py").write_text("def build(): ...\n")
    monkeypatch.chdir(tmp_path)


def problems(model: str, more: str = "", root: Path | None = None, *overrides: str) -> list[str]:
    Path("exp.yaml").write_text(FILE.format(model=model, more=more))
    loaded = load(Path("exp.yaml"), overrides)
    return [loaded.source.render(problem) for problem in missing_parts([loaded.experiment], lambda: root)]


@pytest.mark.parametrize(
    "model",
    [
        "own_parts:build_net", "own_parts:Task.method", "own_parts:renamed", "own_parts:nested",
        "own_parts:rest", "starred:anything", "dynamic:anything", "lazy:anything", "pack.inner.nets:build",
        "torch.nn:Linear", "os:getcwd", "timm.models.resnet:resnet18", "math:sin", "json.decoder:JSONDecoder",
    ],
)  # fmt: skip
def test_what_is_there_or_can_not_be_told_is_accepted(model: str) -> None:
    assert problems(model) == []


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("own_part:build_net", "there is no module 'own_part'; did you mean own_parts?"),
        (
            "nowhere:build",
            "there is no module 'nowhere'; start hpc-train in the folder that contains nowhere.py",
        ),
        ("nowhere.net:build", "there is no module 'nowhere'; start hpc-train in the folder"),
        ("pack.iner:build", "there is no module 'iner' in package pack; fix the name"),
        (
            "pack.inner.net:build",
            "there is no module 'net' in package pack.inner; did you mean pack.inner.nets?",
        ),
        ("own_parts:build_nett", "own_parts.py defines no 'build_nett'; did you mean build_net?"),
        ("own_parts:zzz", "own_parts.py defines no 'zzz'; write one of build_net, Task"),
        ("broken:build", "broken.py:1: invalid syntax; fix the syntax error"),
        (
            "own_parts.py:build_net",
            "own_parts.py is a file, and the name starts with a module; write own_parts:build_net",
        ),
    ],
)
def test_a_name_that_is_not_there_is_an_error_with_its_position(model: str, said: str) -> None:
    (line,) = problems(model)
    assert line.startswith(f"exp.yaml:4:15: model.name: {said}")


def test_a_transform_that_is_not_there_is_an_error() -> None:
    for override in ("data.transform=own_parts:build_nett", "data.transform.name=own_parts:build_nett"):
        (line,) = problems("own_parts:build_net", "", None, override)
        assert "data.transform: own_parts.py defines no 'build_nett'; did you mean build_net?" in line
    assert problems("own_parts:build_net", "", None, "data.transform=torchvision.transforms.v2:AugMix") == []


@pytest.mark.parametrize(
    ("key", "name", "remedy"),
    [
        ("data.transform.name", "own_parts.build_net", "write own_parts:build_net"),
        ("model.name", "pack/inner/nets.py:build", "write pack.inner.nets:build"),
        ("model.name", "./own_parts.py:build_net", "write own_parts:build_net"),
        ("model.name", "pack.inner.nets.build", "write pack.inner.nets:build"),
        ("model.name", "own_parts.build_net", "write own_parts:build_net"),
        ("data.name", "own_parts.build_net", "write own_parts:build_net"),
        ("data.name", "own_parts.py", "write own_parts:NAME, with the name of"),
        ("model.name", "pack/inner/nets.py", "write pack.inner.nets:NAME, with the name of"),
        ("task", "own_parts.Task", "write own_parts:Task"),
        ("task", "pack/inner/nets.py:Task", "write pack.inner.nets:Task"),
        ("model.name", "resnet18.a1_in1k", "write timm/resnet18.a1_in1k or another of"),
        ("task", "No Task", "write text of this form"),
    ],
)
def test_a_path_or_dots_in_place_of_a_colon_lead_to_the_name(key: str, name: str, remedy: str) -> None:
    Path("exp.yaml").write_text(FILE.format(model="own_parts:build_net", more=""))
    with pytest.raises(BadFileError) as caught:
        load(Path("exp.yaml"), [f"{key}={name}"])
    (line,) = caught.value.problems
    assert line.partition("; ")[2].startswith(remedy)


@pytest.mark.parametrize(
    "more",
    [
        "environment: {python: /opt/python/bin/python}",
        "environment: {modules: [torch]}",
        "slurm: {profile: site}",
    ],
)
def test_another_environment_of_the_ranks_may_have_other_modules(more: str) -> None:
    assert problems("nowhere:build", more) == []


def test_ranks_import_from_the_root_of_the_work_tree_too(monkeypatch: pytest.MonkeyPatch) -> None:
    root, folder = Path.cwd(), Path.cwd() / "experiments"
    folder.mkdir()
    monkeypatch.chdir(folder)
    assert len(problems("own_parts:build_net")) == 3
    assert problems("own_parts:build_net", root=root) == []


def test_what_python_has_no_description_of_is_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def find_spec(module: str) -> None:
        raise ValueError(f"{module}.__spec__ is None")

    monkeypatch.setattr("importlib.util.find_spec", find_spec)
    (line,) = problems("nowhere:build")
    assert "there is no module 'nowhere'" in line
