"""A model as slow as the environment says: so that a run and its reference are the same."""

from __future__ import annotations

import os
import time

import torch
from torch import Tensor, nn

from hpc_train.rank import signals
from tests.end_to_end.parts import Net

#: Seconds that each forward of a micro-batch takes longer, in training and in evaluation, until the rank is
#: asked to stop.
TRAIN_S, EVAL_S = "PACED_TRAIN_S", "PACED_EVAL_S"


class Paced(Net):
    def forward(self, images_BCHW: Tensor) -> Tensor:
        _pause(self)
        out: Tensor = super().forward(images_BCHW)
        return out


def net(num_classes: int, norm: bool = True, dropout: float = 0.2) -> nn.Module:
    return Paced(num_classes, norm=norm, dropout=dropout)


def vit(num_classes: int, dropout: float = 0.1, stem_dropout: float = 0.0, depth: int = 4) -> nn.Module:
    """A transformer whose layers ranks can share, with dropout and stochastic depth.

    ``stem_dropout`` is drawn before the first block: in a pipeline's first stage, as by a rank alone.
    """
    import timm  # here alone: half a second of each rank

    model: nn.Module = timm.create_model(
        "test_vit", num_classes=num_classes, in_chans=1, img_size=32, patch_size=8, embed_dim=16,
        depth=depth, num_heads=2, proj_drop_rate=dropout, drop_path_rate=dropout, pos_drop_rate=stem_dropout,
    )  # fmt: skip
    model.register_forward_pre_hook(_pause)
    return model


def graph_network(num_classes: int) -> nn.Module:
    """The example's, for ``OWN_TASK``."""
    from examples.graph_network import GraphNetwork

    model = GraphNetwork(num_classes, width=16, depth=2)
    model.register_forward_pre_hook(_pause)
    return model


def _pause(model: nn.Module, inputs: object = None) -> None:
    until = time.monotonic() + float(os.environ.get(TRAIN_S if model.training else EVAL_S, "0"))
    while (left_s := until - time.monotonic()) > 0 and not signals.install():
        time.sleep(min(left_s, 0.05))


def channels_last_only(num_classes: int) -> nn.Module:
    """The same net without BatchNorm and dropout, which refuses weights of another layout."""
    return ChannelsLastOnly(num_classes, norm=False, dropout=0.0)


class ChannelsLastOnly(Paced):
    def forward(self, images_BCHW: Tensor) -> Tensor:
        weight_OIHW = self.get_parameter("1.0.conv.weight")
        assert weight_OIHW.is_contiguous(memory_format=torch.channels_last), "the weights lie otherwise"
        out: Tensor = super().forward(images_BCHW)
        return out
