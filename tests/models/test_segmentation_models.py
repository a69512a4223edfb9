"""Models of segmentation-models-pytorch: built for the data, and trained like a bare loop."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional

from hpc_train.errors import BadFileError
from hpc_train.experiment.config.training_sections import ModelConfig
from hpc_train.training.datasets.random_numbers import seed_build, seed_forward
from hpc_train.training.datasets.types import Batch, DataInfo
from hpc_train.training.models.building import build_model
from hpc_train.training.models.preprocessing import with_preprocessing
from hpc_train.training.models.weights import report_of
from hpc_train.training.strategies.model_facts import facts
from hpc_train.training.tasks.segmentation import Segmentation
from tests.datasets.samples import experiment
from tests.parallelism.batches import INFO, NUM_CLASSES, micro_batch
from tests.parallelism.cases import SGD, STEPS, Case, Choice, Shape
from tests.parallelism.training import Trained, Trainee
from tests.ranks import run_ranks

smp = pytest.importorskip("segmentation_models_pytorch", reason="the extra smp is not installed")

#: A small encoder, cut where images of 16×16 have 2×2 values left.
TINY = {"encoder_name": "tu-test_resnet", "encoder_depth": 3, "decoder_channels": [8, 8, 8]}


def build(name: str, channels: int = 3, *, download: bool = False, **keys: Any) -> nn.Module:
    info = DataInfo(5, channels, (0.5,) * channels, (0.5,) * channels)
    return build_model(ModelConfig(name=name, **keys), info, download=download)


@pytest.mark.slow
def test_every_architecture_has_a_row_and_gives_logits_per_pixel() -> None:
    names = {"unet", "unetplusplus", "fpn", "deeplabv3", "deeplabv3plus", "pspnet", "linknet", "manet", "pan"}
    assert smp.MODEL_ARCHITECTURES_MAPPING.keys() == names | {"upernet", "segformer", "dpt"}
    info = DataInfo(5, 2, (0.5,) * 2, (0.5,) * 2)
    for name in smp.MODEL_ARCHITECTURES_MAPPING:
        # A ViT is fixed to the size that it is built for.
        args = {"img_size": 128} if name == "dpt" else {"encoder_name": "tu-test_resnet"}
        with torch.device("meta"):
            model = build_model(ModelConfig(name=f"smp/{name}", args=args), info).eval()
        assert model(torch.empty(2, 2, 128, 128, device="meta")).shape == (2, 5, 128, 128), name


def test_random_weights_are_the_librarys_from_the_same_seed() -> None:
    torch.manual_seed(3)
    expected = smp.Unet(encoder_weights=None, classes=5, **TINY).state_dict()
    torch.manual_seed(3)
    found = build("smp/unet", args=TINY).state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) for key in expected)


@pytest.mark.parametrize(
    ("name", "args", "message"),
    [
        ("smp/unett", {}, r"^model\.name: smp has no model 'unett'; did you mean smp/unet\?"),
        ("smp/unet", {"encoder_name": "resnet35"}, r"^model\.args\.encoder_name: .*; did you mean res"),
        ("smp/unet", {"encoder_name": "tu-resnet35"}, "did you mean tu-resnet50"),
        ("smp/unet", {"encoder_name": "convnext_tiny"}, r"did you mean tu-convnext_tiny\?"),
        ("smp/unet", {"encoder_name": "tu-resnet18.no"}, r"^model\.args: smp/unet can't be built with"),
        ("smp/unet", {"encoder_name": 3}, r"^model\.args\.encoder_name: 3 is not a name"),
        ("smp/unet", {"decoder_chanels": [8]}, r"takes no argument .*; did you mean 'decoder_channels'"),
        ("smp/unet", TINY | {"drop_rat": 0.1}, "takes no argument 'drop_rat'"),
        ("smp/unet", {"encoder_weights": "ssl"}, r"^model\.args\.encoder_weights: .*write model\.pretrained"),
        ("smp/unet", {"classes": 3}, r"^model\.args\.classes: is not allowed here; take it out"),
        ("smp/unet", {"activation": "softmax"}, r"^model\.args\.activation: .*needs the logits"),
        ("smp/linknet", {"encoder_name": "mit_b0"}, "Encoder `mit_b0` is not supported for Linknet"),
    ],
)  # fmt: skip
def test_mistakes_are_named(name: str, args: dict[str, Any], message: str) -> None:
    with torch.device("meta"), pytest.raises(BadFileError, match=message):
        build(name, args=args)


def test_a_missing_package_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "segmentation_models_pytorch", None)
    with pytest.raises(BadFileError, match=r"^model\.name: smp/ needs .*pip install 'hpc-train\[smp\]'"):
        build("smp/unet")


def test_weights_of_other_classes_keep_all_but_the_segmentation_head(tmp_path: Path) -> None:
    # Its encoder has linear layers, of which none is the head.
    args = TINY | {"encoder_name": "tu-test_convnext"}
    given = smp.Unet(encoder_weights=None, classes=9, **args)
    save_file(given.state_dict(), tmp_path / "given.safetensors")
    model = build("smp/unet", args=args, pretrained=str(tmp_path / "given.safetensors"))
    report = report_of(model)
    assert report is not None
    assert report.missing == ("segmentation_head.0.bias", "segmentation_head.0.weight")
    assert torch.equal(model.encoder.model.stem_0.weight, given.encoder.model.stem_0.weight)  # type: ignore[union-attr]


@pytest.mark.slow
def test_pretrained_encoders_and_their_normalization_come_from_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder = smp.encoders.get_encoder("resnet18")
    save_file(encoder.state_dict(), tmp_path / "model.safetensors")
    values = {"input_space": "RGB", "input_range": [0, 1], "mean": [0.1, 0.2, 0.3], "std": [0.4, 0.5, 0.6]}
    (tmp_path / "config.json").write_text(json.dumps(values))

    def download(repo: str, filename: str, revision: str) -> str:
        assert repo == "smp-hub/resnet18.imagenet"
        return str(tmp_path / filename)

    monkeypatch.setattr(smp.encoders, "hf_hub_download", download)
    model = build("smp/fpn", args={"encoder_name": "resnet18"}, pretrained=True)
    assert torch.equal(model.encoder.conv1.weight, encoder.conv1.weight)  # type: ignore[union-attr]
    report = report_of(model)
    assert report is not None and {name.split(".")[0] for name in report.missing} == {
        "decoder",
        "segmentation_head",
    }
    given = experiment(normalize="weights", eval_crop=0.5, interpolation="bicubic")
    config = ModelConfig(name="smp/fpn", args={"encoder_name": "resnet18"}, pretrained=True)
    data = with_preprocessing(given.model_copy(update={"model": config})).data
    assert data.normalize is not None
    assert (data.normalize.mean, data.normalize.std) == (values["mean"], values["std"])
    assert (data.interpolation, data.eval_crop) == ("bicubic", 0.5)


def test_encoders_without_weights_of_imagenet_are_refused() -> None:
    with pytest.raises(BadFileError, match=r"resnext101_32x16d has weights of instagram, ssl, swsl"):
        build("smp/unet", args={"encoder_name": "resnext101_32x16d"}, pretrained=True)


@pytest.mark.slow
def test_facts_hold_sizes_blocks_and_encoders_that_can_not_be_built_on_meta() -> None:
    fits = {"has_batchnorm": True, "shared": {}, "dropout_key": None}
    # A U-Net resizes what does not fit; mit's constructor reads values of tensors.
    assert facts("smp/unet", {"encoder_name": "resnet18"}, 250) == fits | {"most_stages": 8}
    assert facts("smp/unet", {"encoder_name": "mit_b0"}, [180, 240]) == fits | {"most_stages": 8}
    found = facts("smp/fpn", {"encoder_name": "resnet18"}, [180, 240])
    assert "Wrong input shape height=180" in found["size_refusal"]
    assert (found["fitting_size"], found["takes_img_size"]) == ([192, 256], False)
    found = facts("smp/dpt", {"encoder_name": "tu-vit_tiny_patch16_224"}, 250)
    assert found["fitting_size"] == 224


def masks(classes: Tensor) -> Tensor:
    """Return masks (B, 16, 16): the class, plus the row."""
    rows = torch.arange(16)[:, None].expand(16, 16)
    return (classes[:, None, None] + rows) % NUM_CLASSES


class OnMasks(Segmentation):
    def loss(self, outputs: Any, batch: Batch) -> Tensor:
        return super().loss(outputs, replace(batch, targets=masks(batch.targets)))


class Segmenter(Trainee):
    """Trains on masks."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.task = OnMasks(self.config, INFO)  # type: ignore[assignment]


