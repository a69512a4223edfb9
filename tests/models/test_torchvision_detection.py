"""torchvision's detectors compute the same as without us, on images that we have normalized."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torchvision
from torchvision.ops import box_iou

from hpc_train.errors import BadFileError
from hpc_train.experiment.config.training_sections import ModelConfig
from hpc_train.experiment.data_facts.image_facts import is_detector
from hpc_train.training.datasets.types import DataInfo
from hpc_train.training.models.building import build_model
from hpc_train.training.models.torchvision import (
    as_given,
    create_detector,
    detector_names,
    model_names,
    swap_detector_head,
)

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
        random = swap_detector_head(name, model, 3, trainable_backbone_layers=2)
        expected = torchvision.models.get_model(name, num_classes=4, **arguments)
    shapes = {key: value.shape for key, value in model.state_dict().items()}
    assert shapes == {key: value.shape for key, value in expected.state_dict().items()}
    assert random and random < shapes.keys()


@pytest.mark.parametrize(
    "name", ["ssd300_vgg16", "ssdlite320_mobilenet_v3_large", "fcos_resnet50_fpn", "retinanet_resnet50_fpn"]
)
def test_losses_are_means_over_the_images(name: str) -> None:
    """Use images with two and one boxes fewer, so that micro-batches of any size add up."""
    with torch.device("meta"):
        model: Any = create_detector(name, 2)
    corners = torch.tensor([[4.0, 4.0, 40.0, 40.0], [8.0, 20.0, 60.0, 58.0], [30.0, 2.0, 34.0, 9.0]])
    boxes = [corners, corners[:1], corners[:0]]
    targets = [{"boxes": each.double(), "labels": torch.ones(len(each), dtype=torch.int64)} for each in boxes]
    generator = torch.Generator().manual_seed(0)
    grid = torch.cartesian_prod(torch.arange(0, 64, 8), torch.arange(0, 64, 8)).double()
    anchors = [torch.cat([grid, grid + 16], dim=1)] * 3
    sizes = {"cls_logits": 3, "bbox_regression": 4, "bbox_ctrness": 1}
    outputs = {
        key: torch.randn(3, len(grid), size, generator=generator, dtype=torch.float64)
        for key, size in sizes.items()
    }

    def losses(places: list[int]) -> dict[str, torch.Tensor]:
        own = [targets[place] for place in places], {key: value[places] for key, value in outputs.items()}
        here = [anchors[place] for place in places]
        if name.startswith("retinanet"):
            return model.compute_loss(*own, here)  # type: ignore[no-any-return]
        if name.startswith("fcos"):
            return model.compute_loss(*own, here, [len(grid)])  # type: ignore[no-any-return]
        matched = [
            model.proposal_matcher(box_iou(each["boxes"], anchor))
            if len(each["boxes"])
            else torch.full((len(grid),), -1)
            for each, anchor in zip(own[0], here, strict=True)
        ]
        return model.compute_loss(*own, here, matched)  # type: ignore[no-any-return]

    together, alone = losses([0, 1, 2]), [losses([place]) for place in range(3)]
    for key, value in together.items():
        torch.testing.assert_close(value, sum(each[key] for each in alone) / 3, rtol=1e-12, atol=0)


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
