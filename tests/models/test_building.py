from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import torchvision
from safetensors.torch import save_file

from hpc_train.errors import BadFileError
from hpc_train.experiment.config.training_sections import ModelConfig
from hpc_train.training.datasets.types import DataInfo
from hpc_train.training.models import torchvision as torchvision_models
from hpc_train.training.models.building import build_by_factory, build_model
from hpc_train.training.models.torchvision import convert_weights
from hpc_train.training.models.weights import LoadReport, keep_report, report_of


def info(num_classes: int = 10, channels: int = 3) -> DataInfo:
    return DataInfo(num_classes, channels, (0.5,) * channels, (0.5,) * channels)


def build(name: str, data: DataInfo | None = None, **keys: Any) -> torch.nn.Module:
    return build_model(ModelConfig(name=name, **keys), data or info())


@pytest.mark.parametrize("name", ["timm/resnet10t", "torchvision/squeezenet1_1", "torchvision/resnet18"])
@pytest.mark.parametrize("channels", [1, 3])
def test_models_take_the_data_sets_channels_and_classes(name: str, channels: int) -> None:
    model = build(name, info(7, channels)).eval()
    assert model(torch.rand(2, channels, 64, 64)).shape == (2, 7)


def test_random_weights_are_those_of_plain_timm_from_the_same_seed() -> None:
    torch.manual_seed(3)
    expected = timm.create_model("resnet10t", num_classes=10).state_dict()
    torch.manual_seed(3)
    found = build("timm/resnet10t").state_dict()
    assert all(torch.equal(found[key], expected[key]) for key in expected)


def test_arguments_of_the_file_win_over_the_data_set() -> None:
    model = build("timm/resnet10t", args={"num_classes": 3, "in_chans": 2}).eval()
    assert model(torch.rand(1, 2, 64, 64)).shape == (1, 3)
    assert build("torchvision/resnet18", args={"num_classes": 4}).fc.out_features == 4


@pytest.mark.slow
def test_grey_images_keep_the_names_of_parameters_and_compile() -> None:
    model = build("torchvision/resnet18", info(channels=1)).eval()
    assert model.state_dict().keys() == torchvision.models.resnet18().state_dict().keys()
    image = torch.rand(2, 1, 32, 32)
    expected = model(image.repeat(1, 3, 1, 1))
    model.compile(backend="eager")
    assert torch.equal(model(image), expected)


@pytest.mark.parametrize(
    ("name", "args", "message"),
    [
        ("timm/resnet19", {}, "model.name: timm has no model 'resnet19'; did you mean timm/resnet1"),
        ("timm/resnet18.nope", {}, "model.name: timm's resnet18 has no weights 'nope'; known: a1_in1k"),
        ("timm/resnet18", {"drop_rat": 1}, "no argument 'drop_rat'; did you mean 'drop_rate'"),
        ("timm/resnet18", {"output_stride": 7}, "model.args: timm/resnet18 can't be built with"),
        ("torchvision/resnet", {}, "model.name: .*did you mean torchvision/resnet"),
        ("torchvision/resnet18", {"group": 1}, "no argument 'group'; did you mean 'groups'"),
        ("torchvision/resnet18", {"weights": "DEFAULT"}, "model.args.weights: .*; write model.pretrained"),
        # ``validate`` builds models in a child process: no argument may make timm read a file there.
        (
            "timm/test_resnet",
            {"checkpoint_path": "w.pth"},
            "checkpoint_path: .*; write model.pretrained",
        ),
        ("tests.models.factories:mlp", {"widht": 1}, "no argument 'widht'; did you mean 'width'"),
        ("tests.models.factories:no_module", {}, "model.name: .*made a str"),
    ],
)
def test_mistakes_in_names_and_arguments_are_named(name: str, args: dict[str, Any], message: str) -> None:
    with pytest.raises(BadFileError, match=message):
        build(name, args=args)
    with pytest.raises(BadFileError, match=r"^model.name: .*have 5; use timm's"):
        build("torchvision/resnet18", info(channels=5))