def train(rank: int, ranks: int, case: Case) -> Trained:
    trainee = Segmenter(case.experiment, rank, ranks)
    trainee.train_state.wrapped.train()
    losses = [trainee.step(step)[0] for step in range(STEPS)]
    return Trained(torch.stack(losses), {}, trainee.weights())


def plain_weights(seed: int, micro_batches: int) -> dict[str, Tensor]:
    """Return the weights after all steps of a loop without hpc-train."""
    seed_build(seed)
    model = smp.Unet(encoder_weights=None, in_channels=1, classes=NUM_CLASSES, **TINY).double().train()
    optimizer = torch.optim.SGD(model.parameters(), 0.002, momentum=0.9, weight_decay=0.01)
    for step in range(STEPS):
        for number in range(micro_batches):
            seed_forward(seed, step, number, torch.device("cpu"))
            images, classes = micro_batch(step, number)
            (functional.cross_entropy(model(images), masks(classes)) / micro_batches).backward()
        optimizer.step()
        optimizer.zero_grad()
    found: dict[str, Tensor] = model.state_dict()
    return found


@pytest.mark.slow
def test_training_equals_plain_pytorch(tmp_path: Path) -> None:
    """On one and two ranks; with checkpointed blocks, sharded, and cut into two stages."""
    rest = Choice("rest", ("precision=fp64", "optimization.schedule={name: constant}", SGD))
    model = Choice("model", (f"model={{name: smp/unet, args: {json.dumps(TINY)}}}",))
    expected = plain_weights(5, 4)
    for strategy, ranks, more in (
        ("ddp", 1, ()),
        ("ddp", 2, ("activation_checkpointing=blocks",)),
        ("fsdp", 2, ()),
        ("pipeline", 2, ()),
    ):
        given = Case(strategy, Shape(ranks, 4), (model, rest, Choice("more", more)))
        results: list[Trained] = run_ranks(ranks, train, given, folder=tmp_path)
        assert results[0].weights.keys() == expected.keys()
        for key, value in results[0].weights.items():
            torch.testing.assert_close(
                value, expected[key], rtol=0, atol=1e-9, msg=lambda m: f"{strategy}: {key}: {m}"
            )
