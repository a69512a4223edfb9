"""A model as slow as the environment says: a run that is to be caught and a quiet one are the same run."""

from __future__ import annotations

import os
import time

from torch import Tensor, nn

from tests.end_to_end.parts import Net

#: Seconds that each forward of a micro-batch takes longer, in training and in evaluation.
TRAIN_S, EVAL_S = "PACED_TRAIN_S", "PACED_EVAL_S"


class Paced(Net):
    def forward(self, images_BCHW: Tensor) -> Tensor:
        time.sleep(float(os.environ.get(TRAIN_S if self.training else EVAL_S, "0")))
        out: Tensor = super().forward(images_BCHW)
        return out


def net(num_classes: int, norm: bool = True, dropout: float = 0.2) -> nn.Module:
    return Paced(num_classes, norm=norm, dropout=dropout)