def test_a_factorys_model_is_taken_and_its_own_mistake_stays_its_own() -> None:
    factories = "tests.models.factories"
    assert build(f"{factories}:mlp", info(5)).get_submodule("3").out_features == 5
    assert build(f"{factories}:seven_classes", info(5)).out_features == 7, "takes no number of classes"
    assert build(f"{factories}:double_precision").weight.dtype == torch.float32
    assert build(f"{factories}:lazy_that_ran")[0].weight.shape == (10, 4)  # type: ignore[index]
    with pytest.raises(TypeError, match="a mistake inside"):
        build(f"{factories}:broken")
    with pytest.raises(BadFileError, match=r"^model.pretrained: true means a hub's"):
        build_by_factory(ModelConfig(name=f"{factories}:mlp", pretrained=True), info())


@pytest.mark.parametrize(
    ("factory", "words"),
    [
        ("lazy", "has a lazy layer: 0.weight has no shape until the first forward; give the layer its sizes"),
        ("lazy_buffer", "has a lazy layer: buffer has no shape until the first forward"),
        ("on_meta", "made 1.weight on the meta device, which has no values; make it on the CPU"),
        ("buffer_on_meta", "made buffer on the meta device"),
    ],
)
@pytest.mark.parametrize("pretrained", [False, "weights.safetensors"])
def test_a_model_without_values_is_refused(factory: str, words: str, pretrained: bool | str) -> None:
    """Before weights are loaded, since a lazy layer would take any shape and the meta device no values."""
    with pytest.raises(BadFileError, match=rf"^model.name: tests.models.factories:{factory} {words}"):
        build(f"tests.models.factories:{factory}", pretrained=pretrained)


def test_parameters_that_share_memory_without_being_one_are_refused() -> None:
    """EMA would exchange both, and leave the average in the model."""
    with pytest.raises(BadFileError, match=r"0.weight and 1.weight are two tensors .* 1.weight = 0.weight$"):
        build("tests.models.factories:aliased")


def test_a_model_that_is_wanted_on_meta_may_be_there() -> None:
    with torch.device("meta"):
        assert next(build("tests.models.factories:on_meta").parameters()).is_meta


