"""Files of weights as other trainers write them: what is selected, removed and reported."""

from __future__ import annotations

import argparse
import shutil
from collections import OrderedDict, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from hpc_train.errors import BadFileError
from hpc_train.training.models.weight_files import read_weights
from hpc_train.training.models.weights import (
    common_prefixes,
    load_weights,
    load_what_fits,
    report_of,
    unchanged,
)

State = dict[str, Tensor]


class Net(nn.Module):
    """Names like those of vision models, at the depth and width that a test needs."""

    def __init__(self, classes: int = 5, depth: int = 2, width: int = 4, channels: int = 3) -> None:
        super().__init__()
        self.stem = nn.Conv2d(channels, width, 3)
        self.pos_embed = nn.Parameter(torch.randn(1, 7, width))
        layers = ({"attn": nn.Linear(width, width), "norm": nn.BatchNorm1d(width)} for _ in range(depth))
        self.blocks = nn.ModuleList(nn.ModuleDict(layer) for layer in layers)
        self.head = nn.Linear(width, classes)


class AttributeDict(dict):  # type: ignore[type-arg]
    """Of Lightning's hyperparameters."""


def prefixed(weights: State, *prefixes: str) -> State:
    return {prefix + name: value for name, value in weights.items() for prefix in prefixes}


def inside(weights: State, part: str) -> State:
    return {name.replace("blocks.0.", f"blocks.0.{part}."): value for name, value in weights.items()}


OBJECTS = {
    "hyper_parameters": AttributeDict(lr=np.float64(0.1)), "callbacks": {"a": {"best": torch.tensor(1.0)}},
    "optimizer_states": [{"state": {0: {"exp_avg": torch.zeros(2)}}}],
    "args": argparse.Namespace(path=Path("x")), "history": deque([1]), "epoch": 3,
    "optimizer": {"state": {0: {"exp_avg": torch.zeros(2)}}},
}  # fmt: skip
AVERAGED = {"n_averaged": torch.tensor(3)}
OTHER = {"criterion.weight": torch.zeros(1)}


@pytest.mark.parametrize(
    ("content", "note"),
    [
        (lambda w: w, ""),
        (OrderedDict, ""),
        (lambda w: prefixed(w, "module."), "without the prefix module."),
        (lambda w: {"state_dict": prefixed(w, "module._orig_mod.")},
         "state_dict, without _orig_mod., without the prefix module."),
        (lambda w: {"state_dict": prefixed(w, "model.") | OTHER, **OBJECTS},
         "state_dict, without the prefix model., 1 other tensor skipped"),
        (lambda w: {"state_dict": prefixed(w, "model.backbone."), **OBJECTS},
         "state_dict, without the prefix model.backbone."),
        (lambda w: {"state_dict": {k: v + 1 for k, v in w.items()}, "state_dict_ema": w, **OBJECTS},
         "state_dict_ema"),
        (lambda w: {"model": w, "model_ema": prefixed(w, "module.") | AVERAGED, **OBJECTS},
         "model_ema, without the prefix module., 1 other tensor skipped"),
        (lambda w: {"model_state_dict": inside(w, "_orig_mod"), "epoch": 1},
         "model_state_dict, without _orig_mod."),
        (lambda w: prefixed(inside(w, "_checkpoint_wrapped_module"), "_fsdp_wrapped_module."),
         "without _checkpoint_wrapped_module. and _fsdp_wrapped_module."),
        (lambda w: {"net_g": w, "iter": 5}, "net_g"),
        (lambda w: {"state_dict": {"model": w}}, "state_dict.model"),
        (lambda w: {"state_dict": prefixed(w, "encoder_q.", "encoder_k.") | {"queue": torch.zeros(3)}},
         f"state_dict, without the prefix encoder_q., {len(Net().state_dict()) + 1} other tensors skipped"),
        (lambda w: w | {"num_updates": 3, "_extra_state": None}, ""),
    ],
)  # fmt: skip
def test_weights_of_other_trainers_are_loaded_and_what_was_removed_is_reported(
    tmp_path: Path, content: Callable[[State], Any], note: str
) -> None:
    weights, path = Net().state_dict(), str(tmp_path / "w.ckpt")
    torch.save(content(dict(weights)), path)
    models = Net(), Net()
    load_weights(models[0], path)
    load_what_fits(models[1], *read_weights(path, "key"), unchanged, "key")
    for model in models:
        found, report = model.state_dict(), report_of(model)
        assert all(torch.equal(found[name], value) for name, value in weights.items())
        assert report is not None and not report.missing and not report.unexpected
        assert report.source == (f"{path} ({note})" if note else path)


