"""A small FCOS detector for images of about 160 x 120 pixels, trained from random weights on CPU cores.

Used by bccd-fcos.yaml: torchvision's FCOS with one level of features, whose pixels are ``STRIDE`` pixels of
the image apart, instead of five, and without its own resizing and normalization, which hpc-train does.
"""

from __future__ import annotations

from torch import nn
from torchvision.models.detection import FCOS
from torchvision.models.detection.anchor_utils import AnchorGenerator

from hpc_train.plugins import as_given

STRIDE = 4


class Backbone(nn.Sequential):
    """Convolutions with GroupNorm, since batches are small: (B, 3, H, W) → (B, width, H/4, W/4)."""

    def __init__(self, width: int) -> None:
        super().__init__(
            *_block(3, width // 2, stride=2),
            *_block(width // 2, width, stride=2),
            *_block(width, width, dilation=2),
            *_block(width, width, dilation=4),
        )
        self.out_channels = width


def _block(channels: int, to: int, stride: int = 1, dilation: int = 1) -> list[nn.Module]:
    convolution = nn.Conv2d(channels, to, 3, stride, padding=dilation, dilation=dilation, bias=False)
    return [convolution, nn.GroupNorm(8, to), nn.ReLU(inplace=True)]


def small_fcos(num_classes: int, width: int = 64) -> nn.Module:
    """Return the detector for ``num_classes`` classes without the background."""
    # The size is the unit of the box regression, and 1.5 of it how far from an object's center it is learned.
    anchors = AnchorGenerator(sizes=((2 * STRIDE,),), aspect_ratios=((1.0,),))
    return as_given(FCOS(Backbone(width), num_classes + 1, anchor_generator=anchors, score_thresh=0.05))