@pytest.mark.parametrize(
    ("name", "args", "words"),
    [
        ("timm/resnet18", {}, ""),
        ("torchvision/resnet18", {}, ""),
        ("smp/unet", {"encoder_name": "resnet18"}, "resnet18"),
        ("smp/unet", {"encoder_name": "tu-resnet18.a1_in1k"}, "tu-resnet18.a1_in1k"),
    ],
)
def test_hub_weights_that_are_not_there_name_prepare_and_wait_for_no_network(
    name: str, args: dict[str, Any], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    if name.startswith("smp/"):
        pytest.importorskip("segmentation_models_pytorch", reason="the extra smp is not installed")
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("socket.getaddrinfo", lambda *_, **__: pytest.fail("used the network"))
    with pytest.raises(BadFileError, match=rf"(?s)^model.pretrained: .*{words}.*hpc-train prepare FILE"):
        build(name, args=args, pretrained=True)


def test_torchvisions_cached_weights_are_loaded_and_the_head_swapped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    name = Path(torchvision.models.SqueezeNet1_1_Weights.DEFAULT.url).name
    cached = torchvision.models.squeezenet1_1()
    (tmp_path / "hub" / "checkpoints").mkdir(parents=True)
    torch.save(cached.state_dict(), tmp_path / "hub" / "checkpoints" / name)
    monkeypatch.setattr(torchvision.models.WeightsEnum, "get_state_dict", _load_unchecked)
    model = build("torchvision/squeezenet1_1", info(6), pretrained=True).eval()
    assert torch.equal(model.get_parameter("features.0.weight"), cached.get_parameter("features.0.weight"))
    report = report_of(model)
    assert report is not None and report.missing == ("classifier.1.bias", "classifier.1.weight")
    assert model(torch.rand(1, 3, 64, 64)).shape == (1, 6)


@pytest.mark.parametrize(
    ("name", "heads"),
    [
        ("lraspp_mobilenet_v3_large", ["classifier.low_classifier", "classifier.high_classifier"]),
        ("deeplabv3_mobilenet_v3_large", ["aux_classifier.4", "classifier.4"]),
        ("fcn_resnet50", ["aux_classifier.4", "classifier.4"]),
    ],
)
def test_segmentation_models_give_a_class_per_pixel_and_swap_all_heads(name: str, heads: list[str]) -> None:
    args: dict[str, Any] = {"aux_loss": True} if "aux_classifier.4" in heads else {}
    with torch.device("meta"):
        model = build(f"torchvision/{name}", info(6), args=args)
        outputs = model(torch.empty(2, 3, 64, 96))
        assert outputs["out"].shape == (2, 6, 64, 96)
        assert ("aux" in outputs) == bool(args)
        assert torchvision_models._heads(name, model) == heads
        for head in heads:
            assert torchvision_models._swap_head(model, head, 4)
        assert model(torch.empty(2, 3, 64, 96))["out"].shape == (2, 4, 64, 96)


def _load_unchecked(weights: Any, *args: object, **keys: object) -> Any:
    """Load from the cache without the hash of the file's name, which random weights can't have."""
    return torch.hub.load_state_dict_from_url(weights.url, weights_only=True)


@pytest.mark.slow
@pytest.mark.parametrize("suffix", [".safetensors", ".pth"])
@pytest.mark.parametrize(("name", "head"), [("timm/resnet10t", "fc"), ("torchvision/resnet18", "fc")])
def test_a_files_weights_are_loaded_and_the_head_swapped(
    name: str, head: str, suffix: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = build(name, info(20))
    path = tmp_path / f"weights{suffix}"
    _save(source.state_dict(), path)
    with caplog.at_level(logging.INFO):
        model = build(name, info(10), pretrained=str(path))
    expected, found = source.state_dict(), model.state_dict()
    assert f"; 2 missing and random ({head}.bias, {head}.weight)" in caplog.text
    assert all(torch.equal(found[key], expected[key]) for key in found if not key.startswith(head))
    assert found[f"{head}.weight"].shape[0] == 10


def _save(weights: dict[str, torch.Tensor], path: Path) -> None:
    if path.suffix == ".safetensors":
        save_file(weights, path)
    else:
        torch.save({"state_dict": {f"module._orig_mod.{key}": v for key, v in weights.items()}}, path)


def test_the_head_stays_if_the_classes_are_equal(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source = build("timm/resnet10t")
    save_file(source.state_dict(), tmp_path / "w.safetensors")
    with caplog.at_level(logging.INFO):
        model = build("timm/resnet10t", pretrained=str(tmp_path / "w.safetensors"))
    assert torch.equal(model.get_parameter("fc.weight"), source.get_parameter("fc.weight"))
    (said,) = [record.getMessage() for record in caplog.records]
    total = len([key for key in source.state_dict() if not key.endswith("num_batches_tracked")])
    assert said == f"pretrained weights: {total} of {total} tensors from {tmp_path / 'w.safetensors'}"


VIT = {"img_size": 32, "patch_size": 8}


@pytest.mark.parametrize("size", [16, 48])
def test_position_embeddings_areconvert_weights_as_timm_does(size: int, tmp_path: Path) -> None:
    from timm.layers import resample_abs_pos_embed

    source = build("timm/test_vit", args=VIT)
    path = tmp_path / "w.safetensors"
    save_file(source.state_dict(), path)
    model = build("timm/test_vit", info(7), args={**VIT, "img_size": size}, pretrained=str(path))
    grid = size // 8
    expected = resample_abs_pos_embed(source.get_parameter("pos_embed"), [grid, grid], num_prefix_tokens=1)
    assert torch.equal(model.get_parameter("pos_embed"), expected)
    assert torch.equal(
        model.get_parameter("blocks.0.attn.qkv.weight"), source.get_parameter("blocks.0.attn.qkv.weight")
    )
    report = report_of(model)
    assert report is not None
    assert (report.resized, report.missing) == (("pos_embed",), ("head.bias", "head.weight"))
    total = len(model.state_dict())
    assert report.line() == (
        f"pretrained weights: {total - 2} of {total} tensors from {path}; "
        "2 missing and random (head.bias, head.weight); 1 resized (pos_embed)"
    )


def test_the_positions_of_torchvisions_vit_areconvert_weights_as_timm_does(tmp_path: Path) -> None:
    from timm.layers import resample_abs_pos_embed

    def vit(size: int) -> torch.nn.Module:
        args = {
            "image_size": size,
            "num_layers": 1,
            "num_heads": 2,
            "hidden_dim": 8,
            "mlp_dim": 8,
            "patch_size": 8,
        }
        return torchvision.models.VisionTransformer(**args)

    source, model = vit(32), vit(48)
    found = convert_weights(model, source.state_dict())
    name = "encoder.pos_embedding"
    expected = resample_abs_pos_embed(source.get_parameter(name), [6, 6], num_prefix_tokens=1)
    assert torch.equal(found[name], expected)
    model.load_state_dict(found)


def test_a_report_names_three_of_many_and_the_log_all(caplog: pytest.LogCaptureFixture) -> None:
    model = torch.nn.Linear(2, 2)
    report = LoadReport("w.pth", 1, 2, unexpected=tuple("abcde"))
    assert report.line().endswith("; 5 unexpected (a, b, c and 2 more)")
    with caplog.at_level(logging.INFO):
        keep_report(model, report)
    assert "5 unexpected (a, b, c, d, e)" in caplog.text
    assert report_of(model) is report


def test_timms_colour_weights_become_grey_ones_by_summing(tmp_path: Path) -> None:
    source = build("timm/resnet18")
    save_file(source.state_dict(), tmp_path / "w.safetensors")
    model = build("timm/resnet18", info(channels=1), pretrained=str(tmp_path / "w.safetensors"))
    torch.testing.assert_close(
        model.get_parameter("conv1.weight"), source.get_parameter("conv1.weight").sum(1, keepdim=True)
    )


def test_weights_of_another_model_are_refused_with_names(tmp_path: Path) -> None:
    weights = build("tests.models.factories:mlp").state_dict()
    weights["extra"] = torch.zeros(1)
    weights["1.weight"] = torch.zeros(9, 48)
    del weights["1.bias"]
    torch.save(weights, tmp_path / "w.pth")
    with pytest.raises(BadFileError) as caught:
        build("tests.models.factories:mlp", pretrained=str(tmp_path / "w.pth"))
    assert "lacks 1.bias; it has besides extra; it has in another shape 1.weight (9, 48)" in str(caught.value)


class _Hostile:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("ran",)


def test_a_hostile_pth_runs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"1.weight": _Hostile()}, "hostile.pth")
    with pytest.raises(BadFileError, match=r"^model.pretrained: hostile.pth .*could run code when loaded"):
        build("tests.models.factories:mlp", pretrained="hostile.pth")
    assert not Path("ran").exists()


def test_safetensors_may_have_another_ending(tmp_path: Path) -> None:
    model = build("tests.models.factories:mlp")
    save_file(model.state_dict(), tmp_path / "w.pth")
    again = build("tests.models.factories:mlp", pretrained=str(tmp_path / "w.pth"))
    assert all(map(torch.equal, model.state_dict().values(), again.state_dict().values()))


@pytest.mark.parametrize("name", ["w.pth", "w.safetensors"])
def test_a_damaged_or_missing_file_is_the_files_error(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    with pytest.raises(BadFileError, match=r"^model.pretrained: there is no file"):
        build("tests.models.factories:mlp", pretrained=str(path))
    path.write_bytes(b"not weights")
    with pytest.raises(BadFileError, match=r"^model.pretrained: .*damaged"):
        build("tests.models.factories:mlp", pretrained=str(path))
