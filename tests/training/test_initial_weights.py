"""``model.init_from``: what is loaded from a checkpoint or a file, and what stays random."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from hpc_train.errors import BadFileError
from hpc_train.experiment.config.training_sections import ModelConfig
from hpc_train.training.checkpoint.export import export
from hpc_train.training.datasets.types import DataInfo
from hpc_train.training.models.building import build_model
from hpc_train.training.models.weights import report_of
from hpc_train.training.train_state import load_initial_weights
from tests.checkpoint.checkpoint_runs import OddModel, Trainee, make_run

INFO = DataInfo(2, 3, (0.5,) * 3, (0.5,) * 3, ("a", "b"))
VIT = {"img_size": 32, "patch_size": 8, "embed_dim": 16, "depth": 2, "num_heads": 2}


def build(classes: int = 10, **keys: object) -> nn.Module:
    config = ModelConfig.model_validate({"name": "timm/test_vit", "args": VIT} | keys)
    info = DataInfo(classes, 3, (0.5,) * 3, (0.5,) * 3)
    model = build_model(config, info)
    load_initial_weights(model, config, info)
    return model


@pytest.mark.parametrize("is_of_ema", [False, True])
def test_a_checkpoints_weights_are_those_that_export_writes(tmp_path: Path, is_of_ema: bool) -> None:
    run = make_run(tmp_path / "run")
    run.run.write_text('{"id": "0123456789"}')
    trainee = Trainee()
    trainee.train(1)
    tensors = dict(trainee.model.state_dict())
    del tensors["tied_b.weight"]
    averages = {name: value * 2 if value.is_floating_point() else value for name, value in tensors.items()}
    best = {"best": {"metric": "ema_loss", "value": 0.5, "step": 1}} if is_of_ema else {}
    trainee.checkpointer(run).save(replace(trainee.state, averages=averages), 1, best)
    export(run, tmp_path / "w.safetensors")
    torch.manual_seed(9)
    model = OddModel()
    config = ModelConfig(name="tests.checkpoint:odd", init_from=str(run.checkpoint(1).folder))
    load_initial_weights(model, config, INFO)
    found, expected = model.state_dict(), load_file(tmp_path / "w.safetensors")
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    report = report_of(model)
    source = "the EMA weights of run run at step 1" if is_of_ema else "run run at step 1"
    assert report is not None and (report.source, report.missing) == (source, ())
    (run.checkpoint(1).folder / "shard-00000.safetensors").write_bytes(b"")
    with pytest.raises(BadFileError, match=r"^model.init_from: .*step-00000001 is damaged: .*; name another"):
        load_initial_weights(model, config, INFO)


def test_a_head_for_other_classes_is_reported(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    run.run.write_text('{"id": "0123456789"}')
    trainee = Trainee()
    data = {"num_samples": 4, "classes": INFO.classes_hash}
    trainee.checkpointer(run).save(trainee.state, 1, {"data": data})
    config = ModelConfig(name="tests.checkpoint:odd", init_from=str(run.checkpoint(1).folder))
    other = "run run at step 1, whose head is for other classes or for another order of them"
    for names, source in ((("a", "b"), "run run at step 1"), (("b", "a"), other)):
        model = OddModel()
        load_initial_weights(model, config, replace(INFO, class_names=names))
        report = report_of(model)
        assert report is not None and report.source == source


def test_the_report_names_what_was_loaded_missing_unexpected_and_resized(tmp_path: Path) -> None:
    weights = build().state_dict()
    weights["decoder.weight"] = torch.zeros(2)
    del weights["blocks.1.norm1.bias"]
    save_file(weights, path := tmp_path / "w.safetensors")
    model = build(7, args=VIT | {"img_size": 48}, init_from=str(path))
    report = report_of(model)
    assert report is not None
    assert report.missing == ("blocks.1.norm1.bias", "head.bias", "head.weight")
    assert (report.unexpected, report.resized) == (("decoder.weight",), ("pos_embed",))
    assert report.num_loaded == report.num_tensors - 3
    name = "blocks.0.attn.qkv.weight"
    assert torch.equal(model.get_parameter(name), weights[name])


def test_weights_of_other_shapes_or_names_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "w.pt"
    torch.save({"state_dict": build().state_dict()}, path)
    with pytest.raises(BadFileError, match=r"^model.init_from: .*blocks.0.attn.proj.bias \(16,\) instead of"):
        build(args=VIT | {"embed_dim": 32}, init_from=str(path))
    torch.save({"other.weight": torch.zeros(2)}, path)
    with pytest.raises(BadFileError, match=r"^model.init_from: .* does not fit .*: none of its 1 names is"):
        build(init_from=str(path))
    path.write_bytes(b"no weights")
    with pytest.raises(BadFileError, match=r"^model.init_from: .*w.pt is not a file of plain tensors"):
        build(init_from=str(path))
