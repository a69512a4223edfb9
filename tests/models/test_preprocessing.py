"""``data.normalize: weights`` prepares images as the pretrained weights expect them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hpc_train.errors import BadFileError
from hpc_train.experiment.config.schema import Experiment
from hpc_train.training.datasets.images import centre_square
from hpc_train.training.datasets.types import DataInfo
from hpc_train.training.models.preprocessing import normalized_otherwise, with_preprocessing
from tests.datasets.samples import experiment, random_images


def of(model: str, **data: Any) -> Experiment:
    given = experiment(normalize="weights", **data)
    return given.model_copy(update={"model": given.model.model_copy(update={"name": model})})


@pytest.mark.parametrize(
    ("model", "mean", "interpolation", "crop"),
    [
        ("timm/vit_base_patch16_224", 0.5, "bicubic", 0.9),
        ("timm/resnet18.a1_in1k", 0.485, "bicubic", 0.95),
        ("torchvision/resnet50", 0.485, "bilinear", 224 / 232),
    ],
)
def test_mean_std_interpolation_and_crop_are_those_of_the_weights(
    model: str, mean: float, interpolation: str, crop: float
) -> None:
    data = with_preprocessing(of(model)).data
    assert data.normalize is not None
    assert (data.normalize.mean[0], len(data.normalize.std)) == (mean, 3)
    assert (data.interpolation, data.eval_crop) == (interpolation, crop)


@pytest.mark.parametrize(
    ("model", "mean", "std"),
    [
        ("fcn_resnet50", 0.485, 0.229),
        ("fasterrcnn_resnet50_fpn", 0.485, 0.229),
        ("ssdlite320_mobilenet_v3_large", 0.5, 0.5),
    ],
)
def test_segmentation_and_detection_keep_the_files_image_size(model: str, mean: float, std: float) -> None:
    data = with_preprocessing(of(f"torchvision/{model}", interpolation="bicubic", eval_crop=0.5)).data
    assert data.normalize is not None
    assert (data.normalize.mean[0], data.normalize.std[0]) == (mean, std)
    assert (data.interpolation, data.eval_crop) == ("bicubic", 0.5)


@pytest.mark.parametrize(
    ("model", "keys", "is_reported"),
    [
        ("timm/vit_base_patch16_224", {}, True),
        ("timm/vit_base_patch16_224", {"normalize": {"mean": [0.5] * 3, "std": [0.5] * 3}}, False),
        ("timm/resnet18", {}, False),
        ("timm/no_such", {}, False),
        ("own:model", {}, False),
    ],
)
@pytest.mark.parametrize("pretrained", [True, False])
def test_weights_that_expect_another_normalization_are_reported(
    model: str, keys: dict[str, Any], is_reported: bool, pretrained: bool
) -> None:
    given = experiment(**keys)
    section = given.model.model_copy(update={"name": model, "pretrained": pretrained})
    info = DataInfo(10, 3, (0.491, 0.482, 0.447), (0.247, 0.243, 0.262))
    line = normalized_otherwise(given.model_copy(update={"model": section}), info)
    assert (line is not None and "write data.normalize: weights" in line) == (is_reported and pretrained)


def test_an_eval_crop_of_the_file_is_kept() -> None:
    assert with_preprocessing(of("timm/vit_base_patch16_224", eval_crop=0.5)).data.eval_crop == 0.5


def test_other_files_stay_as_they_are() -> None:
    given = experiment()
    assert with_preprocessing(given) is given


@pytest.mark.parametrize("model", ["timm/test_no_such", "timm/resnet18.no_such", "torchvision/no_such"])
def test_a_model_whose_weights_say_nothing_is_refused(model: str) -> None:
    with pytest.raises(BadFileError, match=rf"^data\.normalize: {model} has no pretrained weights.*mean: "):
        with_preprocessing(of(model))


def test_the_interpolation_is_that_of_torchvision() -> None:
    from torchvision.transforms import InterpolationMode
    from torchvision.transforms.v2 import functional as tvf

    (image,) = random_images(1)
    expected = tvf.resize(image, [8, 8], interpolation=InterpolationMode.BICUBIC, antialias=True)
    assert torch.equal(centre_square(image, 8, interpolation="bicubic"), expected)
    assert not torch.equal(centre_square(image, 8), expected)