def test_the_models_own_prefix_is_added_and_a_missing_head_stays_random(tmp_path: Path) -> None:
    class Wrapper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.vit, self.classifier = Net(), nn.Linear(4, 3)

    path, weights = str(tmp_path / "w.pth"), Net().state_dict()
    torch.save(prefixed(weights, "model."), path)
    model = Wrapper()
    load_weights(model, path)
    assert all(torch.equal(model.vit.state_dict()[name], value) for name, value in weights.items())
    report = report_of(model)
    assert report is not None and report.missing == ("classifier.bias", "classifier.weight")
    assert report.source == f"{path} (without the prefix model., with the prefix vit.)"


def without(weights: State, part: str) -> State:
    return {name: value for name, value in weights.items() if part not in name}


OTHER_LIBRARY = (
    r"none of its 9 names is the model's: they are those of torchvision's ViT, the model's those of timm's "
    r"ViT; it lacks blocks.0.attn.bias, blocks.0.attn.weight, \S+ and \d+ more; "
    r"it has besides \S+, \S+, \S+ and 6 more; give"
)
TORCHVISION_VIT = {f"encoder.layers.encoder_layer_{i}.ln_1.weight": torch.zeros(4) for i in range(9)}


@pytest.mark.parametrize(
    ("weights", "cause"),
    [
        (Net(depth=3).state_dict(), "another depth: 3 × blocks in the file, 2 × blocks in the model; it has"),
        (Net(width=8).state_dict(), r"16 of 19 common tensors have another size: another variant"),
        (Net(channels=1).state_dict(), "it is for another number of input channels; it has in another shape"),
        (Net().state_dict() | {"pos_embed": torch.zeros(1, 5, 4)}, "are of another image or patch size"),
        (without(Net().state_dict(), "running_"), r"lacks the running statistics of BatchNorm: save state_d"),
        (Net().state_dict() | {"blocks.0.attn.lora_A.weight": torch.zeros(1)}, r"adapters \(LoRA\); merge"),
        (TORCHVISION_VIT, OTHER_LIBRARY),
        (without(Net().state_dict(), "stem"), "17 of 19 names are the model's: another variant.*init_from"),
    ],
)  # fmt: skip
def test_weights_that_do_not_fit_are_refused_with_why(tmp_path: Path, weights: State, cause: str) -> None:
    path = str(tmp_path / "w.pth")
    torch.save(weights, path)
    with pytest.raises(BadFileError, match=rf"^model.pretrained: .*w.pth does not fit the model: .*{cause}"):
        load_weights(Net(), path)


class Hostile:
    def __reduce__(self) -> tuple[Any, ...]:
        return shutil.copy, (__file__, "ran")


def test_python_objects_beside_weights_never_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"state_dict": Net().state_dict(), "hook": Hostile()}, "w.ckpt")
    load_weights(Net(), "w.ckpt")
    assert not Path("ran").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (Net(), "but a whole model or other Python objects; save the model's: torch.save"),
        ({"a": {"w": torch.zeros(1)}, "b": {"w": torch.zeros(1)}}, "but several entries: a, b;"),
        ({"optimizer": OBJECTS["optimizer"]}, "contains no state dict"),
    ],
)
def test_a_file_without_one_state_dict_is_refused(tmp_path: Path, content: Any, message: str) -> None:
    torch.save(content, tmp_path / "w.pt")
    with pytest.raises(BadFileError, match=rf"^key: .*w.pt contains no state dict .*{message}|{message}"):
        read_weights(str(tmp_path / "w.pt"), "key")


def test_a_few_equal_endings_are_not_a_prefix() -> None:
    names = {f"blocks.{i}.{part}.weight" for i in range(3) for part in ("attn", "mlp", "norm")}
    expected = {f"vit.layers.{i}.{part}.weight" for i in range(3) for part in ("query", "key", "mlp", "out")}
    assert common_prefixes(names, expected) == ("", "")
    assert common_prefixes({f"x.{name}" for name in names}, names) == ("x.", "")
