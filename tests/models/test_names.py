from __future__ import annotations

from torch import nn

from hpc_train.training.models.names import list_names
from hpc_train.training.strategies.batchnorm import has_batchnorm


def test_names_hold_models_and_data_sets_that_tasks_take() -> None:
    names = list_names()
    assert {"resnet50", "vit_tiny_patch16_224"} <= set(names["timm"])
    assert {"resnet50", "fcn_resnet50", "fasterrcnn_resnet50_fpn"} <= set(names["torchvision"])
    assert not {"maskrcnn_resnet50_fpn", "r3d_18"} & set(names["torchvision"])
    assert {"CIFAR10", "MNIST", "Food101", "ImageNet"} <= set(names["datasets"])
    assert not {"VisionDataset", "KittiFlow", "FakeData", "DatasetFolder"} & set(names["datasets"])


def test_synchronised_batchnorm_counts_and_instance_norm_does_not() -> None:
    assert has_batchnorm(nn.Sequential(nn.SyncBatchNorm(2)))
    assert not has_batchnorm(nn.Sequential(nn.InstanceNorm2d(2), nn.GroupNorm(1, 2)))
