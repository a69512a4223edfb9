from __future__ import annotations

import json
import subprocess
import sys

import pytest
from torch import nn

from hpc_train.models.inspection import has_batchnorm
from hpc_train.models.names import list_names, main


def test_names_hold_models_and_data_sets_of_classification() -> None:
    names = list_names()
    assert {"resnet50", "vit_tiny_patch16_224"} <= set(names["timm"])
    assert "resnet50" in names["torchvision"]
    assert not {"fasterrcnn_resnet50_fpn", "fcn_resnet50", "r3d_18"} & set(names["torchvision"])
    assert {"CIFAR10", "MNIST", "Food101", "ImageNet"} <= set(names["datasets"])
    assert not {"VisionDataset", "KittiFlow", "FakeData", "DatasetFolder"} & set(names["datasets"])


@pytest.mark.parametrize(
    ("name", "answer"),
    [("timm/resnet18", True), ("timm/vit_tiny_patch16_224", False), ("torchvision/vgg11", False)],
)
def test_batchnorm_is_told_of_a_named_model(
    name: str, answer: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--batchnorm", name]) == 0
    assert json.loads(capsys.readouterr().out) == {"has_batchnorm": answer}


def test_batchnorm_follows_the_models_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--batchnorm", "timm/resnet18", "--args", '{"norm_layer": "groupnorm"}']) == 0
    assert json.loads(capsys.readouterr().out) == {"has_batchnorm": False}


def test_an_unknown_model_ends_with_65(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--batchnorm", "timm/resnet19"]) == 65
    assert "did you mean" in capsys.readouterr().err


def test_synchronised_batchnorm_counts_and_instance_norm_does_not() -> None:
    assert has_batchnorm(nn.Sequential(nn.SyncBatchNorm(2)))
    assert not has_batchnorm(nn.Sequential(nn.InstanceNorm2d(2), nn.GroupNorm(1, 2)))


@pytest.mark.slow
def test_the_module_prints_one_json_object() -> None:
    command = [sys.executable, "-m", "hpc_train.models.names"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    keys = {"timm", "torchvision", "datasets", "timm_optimizers", "torch_schedules"}
    assert json.loads(done.stdout).keys() == keys
