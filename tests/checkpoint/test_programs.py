"""Exported programs: the outputs are those of the module, for any number of samples, without its code."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import hpc_train
from hpc_train.errors import BadFileError
from hpc_train.training.checkpoint.export import export
from hpc_train.training.checkpoint.inference import example_inputs
from hpc_train.training.datasets.base import DataSource
from tests.checkpoint.test_inference import COLORS, LETTERS, VIT, Net, make_run

IMAGES = {"name": "imagefolder", "root": "/nonexistent", "image_size": 32}
TOKENS = {"name": "tokens", "root": "/nonexistent", "args": {"length": 8}}
GPT = {"name": "gpt", "args": {"num_layers": 1, "num_heads": 2, "dim": 8}}


class Branching(Net):
    def forward(self, images: Tensor) -> Tensor:
        return super().forward(images if images.sum() > 0 else -images)


def _run(folder: Path, case: str) -> Any:
    if case == "gpt":
        return make_run(folder, LETTERS, task="causal_lm", model=GPT, data=TOKENS)[0]
    if case == "hf":
        pytest.importorskip("transformers")
        (folder / "config.json").write_text(json.dumps(VIT))
        return make_run(folder, model={"name": f"hf/{folder}"}, data=IMAGES)[0]
    precision = {"precision": "fp64"} if case == "fp64" else {}
    return make_run(folder, data=IMAGES, **precision)[0]


@pytest.mark.slow
# A module in fp64 is exported as the net of fp32.
@pytest.mark.parametrize("case", [pytest.param("net", marks=pytest.mark.soak), "fp64", "gpt", "hf"])
def test_an_onnx_file_computes_what_the_module_does(tmp_path: Path, case: str) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    run, target = _run(tmp_path, case), tmp_path / "model.onnx"
    export(run, target)
    model = hpc_train.load_model(run.folder)
    inputs = example_inputs(model)
    assert isinstance(inputs, Tensor)
    batch = torch.cat([inputs, inputs.flip(0), inputs])[:5]
    session = onnxruntime.InferenceSession(target)
    found = session.run(None, {"input": (batch.float() if case == "fp64" else batch).numpy()})[0]
    expected = model.module(batch).float()
    torch.testing.assert_close(torch.from_numpy(found), expected, rtol=1e-3, atol=1e-5)
    facts = session.get_modelmeta().custom_metadata_map
    assert json.loads(facts["classes"]) == list(model.class_names) and facts["step"] == "3"
    assert ("mean" in facts) == (case != "gpt")


@pytest.mark.slow
def test_a_torch_export_file_computes_what_the_module_does(tmp_path: Path) -> None:
    run, target = _run(tmp_path, "net"), tmp_path / "model.pt2"
    export(run, target)
    model, facts = hpc_train.load_model(run.folder), {"classes.json": "", "mean.json": ""}
    program = torch.export.load(target, extra_files=facts).module()
    batch = torch.rand(3, 3, 32, 32)
    torch.testing.assert_close(program(batch), model.module(batch))
    assert json.loads(facts["classes.json"]) == ["red", "green", "blue"]
    assert json.loads(facts["mean.json"]) == list(COLORS.mean)


@pytest.mark.parametrize("suffix", [".onnx", ".pt2"])
def test_a_model_that_can_not_be_traced_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], suffix: str
) -> None:
    """In a few lines, without the graph that torch prints."""
    run, _ = make_run(tmp_path, model={"name": f"{__name__}:Branching"}, data=IMAGES)
    with pytest.raises(BadFileError, match=rf"can't be exported as {suffix}: GuardOnDataDep(.|\n)*docs/depl"):
        export(run, tmp_path / f"model{suffix}")
    captured = capsys.readouterr()
    assert captured.out == captured.err == ""
    assert not [path for path in tmp_path.iterdir() if path.name.startswith((".hpc", "model"))]


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(BadFileError, match=r"pip install 'hpc-train\[onnx\]', or write FILE.pt2"):
        export(_run(tmp_path, "net"), tmp_path / "model.onnx")


def test_inputs_of_an_unknown_size_are_those_of_the_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, _ = make_run(tmp_path)
    model = hpc_train.load_model(run.folder)
    with pytest.raises(BadFileError, match=r"the data are not here: (.|\n)*-o FILE.safetensors"):
        example_inputs(model)
    images = torch.zeros(4, 3, 9, 7, dtype=torch.uint8)
    source = DataSource([(image, 0) for image in images], None, COLORS)
    monkeypatch.setattr("hpc_train.training.datasets.building.build_source", lambda config: source)
    inputs = example_inputs(model)
    assert isinstance(inputs, Tensor) and inputs.shape == (2, 3, 9, 7)
    assert inputs[0, 2, 0, 0] == pytest.approx(-COLORS.mean[2] / COLORS.std[2])


@pytest.mark.slow
def test_other_outputs_in_onnx_runtime_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    other = torch.full((2, 3), 9.0).numpy()
    monkeypatch.setattr(
        onnxruntime.InferenceSession, "run", lambda self, names, feed: [other[: len(feed["input"])]]
    )
    with pytest.raises(BadFileError, match=r"computes other outputs in ONNX Runtime: (.|\n)*write FILE.pt2"):
        export(_run(tmp_path, "net"), tmp_path / "model.onnx")
    assert not (tmp_path / "model.onnx").exists()
