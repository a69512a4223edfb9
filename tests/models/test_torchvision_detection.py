"""torchvision's detectors compute the same as without us, on images that we have normalized."""

from __future__ import annotations

import pytest
import torch
import torchvision

from hpc_train.config.training_sections import ModelConfig
from hpc_train.data_facts.detectors import is_detector
from hpc_train.datasets.types import DataInfo
from hpc_train.errors import BadFileError
from hpc_train.models.building import build_model
from hpc_train.models.torchvision import model_names
from hpc_train.models.torchvision_detection import as_given, detector_names, swap_head

INFO = DataInfo(num_classes=3, channels=3, mean=(0.5,) * 3, std=(0.5,) * 3)
SSDLITE = "torchvision/ssdlite320_mobilenet_v3_large"


def test_the_detectors_are_those_without_masks_and_keypoints() -> None:
    every = torchvision.models.list_models(module=torchvision.models.detection)
    assert set(detector_names()) == {name for name in every if "mask" not in name and "keypoint" not in name}
    assert set(detector_names()) < set(model_names())
    assert is_detector(SSDLITE)
    assert not any(map(is_detector, ("torchvision/resnet18", "timm/fcos_x", "my.models:fasterrcnn_x", "gpt")))


def test_a_detector_finds_what_torchvisions_own_does() -> None:
    torch.manual_seed(0)
    ours = build_model(ModelConfig(name=SSDLITE), INFO).eval()
    theirs = torchvision.models.get_model(
        SSDLITE.partition("/")[2], weights=None, weights_backbone=None, num_classes=4
    ).eval()
    theirs.load_state_dict(ours.state_dict())
    images = torch.rand(1, 3, 320, 320)  # the size to which theirs resizes, by the same mean and std
    with torch.no_grad():
        found, expected = ours((images - 0.5) / 0.5)[0], theirs(list(images))[0]
    assert len(found["boxes"]) > 0
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", detector_names())
def test_the_head_is_replaced_whatever_the_detector(name: str) -> None:
    arguments = {"weights": None, "weights_backbone": None}
    with torch.device("meta"):
        model = as_given(torchvision.models.get_model(name, num_classes=91, **arguments))
        random = swap_head(name, model, 3, trainable_backbone_layers=2)
        expected = torchvision.models.get_model(name, num_classes=4, **arguments)
    shapes = {key: value.shape for key, value in model.state_dict().items()}
    assert shapes == {key: value.shape for key, value in expected.state_dict().items()}
    assert random and random < shapes.keys()


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ({"weights_backbone": "DEFAULT"}, "model.pretrained"),
        ({"min_size": 300}, "data.image_size"),
        ({"image_mean": [0.5]}, "data.normalize"),
        ({"wieghts": 1}, "wieghts"),
    ],
)
def test_arguments_that_have_keys_of_their_own_are_refused(args: dict[str, object], said: str) -> None:
    with pytest.raises(BadFileError, match=rf"^model\.args.*{said}"):
        build_model(ModelConfig(name=SSDLITE, args=args), INFO)
