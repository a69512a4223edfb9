"""Export to ONNX and torch.export: the file computes what the run's model computes, or there is none."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnxruntime
import pytest
import torch
from torch import Tensor, nn

from hpc_train.checkpoint import program_export
from hpc_train.checkpoint.export import main
from hpc_train.checkpoint.plain_weights import plain_weights
from hpc_train.checkpoint.program_export import FACTS, Model, _difference, load_model
from hpc_train.checkpoint.saved_tensors import SavedState
from hpc_train.checkpoint.state import TrainingState
from hpc_train.config.training_sections import LoraConfig
from hpc_train.datasets.base import DataSource
from hpc_train.errors import BadFileError
from hpc_train.models.lora import add_lora
from hpc_train.paths import RunPaths
from hpc_train.training.ema import Ema
from tests.checkpoint.checkpoint_runs import Trainee, begin_attempt
from tests.run.runs import small_run

LORA = {"rank": 2, "targets": ["head"], "alpha": 6.0, "also_train": ["norm.*"]}


class Net(nn.Module):
    """A normalisation that must be in evaluation mode, dropout, and a layer with an adapter."""

    def __init__(self, num_classes: int = 10) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(1)
        self.head = nn.Linear(64, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        pooled = nn.functional.adaptive_avg_pool2d(self.norm(images), 8)
        return self.head(nn.functional.dropout(pooled.flatten(1), 0.5, self.training))


class Branching(Net):
    """Control flow that depends on values."""

    def forward(self, images: Tensor) -> Tensor:
        outputs = super().forward(images)
        return outputs * 2 if outputs.sum() > 0 else outputs


class NoOperator(Net):
    """An operator that ONNX lacks."""

    def forward(self, images: Tensor) -> Tensor:
        outputs = super().forward(images)
        return outputs + torch.linalg.eigvals(images[:, 0, :4, :4]).real.sum()


def make_run(folder: Path, model: str = "Net", **changes: Any) -> tuple[RunPaths, nn.Module, Ema]:
    """Save a checkpoint of a model that was trained a little, with an adapter and an average."""
    named = {"name": f"tests.checkpoint.test_program_export:{model}", "lora": LORA}
    run = small_run(folder / "runs", model=named, **changes)
    begin_attempt(run, 1)
    torch.manual_seed(0)
    net = globals()[model]()
    add_lora(net, LoraConfig.model_validate(LORA))
    ema = Ema(net, 0.5)
    nn.init.normal_(net.get_parameter("head.lora_b"))
    nn.init.normal_(net.get_buffer("norm.running_mean"))
    ema.update()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    state = replace(TrainingState(net, optimizer), averages=ema.averages)
    Trainee().checkpointer(run).save(state, 3, {})
    return run, net.eval(), ema


@pytest.fixture
def report(capsys: pytest.CaptureFixture[str]) -> Callable[[], dict[str, Any]]:
    return lambda: json.loads(capsys.readouterr().out)


@pytest.mark.slow
def test_an_onnx_file_computes_what_the_run_does(
    tmp_path: Path, report: Callable[[], dict[str, Any]]
) -> None:
    run, net, _ = make_run(tmp_path)
    target = tmp_path / "net.onnx"
    target.write_text("old")
    assert main([str(run.folder), str(target), "--format", "onnx", "--step", "3"]) == 0
    told = report()
    assert told["format"] == "onnx" and told["step"] == 3 and told["inputs"] == [["batch", 1, 32, 32]]
    assert told["max_difference"] < 1e-5
    session = onnxruntime.InferenceSession(str(target))
    assert session.get_inputs()[0].shape == ["batch", 1, 32, 32]
    facts = json.loads(session.get_modelmeta().custom_metadata_map[FACTS])
    assert facts["step"] == "3" and facts["run_id"] == "abc" and len(facts["mean"]) == 1
    assert facts["classes"] == [str(digit) for digit in range(10)]
    images = torch.randn(5, 1, 32, 32)
    (found,) = session.run(None, {"input": images.numpy()})
    torch.testing.assert_close(torch.as_tensor(found), net(images), rtol=1e-4, atol=1e-4)
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["net.onnx"]


@pytest.mark.slow
def test_a_torch_export_file_has_the_average(tmp_path: Path, report: Callable[[], dict[str, Any]]) -> None:
    run, net, ema = make_run(tmp_path)
    target = tmp_path / "net.pt2"
    assert main([str(run.folder), str(target), "--format", "torch-export", "--ema"]) == 0
    assert report()["max_difference"] < 1e-6
    extra = {FACTS: ""}
    program = torch.export.load(target, extra_files=extra).module()
    assert json.loads(extra[FACTS])["weights"] == "ema"
    images = torch.randn(5, 1, 32, 32)
    assert not torch.allclose(program(images), net(images), atol=1e-3)
    net.load_state_dict(net.state_dict() | ema.averages)
    torch.testing.assert_close(program(images), net(images), rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "form", "said"),
    [
        ("Branching", "torch-export", ["GuardOnDataDependentSymNode", "outputs.sum() > 0"]),
        ("NoOperator", "onnx", ["aten.linalg_eig"]),
    ],
)
def test_what_can_not_be_exported_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], model: str, form: str, said: list[str]
) -> None:
    run, _, _ = make_run(tmp_path, model)
    target = tmp_path / "net"
    assert main([str(run.folder), str(target), "--format", form]) == 65
    captured = capsys.readouterr()
    assert f"{model}: can't be exported as {form}: " in captured.err
    assert "export the weights alone: -o FILE.safetensors" in captured.err
    assert all(words in captured.err for words in said)
    assert captured.out == "" and captured.err.count("\n") <= 8
    assert not any(path.is_file() for path in tmp_path.iterdir())


def test_a_file_that_computes_something_else_is_not_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, _, _ = make_run(tmp_path)
    target = tmp_path / "net.pt2"
    target.write_text("old")

    def write(exported: Any, model: Model, path: Path, facts: str) -> None:
        path.write_text("program")

    wrong = [torch.zeros(1, 10)], [torch.zeros(2, 10)]
    outputs = iter(wrong)
    monkeypatch.setattr(program_export, "_traced", lambda model: None)
    monkeypatch.setattr(program_export, "_write_torch_export", write)
    monkeypatch.setattr(program_export, "_load_torch_export", lambda path: lambda call: next(outputs))
    assert main([str(run.folder), str(target), "--format", "torch-export"]) == 65
    assert "differs from PyTorch by up to" in capsys.readouterr().err
    assert target.read_text() == "old"
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["net.pt2"]


@pytest.fixture
def loaded(tmp_path: Path) -> Model:
    run, _, _ = make_run(tmp_path)
    checkpoint = run.checkpoint(3)
    return load_model(run, plain_weights(checkpoint, SavedState.read(checkpoint)), "onnx")


def test_outputs_are_compared_by_value_and_shape(loaded: Model) -> None:
    one, two = loaded.compared
    assert (len(one.inputs[0]), len(two.inputs[0]), len(loaded.traced.inputs[0])) == (1, 2, 2)
    assert not torch.equal(two.inputs[0][0], loaded.traced.inputs[0][0]), "other samples than the traced"
    assert _difference(loaded, "onnx", two, [two.outputs]) == 0
    assert 0 < _difference(loaded, "onnx", two, [two.outputs * (1 + 1e-6)]) < 1e-4
    with pytest.raises(BadFileError, match=r"differs from PyTorch by up to .* \(batch of 2\)"):
        _difference(loaded, "onnx", two, [two.outputs * 1.01])
    with pytest.raises(BadFileError, match=r"outputs of shape \[\(1, 10\)\], PyTorch of \[\(2, 10\)\]"):
        _difference(loaded, "onnx", two, [one.outputs])
    no_number = two.outputs.clone()
    no_number[0, 0] = torch.nan
    with pytest.raises(BadFileError, match="differs"):
        _difference(loaded, "onnx", two, [no_number])
    same = replace(two, outputs=no_number)
    assert _difference(loaded, "onnx", same, [no_number]) == 0


@pytest.mark.parametrize(("form", "dtype"), [("onnx", torch.float32), ("torch-export", torch.float64)])
def test_under_fp64_only_onnx_is_in_float32(tmp_path: Path, form: str, dtype: torch.dtype) -> None:
    run, _, _ = make_run(tmp_path, precision="fp64")
    checkpoint = run.checkpoint(3)
    model = load_model(run, plain_weights(checkpoint, SavedState.read(checkpoint)), form)
    calls = (model.traced, *model.compared)
    assert {each.dtype for call in calls for each in (*call.inputs, call.outputs)} == {dtype}
    assert {each.dtype for each in model.module.parameters()} == {dtype}


def test_another_models_code_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, _, _ = make_run(tmp_path)
    checkpoint = run.checkpoint(3)
    weights = plain_weights(checkpoint, SavedState.read(checkpoint))
    weights["body.weight"] = weights.pop("head.weight")
    with pytest.raises(BadFileError, match=r"not the model of the checkpoint(.|\n)*head\.weight"):
        load_model(run, weights, "onnx")

    def broken(*_: Any, **__: Any) -> DataSource:
        raise KeyError("no such table")

    monkeypatch.setattr(program_export, "build_source", broken)
    with pytest.raises(BadFileError, match="no such table"):
        load_model(run, weights, "onnx")


def test_a_model_larger_than_an_onnx_file_is_refused(loaded: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program_export, "_ONNX_MAX_BYTES", 100)
    with pytest.raises(
        BadFileError,
        match=r"Net has 0\.0 GiB of weights, and an ONNX file holds at most 2; write --format torch-export",
    ):
        program_export.export_program(loaded, Path("net.onnx"), "onnx", {})
