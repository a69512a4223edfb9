"""A small convolutional network that learns CIFAR-10 in few epochs, for cifar10-94.yaml and cifar10-cpu.yaml.

After the network of airbench94 (arXiv:2404.00498): a fixed first layer that whitens patches of 2 x 2 pixels,
three groups of two convolutions whose weights begin as the identity, and logits averaged over mirrored and
shifted images in evaluation. Whitening here needs no data: for natural images the principal components of
small patches are close to products of opponent colours and a cosine transform; their scales are measured.

Legend: B images, H and W their height and width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

#: Standard deviation of the 12 components, measured on CIFAR-10's training images normalized as in the files,
#: by colour (brightness, red against blue, green against both) and cosine (constant, along x, along y, both).
_SCALES = (3.19, 0.584, 0.636, 0.233, 0.895, 0.0628, 0.0786, 0.0154, 0.440, 0.0429, 0.0498, 0.0125)
#: Keeps the weakest components, which are mostly noise, from being amplified to the size of the others.
_NOISE = 0.02


class WhiteningConv(nn.Conv2d):
    """Decorrelates 2 x 2 patches: (B, 3, H, W) to (B, 24, H-1, W-1), 12 components and their negatives."""

    def __init__(self) -> None:
        super().__init__(3, 24, kernel_size=2)
        assert self.bias is not None
        nn.init.zeros_(self.bias)
        cosines = torch.tensor([[1.0, 1.0], [1.0, -1.0]]) / 2**0.5
        colours = torch.tensor([[1.0, 1.0, 1.0], [1.0, 0.0, -1.0], [1.0, -2.0, 1.0]])
        colours = colours / colours.norm(dim=1, keepdim=True)
        components = torch.einsum("kc,yi,xj->kyxcij", colours, cosines, cosines).reshape(12, 3, 2, 2)
        scaled = components / (torch.tensor(_SCALES) ** 2 + _NOISE**2).sqrt().view(12, 1, 1, 1)
        self.weight.data.copy_(torch.cat([scaled, -scaled]))
        self.weight.requires_grad_(False)


class Group(nn.Sequential):
    """Two convolutions at half the resolution: (B, before, H, W) to (B, after, H // 2, W // 2)."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__(
            _identity_conv(before, after),
            nn.MaxPool2d(2),
            nn.BatchNorm2d(after, momentum=0.4),
            nn.GELU(),
            _identity_conv(after, after),
            nn.BatchNorm2d(after, momentum=0.4),
            nn.GELU(),
        )


def _identity_conv(before: int, after: int) -> nn.Conv2d:
    conv = nn.Conv2d(before, after, kernel_size=3, padding=1, bias=False)
    nn.init.dirac_(conv.weight.data[:before])
    return conv


class SpeedNet(nn.Module):
    """Logits (B, num_classes) of images (B, 3, 32, 32).

    Evaluation averages ``views`` of each image: 1, 2 (mirrored) or 6 (shifted by a pixel too).
    """

    def __init__(
        self, num_classes: int = 10, widths: tuple[int, int, int] = (64, 256, 256), views: int = 6
    ) -> None:
        super().__init__()
        if views not in (1, 2, 6):
            raise ValueError(f"views: {views} is not 1, 2 or 6")
        first, second, third = widths
        self.views = views
        self.features = nn.Sequential(
            WhiteningConv(),
            nn.GELU(),
            Group(24, first),
            Group(first, second),
            Group(second, third),
            nn.MaxPool2d(3),
            nn.Flatten(),
        )
        self.head = nn.Linear(third, num_classes, bias=False)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits; in evaluation, averaged over the views."""
        if self.training or self.views == 1:
            return self._logits(images)
        if self.views == 2:
            return self._mirrored(images)
        shifted = pad(images, (1, 1, 1, 1), mode="reflect")
        moved = self._mirrored(shifted[..., :-2, :-2]) + self._mirrored(shifted[..., 2:, 2:])
        return 0.5 * self._mirrored(images) + 0.25 * moved

    def _mirrored(self, images: Tensor) -> Tensor:
        return 0.5 * (self._logits(images) + self._logits(images.flip(-1)))

    def _logits(self, images: Tensor) -> Tensor:
        logits: Tensor = self.head(self.features(images))
        return logits / 9.0


def build(num_classes: int = 10, widths: list[int] | None = None, views: int = 6) -> SpeedNet:
    """Return the network; ``widths``: channels of the three groups (default: airbench94's)."""
    first, second, third = widths or (64, 256, 256)
    return SpeedNet(num_classes, (first, second, third), views)
