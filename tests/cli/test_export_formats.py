"""``export``: which format a file name means, and what is refused before anything starts."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from hpc_train.cli import checkpoint_commands, export_formats
from hpc_train.cli.export_formats import format_of
from hpc_train.errors import UsageError
from hpc_train.paths import RunPaths
from tests.cli.commands import hpc_train
from tests.run.runs import small_run


@pytest.mark.parametrize(
    ("name", "choice", "form"),
    [
        ("w.safetensors", None, "safetensors"),
        ("w.pth", None, "safetensors"),
        ("w", None, "safetensors"),
        ("w.onnx", None, "onnx"),
        ("w.pt2", None, "torch-export"),
        ("w", "onnx", "onnx"),
        ("w.bin", "torch-export", "torch-export"),
    ],
)
def test_the_suffix_selects_the_format(name: str, choice: str | None, form: str) -> None:
    assert format_of(Path(name), choice) == form


def test_an_unknown_suffix_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert format_of(Path("w.xyz"), None) == "safetensors"
    assert "-o w.xyz: written as safetensors" in capsys.readouterr().err
    format_of(Path("w.xyz"), "safetensors")
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("name", "choice", "said"),
    [
        ("w.onnx", "tensorrt", "unknown format 'tensorrt'; write one of safetensors, onnx, torch-export"),
        ("w.pt2", "onnx", "w.pt2 has the suffix of torch-export; write w.onnx, or omit --format"),
        ("w.onnx", "safetensors", "w.onnx has the suffix of onnx; write w.safetensors"),
        ("w.safetensors", "onnx", "w.safetensors has the suffix of safetensors; write w.onnx"),
    ],
)
def test_a_contradiction_is_refused(name: str, choice: str, said: str) -> None:
    with pytest.raises(UsageError) as raised:
        format_of(Path(name), choice)
    assert said in str(raised.value)


def test_a_missing_package_is_named_before_the_run_is_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export_formats, "find_spec", lambda name: None)
    done = hpc_train("export", "nosuch", "-o", "w.onnx")
    assert done.code == 2
    assert f"onnx and onnxscript not installed for {sys.executable}" in done.err
    assert "run pip install 'hpc-train[onnx]'" in done.err


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunPaths:
    monkeypatch.setattr(checkpoint_commands, "run_child", None)
    return small_run(tmp_path / "runs")


def test_options_that_exclude_each_other_are_refused(run: RunPaths) -> None:
    done = hpc_train("export", "abc", "-o", "w.pt2", "--best", "--step", "3")
    assert done.code == 2 and "--best and --step exclude each other" in done.err
    done = hpc_train("export", "abc", "-o", "w.safetensors", "--code", "new")
    assert done.code == 2 and "does not depend on code; omit it" in done.err


def test_what_another_user_could_have_written_is_not_run(run: RunPaths) -> None:
    run.folder.chmod(0o777)
    done = hpc_train("export", "abc", "-o", "w.onnx")
    assert done.code == 1 and "group or others may write it, so it is not trusted" in done.err
