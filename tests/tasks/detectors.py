"""A detector small enough for a test, named in files as ``tests.tasks.detectors:tiny``."""

from __future__ import annotations

from typing import Any

from torch import nn
from torchvision.models.detection import FasterRCNN
from torchvision.models.detection.faster_rcnn import FastRCNNPredictor, TwoMLPHead
from torchvision.models.detection.rpn import AnchorGenerator
from torchvision.ops import MultiScaleRoIAlign

from hpc_train.training.models.torchvision import as_given


def tiny(num_classes: int) -> nn.Module:
    """Return a Faster R-CNN that samples regions by random numbers, with BatchNorm."""
    backbone: Any = nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, stride=2, padding=1),
    )
    backbone.out_channels = 8
    return as_given(
        FasterRCNN(
            backbone,
            rpn_anchor_generator=AnchorGenerator(((8, 16),), ((1.0,),)),
            rpn_pre_nms_top_n_train=40,
            rpn_pre_nms_top_n_test=40,
            rpn_post_nms_top_n_train=30,
            rpn_post_nms_top_n_test=30,
            rpn_batch_size_per_image=16,
            box_roi_pool=MultiScaleRoIAlign(["0"], 3, 2),
            box_head=TwoMLPHead(8 * 9, 16),
            box_predictor=FastRCNNPredictor(16, num_classes + 1),
            box_batch_size_per_image=12,
            box_score_thresh=0.0,
            box_detections_per_img=20,
        )
    )
